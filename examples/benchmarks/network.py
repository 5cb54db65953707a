"""Simulated machines on one switch: they are network namespaces, and their links can be throttled. Needs Linux and
root.

Law: everything is made by `ip` and `tc` under names that contain this process's id, and removed in `close`. The switch
is the kernel's bridge or, where packets are to be delayed or lost, a process of `delay`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import subprocess

from p2p_diloco.cli.processes import module, tied

BRIDGE = "br0"
"""The bridge to which all machines are connected."""
CONGESTION, CONGESTION_FILE = "cubic", "/proc/sys/net/ipv4/tcp_congestion_control"
"""TCP's congestion control on the simulated machines: the default of most systems. If
net.ipv4.tcp_allowed_congestion_control doesn't list it, they use that of this real machine."""
WAIT_S = 20.0
"""Deadline for a command, or for an answer of the switch's process."""
_numbers = itertools.count(1)


class NoNetwork(Exception):
    """Network namespaces can't be made on this machine."""


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S)
    except OSError as error:
        raise NoNetwork(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        raise NoNetwork(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """A switch and the machines connected to it.

    Args:
        rtt_s: the round trip time that the switch adds between any two machines.
        loss: the fraction of the packets that the switch loses, in each direction.

    Raises:
        NoNetwork: the switch can't be made.
    """

    def __init__(self, rtt_s: float = 0.0, loss: float = 0.0) -> None:
        self.congestion = ""
        """The machines' TCP congestion control, known once there is a machine; empty if it can't be read."""
        self.switch = f"p2pd{os.getpid()}-{next(_numbers)}"
        self.machines: dict[str, str] = {}
        self._delaying: subprocess.Popen[bytes] | None = None
        _run("ip", "netns", "add", self.switch)
        try:
            if rtt_s or loss:
                self._delaying = self._delayed(rtt_s / 2, loss)
            else:
                self.add_bridge(BRIDGE)
        except NoNetwork:
            self.close()
            raise

    def add_bridge(self, name: str) -> None:
        """Add a bridge. Only machines on the same bridge can reach each other."""
        self._at_switch("link", "add", name, "type", "bridge")
        self._at_switch("link", "set", name, "up")

    def connect(self, name: str, bridge: str = BRIDGE) -> None:
        """Connect a machine to a bridge. Its connection to any other bridge ends."""
        self._at_switch("link", "set", f"port{self._number(name)}", "master", bridge)

    def machine(self, name: str) -> list[str]:
        """The words to put before a command so that it runs on the machine `name`. The first call makes the machine."""
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
        self._at_switch("link", "set", f"port{number}", "up")
        if self._delaying is None:
            self.connect(name)
        else:
            _told(self._delaying, f"port{number}")
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
        """Remove the switch and all machines. The links are removed with them."""
        if self._delaying is not None:
            self._delaying.kill()
            self._delaying.communicate()
        for number in range(1, len(self.machines) + 1):
            with contextlib.suppress(NoNetwork):
                _run("ip", "netns", "del", f"{self.switch}-{number}")
        with contextlib.suppress(NoNetwork):
            _run("ip", "netns", "del", self.switch)

    def _delayed(self, delay_s: float, loss: float) -> subprocess.Popen[bytes]:
        program = module("examples.benchmarks.delay", str(delay_s), str(loss))
        try:
            return tied(
                ["ip", "netns", "exec", self.switch, *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise NoNetwork(f"ip: {error.strerror}") from None

    def _number(self, name: str) -> int:
        return list(self.machines).index(name) + 1

    def _at_switch(self, *words: str) -> None:
        _run("ip", "-n", self.switch, *words)


def _told(switch: subprocess.Popen[bytes], port: str) -> None:
    """Tell the switch's process to connect a port, and wait until it has done so."""
    assert switch.stdin is not None
    assert switch.stdout is not None
    assert switch.stderr is not None
    with contextlib.suppress(BrokenPipeError):
        switch.stdin.write(f"{port}\n".encode())
        switch.stdin.flush()
    if not select.select([switch.stdout], [], [], WAIT_S)[0]:
        raise NoNetwork(f"the switch's process did not answer within {WAIT_S:.0f} s")
    if not switch.stdout.readline():
        said = switch.stderr.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NoNetwork(f"the switch's process ended: {said[-1]}")
