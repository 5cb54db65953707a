"""Kills and joins for a long time: `python tests/chaos/soak.py --minutes 30`; with sixteen peers `python
tests/chaos/soak.py --peers 16 --minutes 10 --every 20 --numel 100000 --slices 4 --sync-every 30 --step-s 0.1
--heartbeat-s 1`.

A run of real peers. Without `--every` one is killed or one joins every ten seconds on average, at random moments. With
it one is killed and one starts in its place every so many seconds. A kill takes trainer, node and p2pd at once. One
peer, the anchor, and the bootstrap live from beginning to end, and what they hold (memory, files, sockets, processes)
is compared between the first and the last sixth of the time, after a minute of warming up. All peers train when the
time begins.

*Goodput* is the share of the inner steps that was counted, of those that all trainers made between the anchor's first
and last commit in this time. Of a killed peer the steps since its last exchange are not known; they are taken as the
most that fit in the time that it lived since then. They are lost, and so count against goodput, as do the steps of a
newcomer that no commit counts. Progress that the last commit leaves to a later one counts against it, too.

A report as JSON on stdout; the exit code is 1 if digests differed, something grew, or goodput fell below 0.95.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from swarm import Member, Swarm, agree, kept_in, stall_s

RANDOM_EVERY_S = 10.0
LOOK_S = 5.0
WARM_UP_S = 60.0
AT_ONCE = 4
"""So many peers start at the same time."""
GOODPUT = 0.95
GROWTH = 1.1
"""The most that the last part may hold, relative to the first one."""


@dataclass(frozen=True, slots=True)
class Load:
    """The run: how many peers, of which model, at which pace."""

    peers: int
    numel: int
    slices: int
    sync_every: int
    step_s: float
    heartbeat_s: float

    def training(self) -> dict[str, object]:
        """Options of every peer."""
        config = {
            "sync_every": self.sync_every,
            "outer_lr": 0.5,
            "codec": "bf16",
            "slice_elements": -(-self.numel // self.slices),
            "heartbeat_interval": self.heartbeat_s,
            "heartbeat_timeout": 10 * self.heartbeat_s,
        }
        return {"params": {"u": [self.numel]}, "step_s": self.step_s, "config": config, "log": "INFO"}


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


@dataclass
class Soak:
    """A run with kills and joins."""

    swarm: Swarm
    load: Load
    seconds: float
    every_s: float | None
    rng: random.Random
    looks: list[Look] = field(default_factory=list)
    peers: list[Member] = field(default_factory=list)
    kills: dict[str, float] = field(default_factory=dict)
    """Names of killed peers, and when they died, as time.time()."""
    joins: int = 0

    def start(self) -> Member:
        """One more peer."""
        number = len(self.peers) + 1
        self.peers.append(self.swarm.start(f"p{number}", delta=1.0 + number % 3, **self.load.training()))
        return self.peers[-1]

    def run(self) -> dict[str, object]:
        """The whole run, then its report."""
        bootstrap = self.swarm.bootstrap()
        for number in range(self.load.peers):
            if number >= AT_ONCE:
                self.peers[number - AT_ONCE].wait_for("in")
            self.start()
        for peer in self.peers:
            peer.wait_for("epoch")
        began, began_at = time.monotonic(), time.time()
        next_look, next_event = 0.0, self.every_s or 0.0
        while (now := time.monotonic() - began) < self.seconds:
            if now >= next_look:
                self.looks.append(Look.at([self.peers[0], bootstrap], now))
                next_look = now + LOOK_S
            if now >= next_event:
                next_event += self.every_s or self.rng.expovariate(1 / RANDOM_EVERY_S)
                self.disturb()
            time.sleep(0.1)
        return self.report(began_at, time.time())

    def disturb(self) -> None:
        """Kill one peer and start another; without an interval, one of the two."""
        living = [peer for peer in self.peers[1:] if peer.process.poll() is None]
        if self.every_s is not None:
            self.kill([peer for peer in living if peer.lines("epoch")])
            self.join()
        elif len(living) >= self.load.peers - 1 or (len(living) > 1 and self.rng.random() < 0.3):
            self.kill(living)
        else:
            self.join()

    def kill(self, among: list[Member]) -> None:
        """Kill all processes of one of these peers."""
        victim = self.rng.choice(among)
        self.kills[victim.name] = victim.die()

    def join(self) -> None:
        """Start a peer beside the others."""
        self.start()
        self.joins += 1

    # -- the report

    def report(self, began: float, ended: float) -> dict[str, object]:
        """The figures of the whole run, whose time began and ended at these moments, as time.time()."""
        agree(self.peers)
        anchor = self.peers[0]
        rounds = [line["time"] for line in anchor.lines("epoch", synced=True) if began <= line["time"] <= ended]
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(rounds))
        first, last = self.parts()
        return {
            "minutes": round(self.seconds / 60, 1),
            "kills": len(self.kills),
            "joins": self.joins,
            "lives": len(self.peers),
            "digests equal at every epoch": True,
            **self.counted(began, ended),
            "round_s": {"median": round(statistics.median(gaps), 2), "99 %": round(gaps[int(len(gaps) * 0.99)], 2)},
            "longest_round_s": round(gaps[-1], 2),
            "waits": self.waits(ended),
            "first": first,
            "last": last,
        }

    def counted(self, began: float, ended: float) -> dict[str, object]:
        """What was counted between the anchor's first and last commit in this time, and of how much."""
        lines = [line for line in self.peers[0].lines("epoch", synced=True) if began <= line["time"] <= ended]
        first, last = lines[0], lines[-1]
        counted = last["counted"] - first["counted"]
        made = sum(self.made(peer, first["epoch"], last["epoch"]) for peer in self.peers)

        return {
            "epochs": last["epoch"] - first["epoch"],
            "inner steps counted": counted,
            "inner steps made, at most": round(made),
            "of them after a killed peer's last exchange, at most": round(sum(map(self.unseen, self.peers))),
            "goodput": round(counted / made, 4),
            "dropped by a rule": sum(grown_by(peer, "dropped", first["epoch"], last["epoch"]) for peer in self.peers),
        }

    def made(self, peer: Member, first: int, last: int) -> float:
        """The inner steps that a peer made between two epochs, at most."""
        return grown_by(peer, "local", first, last) + self.unseen(peer)

    def unseen(self, peer: Member) -> float:
        """The inner steps that a killed peer made after its last line, at most."""
        lines = [*peer.lines("in"), *peer.lines("epoch")]
        if peer.name not in self.kills or not lines:
            return 0.0
        return min(self.load.sync_every, (self.kills[peer.name] - lines[-1]["time"]) / self.load.step_s)

    def waits(self, ended: float) -> dict[str, object]:
        """How much longer than usual the rounds were in which a peer was killed, and those in which a newcomer began to
        train."""
        joined = [line["time"] for peer in self.peers[self.load.peers :] for line in peer.lines("in")]
        return {
            "a round longer by, s, after a kill": self.stalls(list(self.kills.values())),
            "a round longer by, s, after a newcomer was in": self.stalls([at for at in joined if at <= ended]),
        }

    def stalls(self, moments: list[float]) -> dict[str, object]:
        """How much longer than usual the rounds were that were under way at these moments, each by the survivor for
        which it was longest."""
        stalls = sorted(filter(None, map(self.stall, moments)))
        return {
            "rounds": len(stalls),
            "median": round(statistics.median([stall for stall, _ in stalls]), 2) if stalls else None,
            "longest": [f"{stall:.2f} ({name})" for stall, name in stalls[-3:]],
        }

    def stall(self, at: float) -> tuple[float, str] | None:
        """The same of one moment; None if the run ended before the round."""
        found = []
        for peer in self.peers:
            times = [line["time"] for line in peer.lines("epoch", synced=True)]
            if len([time for time in times if time <= at]) >= 3 and times[-1] > at:
                found.append((stall_s(peer, at, 1), peer.name))
        return max(found, default=None)

    def parts(self) -> list[dict[str, float]]:
        """Medians over the first sixth of the time after warming up, and over the last sixth."""
        warm = [look for look in self.looks if look.at_s >= WARM_UP_S] or self.looks
        span = self.seconds / 6
        parts = (
            [look for look in warm if look.at_s < warm[0].at_s + span],
            [look for look in warm if look.at_s >= self.seconds - span],
        )
        keys = ("rss_mb", "files", "sockets", "processes", "threads")
        return [{key: statistics.median(getattr(look, key) for look in part) for key in keys} for part in parts]


