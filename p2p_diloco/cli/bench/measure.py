"""What processes used, and what rounds took.

Law: reads what the system tells, and computes; starts and ends nothing.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from p2p_diloco.cli.processes import Child

MAIN, NODE, DAEMON, FORKED = "process", "node", "p2pd", "forked"
"""What a process of a peer is: the one that was started, our node, libp2p's daemon, what Hivemind forks."""
NODE_PROGRAM = "p2p_diloco.node"


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one group, in seconds: that of its slowest peer, for the others wait for it.

    `parts`: of the slowest peer. `cpu_s`: of all peers together, by what the processes are. Waiting and hidden time: a
    mean peer's.
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
        """Of all its processes, shared memory counted once."""
        return sum(self.by_role.values()) - self.shared


@dataclass(frozen=True, slots=True)
class Result:
    """All rounds of a group that count. `sent_bytes`: bytes that a peer sends in a round, computed, without headers."""

    name: str
    rounds: tuple[Round, ...]
    sent_bytes: int
    peers: int
    idle: Memory = field(default_factory=lambda: Memory({}))
    peak: Memory = field(default_factory=lambda: Memory({}))
    failed: str = ""


def round_of(answers: Sequence[Mapping[str, Any]], cpu_s: Mapping[str, float]) -> Round:
    """A round from what its processes answered; one without counters of its own waited all the time."""
    slowest = max(answers, key=lambda answer: float(answer["took_s"]))
    waiting = statistics.mean(answer.get("waiting_s", answer["took_s"]) for answer in answers)
    hidden = statistics.mean(answer.get("hidden_s", 0.0) for answer in answers)
    return Round(slowest["took_s"], slowest["parts"], dict(cpu_s), waiting, hidden)


def cpu_s(children: Iterable[Child]) -> dict[str, float]:
    """Processor seconds so far, user and system, by what the processes are."""
    used: dict[str, float] = {}
    for child in children:
        for role, process in _roles(child):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used[role] = used.get(role, 0.0) + times.user + times.system
    return used


def memory(child: Child, *, peak: bool = False) -> Memory:
    """What its processes hold at this moment, or with `peak` the most that each ever held, where the system tells."""
    found: dict[str, int] = {}
    shared: list[int] = []
    for role, process in _roles(child):
        with contextlib.suppress(psutil.Error, OSError):
            told = _status(process)
            found[role] = found.get(role, 0) + told.get("VmHWM" if peak else "VmRSS", process.memory_info().rss)
            shared.append(told.get("RssShmem", 0))
    return Memory(found, sum(shared) - max(shared, default=0))


def _status(process: psutil.Process) -> dict[str, int]:
    """Linux's lines of sizes, in bytes; elsewhere nothing."""
    path = Path(f"/proc/{process.pid}/status")
    if not path.exists():
        return {}
    lines = [line.partition(":") for line in path.read_text().splitlines() if line.endswith(" kB")]
    return {name: 1024 * int(size.split()[0]) for name, _, size in lines}


def _roles(child: Child) -> Iterator[tuple[str, psutil.Process]]:
    for process in child.family:
        with contextlib.suppress(psutil.Error):
            yield _role(process, child), process


def _role(process: psutil.Process, child: Child) -> str:
    if process.pid == child.process.pid:
        return MAIN
    if process.name() == "p2pd":
        return DAEMON
    return NODE if NODE_PROGRAM in process.cmdline() else FORKED
