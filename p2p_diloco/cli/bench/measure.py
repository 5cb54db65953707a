"""Figures of processes, and of rounds: processor time, memory, medians.

Law: reads what the system tells, and reckons; starts and ends nothing.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from p2p_diloco.cli.bench.parts import TRAINING
from p2p_diloco.cli.demo.processes import Child

MAIN, NODE, DAEMON, FORKED = "process", "node", "p2pd", "forked"
"""What a process of a peer is: the one that was started, our node, libp2p's daemon, what Hivemind forks."""
NODE_PROGRAM = "p2p_diloco.node"
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one contender: of its peers the slowest, for who is early waits for the others.

    Seconds. `parts`: of the slowest peer. `cpu_s`: of all peers together, by what the processes are. Waiting and
    hidden time: a mean peer's.
    """

    took_s: float
    parts: Mapping[str, float]
    cpu_s: Mapping[str, float]
    waiting_s: float
    hidden_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one peer's processes held, at most or at a moment. `shared`: counted in two of them."""

    by_role: Mapping[str, int]
    shared: int = 0

    @property
    def total(self) -> int:
        """Of all its processes, what is shared counted once."""
        return sum(self.by_role.values()) - self.shared


@dataclass(frozen=True, slots=True)
class Result:
    """What a contender came to. `sent_bytes`: that a peer sends in a round, by calculation, without headers."""

    name: str
    rounds: tuple[Round, ...]
    sent_bytes: int
    peers: int
    idle: Memory = field(default_factory=lambda: Memory({}))
    peak: Memory = field(default_factory=lambda: Memory({}))
    failed: str = ""

    @property
    def median_s(self) -> float:
        """The usual round."""
        return statistics.median(one.took_s for one in self.rounds)

    @property
    def best_s(self) -> float:
        """The quickest round."""
        return min(one.took_s for one in self.rounds)

    @property
    def waiting_s(self) -> float:
        """How long training stands still in a usual round."""
        return statistics.median(one.waiting_s for one in self.rounds)

    @property
    def hidden_s(self) -> float:
        """How long it goes on during the exchange in a usual round."""
        return statistics.median(one.hidden_s for one in self.rounds)

    @property
    def parts(self) -> Figures:
        """Each part of a round: the median."""
        return medians(one.parts for one in self.rounds)

    @property
    def training_share(self) -> float | None:
        """Of a usual round's time that of inner steps; None: there were none that take time."""
        shares = [one.parts[TRAINING] / one.took_s for one in self.rounds if TRAINING in one.parts]
        return statistics.median(shares) if shares else None

    @property
    def cpu_s_per_gb(self) -> Figures:
        """Processor seconds for each GB that is sent, by what the processes are; over all rounds, for the system counts
        in hundredths.
        """
        sent_gb = len(self.rounds) * self.peers * self.sent_bytes / 1e9
        roles = dict.fromkeys(role for one in self.rounds for role in one.cpu_s)
        return {role: sum(one.cpu_s.get(role, 0.0) for one in self.rounds) / sent_gb for role in roles}

    @property
    def over_idle(self) -> int:
        """Bytes of memory that a peer took beyond what its processes take with no model at all."""
        return self.peak.total - self.idle.total


def medians(of: Iterable[Mapping[str, float]]) -> Figures:
    """The median by name; a name that is missing counts as 0."""
    listed = list(of)
    names = dict.fromkeys(name for one in listed for name in one)
    return {name: statistics.median(one.get(name, 0.0) for one in listed) for name in names}


def round_of(lines: Sequence[Mapping[str, object]], cpu_s: Mapping[str, float]) -> Round:
    """A round from what its peers said of it."""
    slowest = max(lines, key=lambda line: _number(line["took_s"]))
    parts = slowest["parts"]
    assert isinstance(parts, dict)
    took_s = _number(slowest["took_s"])
    waiting = [_number(line.get("waiting_s", line["took_s"])) for line in lines]
    hidden = [_number(line.get("hidden_s", 0.0)) for line in lines]
    return Round(took_s, parts, dict(cpu_s), statistics.mean(waiting), statistics.mean(hidden))


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return float(value)


# -- processes


def cpu_s(children: Iterable[Child]) -> Figures:
    """Processor seconds so far, user and system, by what the processes are."""
    used: Figures = {}
    for child in children:
        for role, process in _roles(child):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used[role] = used.get(role, 0.0) + times.user + times.system
    return used


def less(after: Mapping[str, float], before: Mapping[str, float]) -> Figures:
    """What has been added."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def held(child: Child) -> Memory:
    """Memory at this moment."""
    return _memory(child, "VmRSS")


def peak(child: Child) -> Memory:
    """The most that each process ever held; where the system doesn't tell, what it holds at this moment."""
    return _memory(child, "VmHWM")


def _memory(child: Child, which: str) -> Memory:
    found: dict[str, int] = {}
    shared: list[int] = []
    for role, process in _roles(child):
        with contextlib.suppress(psutil.Error, OSError):
            told = _status(process)
            found[role] = found.get(role, 0) + told.get(which, process.memory_info().rss)
            shared.append(told.get("RssShmem", 0))
    return Memory(found, sum(shared) - max(shared, default=0))


def _status(process: psutil.Process) -> dict[str, int]:
    """Linux's lines of sizes, in bytes; elsewhere nothing."""
    path = Path(f"/proc/{process.pid}/status")
    if not path.exists():
        return {}
    told = {}
    for line in path.read_text().splitlines():
        name, _, size = line.partition(":")
        if size.endswith(" kB"):
            told[name] = 1024 * int(size.split()[0])
    return told


def _roles(child: Child) -> list[tuple[str, psutil.Process]]:
    found = []
    for process in child.family():
        with contextlib.suppress(psutil.Error):
            found.append((_role(process, child), process))
    return found


def _role(process: psutil.Process, child: Child) -> str:
    if process.pid == child.process.pid:
        return MAIN
    if process.name() == "p2pd":
        return DAEMON
    return NODE if NODE_PROGRAM in process.cmdline() else FORKED
