"""Simulated machines on one switch: network namespaces with links that can be throttled. Needs Linux and root.

Law: everything is made by `ip` and `tc` under names that contain this process's id, and removed in `close`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess

BRIDGE = "br0"
"""The bridge to which all machines are connected."""
CONGESTION, CONGESTION_FILE = "cubic", "/proc/sys/net/ipv4/tcp_congestion_control"
"""TCP's congestion control on these machines, the default of most systems. If net.ipv4.tcp_allowed_congestion_control
doesn't list it, they use this machine's."""
_numbers = itertools.count(1)


class NoNetwork(Exception):
    """Network namespaces can't be made on this machine."""


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except OSError as error:
        raise NoNetwork(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        raise NoNetwork(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """A switch and the machines connected to it."""

    def __init__(self) -> None:
        """Make the switch, or raise NoNetwork."""
        self.congestion = ""
        """The machines' TCP congestion control, known once there is a machine; empty if it can't be read."""
        self.switch = f"p2pd{os.getpid()}-{next(_numbers)}"
        self.machines: dict[str, str] = {}
        _run("ip", "netns", "add", self.switch)
        try:
            self.add_bridge(BRIDGE)
        except NoNetwork:
            self.close()
            raise

    def add_bridge(self, name: str) -> None:
        """Add a bridge. Only machines on the same bridge can reach each other."""
        self._at_switch("link", "add", name, "type", "bridge")
        self._at_switch("link", "set", name, "up")

    def connect(self, name: str, bridge: str = BRIDGE) -> None:
        """Connect a machine to a bridge, and disconnect it from its former one."""
        self._at_switch("link", "set", f"port{self._number(name)}", "master", bridge)

    def machine(self, name: str) -> list[str]:
        """The beginning of a command line that runs on a machine. The machine is made at its first use."""
        number = self._number(name) if name in self.machines else len(self.machines) + 1
        here = ["ip", "netns", "exec", f"{self.switch}-{number}"]
        if name not in self.machines:
            self._add(name, number, here)
        return here

    def _add(self, name: str, number: int, here: list[str]) -> None:
        space = f"{self.switch}-{number}"
        self.machines[name] = f"10.77.0.{number}"
        _run("ip", "netns", "add", space)
        self._at_switch("link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
        self.connect(name)
        self._at_switch("link", "set", f"port{number}", "up")
        _run("ip", "-n", space, "addr", "add", f"{self.machines[name]}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", space, "link", "set", link, "up")
        with contextlib.suppress(NoNetwork):
            _run(*here, "sh", "-c", f"echo {CONGESTION} > {CONGESTION_FILE}")
        with contextlib.suppress(NoNetwork):
            self.congestion = _run(*here, "cat", CONGESTION_FILE).strip()

    def throttle(self, name: str, mbit: float) -> None:
        """Limit a machine's link to `mbit` Mbit/s in each direction."""
        rate = ("root", "tbf", "rate", f"{round(1000 * mbit)}kbit", "burst", "128kb", "latency", "50ms")
        number = self._number(name)
        _run("tc", "-n", f"{self.switch}-{number}", "qdisc", "replace", "dev", "eth0", *rate)
        _run("tc", "-n", self.switch, "qdisc", "replace", "dev", f"port{number}", *rate)

    def close(self) -> None:
        """Remove everything; links are removed with their namespaces."""
        for number in range(1, len(self.machines) + 1):
            with contextlib.suppress(NoNetwork):
                _run("ip", "netns", "del", f"{self.switch}-{number}")
        with contextlib.suppress(NoNetwork):
            _run("ip", "netns", "del", self.switch)

    def _number(self, name: str) -> int:
        return list(self.machines).index(name) + 1

    def _at_switch(self, *words: str) -> None:
        _run("ip", "-n", self.switch, *words)
