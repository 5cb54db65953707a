"""Measures the processor time and memory of processes, and holds the figures of rounds.

Law: reads the system's counters and computes; starts and ends no process.
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
"""The kinds of a peer's processes: the one that was started, the node, libp2p's daemon, and processes that Hivemind
forks."""
NODE_PROGRAM = "p2p_diloco.node"


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one group; times are in seconds. `took_s`: the time of the slowest peer, because the others wait for
    it.

    `parts`: the slowest peer's times by part. `cpu_s`: processor time of all peers together, by kind of process.
    `waiting_s`, `hidden_s`: for how long exchanges stopped training, and for how long training went on during them; the
    mean over peers. `alone_s`: how long the same inner steps took without exchanges; 0: there was no training.
    """

    took_s: float
    parts: Mapping[str, float]
    cpu_s: Mapping[str, float]
    waiting_s: float
    hidden_s: float
    alone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one peer's processes in bytes, at its peak or at one moment. `shared`: bytes of shared memory that
    `by_role` counts more than once."""

    by_role: Mapping[str, int]
    shared: int = 0

    @property
    def total(self) -> int:
        """The memory of all the peer's processes, with shared memory counted once."""
        return sum(self.by_role.values()) - self.shared


@dataclass(frozen=True, slots=True)
class Result:
    """All rounds of a group except the warm-up. `sent_bytes`: bytes that a peer sends in a round, without headers; they
    are computed, not measured. `idle`, `peak`: a peer's memory without a model, and its highest memory; `failed`: why
    the group failed, or empty."""

    name: str
    rounds: tuple[Round, ...]
    sent_bytes: int
    peers: int
    idle: Memory = field(default_factory=lambda: Memory({}))
    peak: Memory = field(default_factory=lambda: Memory({}))
    failed: str = ""


def round_of(answers: Sequence[Mapping[str, Any]], cpu_s: Mapping[str, float], alone_s: float = 0.0) -> Round:
    """Make a `Round` from the answers of a group's processes. A process that reports no waiting time counts as waiting
    for the whole round."""
    slowest = max(answers, key=lambda answer: float(answer["took_s"]))
    waiting = statistics.mean(answer.get("waiting_s", answer["took_s"]) for answer in answers)
    hidden = statistics.mean(answer.get("hidden_s", 0.0) for answer in answers)
    return Round(slowest["took_s"], slowest["parts"], dict(cpu_s), waiting, hidden, alone_s)


def cpu_s(children: Iterable[Child]) -> dict[str, float]:
    """The processor seconds, user and system, that the children have used so far, by kind of process."""
    used: dict[str, float] = {}
    for child in children:
        for role, process in _roles(child):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used[role] = used.get(role, 0.0) + times.user + times.system
    return used


def memory(child: Child, *, peak: bool = False) -> Memory:
    """The memory that the child and its descendants use now. With `peak`: the most that each of them has ever used,
    where the system reports it."""
    found: dict[str, int] = {}
    shared: list[int] = []
    for role, process in _roles(child):
        with contextlib.suppress(psutil.Error, OSError):
            told = _status(process)
            found[role] = found.get(role, 0) + told.get("VmHWM" if peak else "VmRSS", process.memory_info().rss)
            shared.append(told.get("RssShmem", 0))
    return Memory(found, sum(shared) - max(shared, default=0))


def _status(process: psutil.Process) -> dict[str, int]:
    """The memory sizes in Linux's /proc/PID/status by name, in bytes. Empty on other systems."""
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
