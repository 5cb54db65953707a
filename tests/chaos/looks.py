"""What real peers' processes hold and use, looked at every few seconds.

Law: a process is known by its place below its member (trainer, node, p2pd), and one that ends while it is looked at is
left out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
from swarm import Member

Point = tuple[float, float]
"""A moment, in seconds since the looking began, and a value."""


@dataclass
class Look:
    """What all processes of some members hold together at one moment."""

    at_s: float
    rss_mb: float
    files: int
    sockets: int
    processes: int
    threads: int

    @classmethod
    def at(cls, members: Sequence[Member], at_s: float) -> Look:
        """The sums over all of their processes."""
        sums: Counter[str] = Counter()
        for process in (process for member in members for process in member.family()):
            sums["processes"] += 1
            sums["rss"] += process.memory_info().rss
            sums["files"] += process.num_fds()
            sums["sockets"] += len(process.net_connections("all"))
            sums["threads"] += process.num_threads()
        return cls(at_s, sums["rss"] / 1e6, sums["files"], sums["sockets"], sums["processes"], sums["threads"])


def role(process: psutil.Process) -> str:
    """trainer, node, p2pd or bootstrap."""
    words = process.cmdline()
    if "p2pd" in words[0]:
        return "p2pd"
    if "p2p_diloco.node" in words:
        return "node"
    return "bootstrap" if "bootstrap" in words else "trainer"


@dataclass
class Usage:
    """The memory and the processor time of one member's processes over time, by role."""

    rss_mb: dict[str, list[Point]] = field(default_factory=dict)
    cpu_s: dict[str, list[Point]] = field(default_factory=dict)

    def look(self, member: Member, at_s: float) -> None:
        """Add the values of this moment."""
        for process in member.family():
            try:
                name, rss, times = role(process), process.memory_info().rss, process.cpu_times()
            except (psutil.Error, IndexError):
                continue
            self.rss_mb.setdefault(name, []).append((at_s, rss / 1e6))
            self.cpu_s.setdefault(name, []).append((at_s, times.user + times.system))

    def cores(self, name: str, since_s: float) -> float | None:
        """The share of a core that this role used since that moment; None if it was seen for less than 20 s."""
        points = after(self.cpu_s.get(name, []), since_s)
        if not spans(points, 20.0):
            return None
        return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


def after(points: Sequence[Point], since_s: float) -> list[Point]:
    """The points from that moment on."""
    return [point for point in points if point[0] >= since_s]


def spans(points: Sequence[Point], seconds: float) -> bool:
    """Whether the points are spread over so long a time."""
    return bool(points) and points[-1][0] - points[0][0] >= seconds


def by_minute(points: Sequence[Point]) -> list[float]:
    """The median of each minute's values."""
    minutes: dict[int, list[float]] = {}
    for at_s, value in points:
        minutes.setdefault(int(at_s // 60), []).append(value)
    return [round(statistics.median(values), 1) for _, values in sorted(minutes.items())]


def growth_per_hour(points: Sequence[Point]) -> float:
    """The slope of the line that fits the points best."""
    times, values = zip(*points, strict=True)
    return statistics.linear_regression(times, values).slope * 3600.0
