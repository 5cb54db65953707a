"""A small internet of network namespaces: public machines, and private ones behind routers that masquerade.

Law: all names contain this process's id; everything is removed in `close`. Needs Linux, root and `ip`; private machines
need `nft`, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from itertools import count

_numbers = count(1)


def missing(*tools: str) -> str | None:
    """The reason why no internet can be made on this machine; None: it can. `tools`: further commands that are needed;
    private machines need `nft`."""
    if os.geteuid() != 0:
        return "needs root"
    if absent := [tool for tool in ("ip", *tools) if shutil.which(tool) is None]:
        return f"needs {' and '.join(absent)}"
    try:
        Internet().close()
    except RuntimeError as error:
        return f"no network namespaces here: {error}"
    return None


class Internet:
    """Machines on one network, 20.0.0.0/24. All private networks are 192.168.1.0/24, as so many homes' are."""

    def __init__(self) -> None:
        self.name = f"inet{os.getpid()}-{next(_numbers)}"
        self._spaces: list[str] = []
        self._places = count(1)
        self._space("net")
        self._ip("net", "link", "add", "br0", "type", "bridge")
        self._ip("net", "link", "set", "br0", "up")

    def public(self, name: str) -> str:
        """Add a machine that others can dial; returns its address."""
        self._space(name)
        return self._on_the_net(name)

    def public6(self, name: str) -> str:
        """Add a machine that others can dial, by IPv6 alone; returns its address."""
        self._space(name)
        return self._on_the_net(name, "fd00:20::{}/64")

    def alone(self, name: str) -> None:
        """Add a machine that no network joins with the others."""
        self._space(name)

    def private(self, name: str) -> None:
        """Add a machine behind a router of its own that masquerades, and lets nothing in."""
        router = f"{name}-r"
        self._space(router)
        self._space(name)
        self._on_the_net(router)
        self._cable(router, "lan", name, "eth0")
        self._ip(router, "addr", "add", "192.168.1.1/24", "dev", "lan")
        self._ip(name, "addr", "add", "192.168.1.2/24", "dev", "eth0")
        for space, link in ((router, "lan"), (name, "eth0")):
            self._ip(space, "link", "set", link, "up")
        self._ip(name, "route", "add", "default", "via", "192.168.1.1")
        self._in(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        rules = """
            table ip nat {
                chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
                chain in { type filter hook forward priority 0; iifname "eth0" ct state new drop; }
            }"""
        self._in(router, "nft", "-f", "-", given=rules)

    def cut(self, name: str, address: str) -> None:
        """Drop all packets that come to a machine from an address."""
        rules = f"""
            table ip cut {{
                chain in {{ type filter hook input priority 0; ip saddr {address} drop; }}
            }}"""
        self._in(name, "nft", "-f", "-", given=rules)

    def heal(self, name: str) -> None:
        """Undo `cut`."""
        with contextlib.suppress(RuntimeError):
            self._in(name, "nft", "delete", "table", "ip", "cut")

    def at(self, name: str) -> list[str]:
        """The beginning of a command line that runs on a machine."""
        return ["ip", "netns", "exec", f"{self.name}-{name}"]

    def close(self) -> None:
        """Remove everything; links are removed with their namespaces."""
        for space in self._spaces:
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "del", space)

    # -- inside

    def _space(self, name: str) -> None:
        _run("ip", "netns", "add", f"{self.name}-{name}")
        self._spaces.append(f"{self.name}-{name}")
        self._ip(name, "link", "set", "lo", "up")

    def _on_the_net(self, name: str, address: str = "20.0.0.{}/24") -> str:
        number = next(self._places)
        self._cable("net", f"port{number}", name, "eth0")
        self._ip("net", "link", "set", f"port{number}", "master", "br0", "up")
        once = ["nodad"] if ":" in address else []  # without a second of looking for the same address elsewhere
        self._ip(name, "addr", "add", address.format(number), "dev", "eth0", *once)
        self._ip(name, "link", "set", "eth0", "up")
        return address.format(number).partition("/")[0]

    def _cable(self, here: str, end: str, there: str, other_end: str) -> None:
        other = f"{self.name}-{there}"
        self._ip(here, "link", "add", end, "type", "veth", "peer", "name", other_end, "netns", other)

    def _ip(self, name: str, *words: str) -> None:
        _run("ip", "-n", f"{self.name}-{name}", *words)

    def _in(self, name: str, *words: str, given: str = "") -> None:
        _run(*self.at(name), *words, given=given)


def _run(*words: str, given: str = "") -> None:
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