def grown_by(peer: Member, key: str, first: int, last: int) -> int:
    """By how much a counter of a peer grew between two epochs; it is 0 when the peer enters the run."""
    values = {line["epoch"]: int(line[key]) for line in peer.lines("epoch")}
    before = max((value for epoch, value in values.items() if epoch <= first), default=0)
    return max((value for epoch, value in values.items() if epoch <= last), default=0) - before


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description="Kill and start peers of a real run for a long time.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, help="seconds between two kills, each with a join")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--numel", type=int, default=1_000_000, help="elements of the model")
    parser.add_argument("--slices", type=int, default=2)
    parser.add_argument("--sync-every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.05, help="seconds that a step sleeps")
    parser.add_argument("--heartbeat-s", type=float, default=0.5, help="a tenth of heartbeat_timeout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the logs stay")
    asked = parser.parse_args()
    load = Load(**{one.name: getattr(asked, one.name) for one in fields(Load)})
    with kept_in(asked.folder) as folder, Swarm(folder) as swarm:
        report = Soak(swarm, load, asked.minutes * 60, asked.every, random.Random(asked.seed)).run()
    print(json.dumps(report, indent=2))
    first, last = report["first"], report["last"]
    assert isinstance(first, dict)
    assert isinstance(last, dict)
    grown = [key for key in first if last[key] > GROWTH * first[key] + 1]
    print(f"grown: {grown or 'nothing'}", file=sys.stderr)
    return int(bool(grown) or float(str(report["goodput"])) < GOODPUT)


if __name__ == "__main__":
    sys.exit(main())
