"""Half an hour of kills and joins: `python tests/chaos/soak.py --minutes 30`.

A run of about four real peers; every ten seconds on average one is killed or one joins. One peer, the anchor, and the
bootstrap live from beginning to end, and what they hold (memory, files, sockets, processes) is compared between the
first and the last five minutes, after a minute of warming up. Goodput is what was counted of all inner steps taken. A
report as JSON on stdout; the exit code is 1 if digests differed, something grew, or goodput fell below 0.95.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from swarm import Member, Swarm, agree

PEERS = 4
EVERY_S = 10.0
LOOK_S = 5.0
WARM_UP_S = 60.0
GOODPUT = 0.95
GROWTH = 1.1
"""The most that the last five minutes may hold, relative to the first five."""
CONFIG = {
    "sync_every": 10,
    "outer_lr": 0.5,
    "codec": "bf16",
    "shard_elements": 500_000,
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 5.0,
}
TRAINING = {"params": {"u": [1_000_000]}, "step_s": 0.05, "config": CONFIG, "log": "INFO"}


@dataclass
class Look:
    """What the anchor and the bootstrap hold at one moment."""

    at_s: float
    rss_mb: float
    files: int
    sockets: int
    processes: int
    threads: int

    @classmethod
    def at(cls, members: list[Member], at_s: float) -> Look:
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
    seconds: float
    rng: random.Random
    looks: list[Look] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    born: int = 0

    def start(self) -> Member:
        """One more peer."""
        self.born += 1
        return self.swarm.start(f"p{self.born}", delta=1.0 + self.born % 3, **TRAINING)

    def run(self) -> dict[str, object]:
        """The whole run, then its report."""
        bootstrap = self.swarm.bootstrap()
        peers = [self.start() for _ in range(PEERS)]
        anchor, others = peers[0], peers[1:]
        for peer in peers:
            peer.wait_for("epoch")
        began = time.monotonic()
        next_event = next_look = 0.0
        while (now := time.monotonic() - began) < self.seconds:
            if now >= next_look:
                self.looks.append(Look.at([anchor, bootstrap], now))
                next_look = now + LOOK_S
            if now >= next_event:
                next_event = now + self.rng.expovariate(1 / EVERY_S)
                self.disturb(others)
            time.sleep(0.1)
        return self.report(anchor)

    def disturb(self, others: list[Member]) -> None:
        """Kill one peer or start one."""
        living = [peer for peer in others if peer.process.poll() is None]
        if len(living) >= PEERS - 1 or (len(living) > 1 and self.rng.random() < 0.3):
            self.rng.choice(living).die()
            self.did["kills"] += 1
        else:
            others.append(self.start())
            self.did["joins"] += 1

    def report(self, anchor: Member) -> dict[str, object]:
        """The figures of the whole run."""
        peers = [member for member in self.swarm.members if member.name != "bootstrap" and member.lines("epoch")]
        agree(peers)
        unseen = self.did["kills"] * int(str(CONFIG["sync_every"]))  # at most, of peers killed since their last line
        taken = sum(peer.last("epoch")["local"] for peer in peers) + unseen
        counted = anchor.last("epoch")["counted"]
        first, last = self.fives()
        rounds = [line["time"] for line in anchor.lines("epoch", synced=True)]
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(rounds))
        return {
            "minutes": round(self.seconds / 60, 1),
            **self.did,
            "lives": self.born,
            "epochs": anchor.reached(),
            "digests equal at every epoch": True,
            "inner steps taken, at most": taken,
            "inner steps counted": counted,
            "goodput": round(counted / taken, 4),
            "round_s": {"median": round(statistics.median(gaps), 2), "99 %": round(gaps[int(len(gaps) * 0.99)], 2)},
            "longest_round_s": round(gaps[-1], 2),
            "first": first,
            "last": last,
        }

    def fives(self) -> list[dict[str, float]]:
        """Medians over the first five minutes after warming up, and over the last five."""
        warm = [look for look in self.looks if look.at_s >= WARM_UP_S]
        span = min(300.0, (self.seconds - WARM_UP_S) / 2)
        parts = (
            [look for look in warm if look.at_s < WARM_UP_S + span],
            [look for look in warm if look.at_s >= self.seconds - span],
        )
        keys = ("rss_mb", "files", "sockets", "processes", "threads")
        return [{key: statistics.median(getattr(look, key) for look in part) for key in keys} for part in parts]


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description="Kill and start peers of a real run for half an hour.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            report = Soak(swarm, asked.minutes * 60, random.Random(asked.seed)).run()
        finally:
            swarm.end()
    print(json.dumps(report, indent=2))
    first, last = report["first"], report["last"]
    assert isinstance(first, dict)
    assert isinstance(last, dict)
    grown = [key for key in first if last[key] > GROWTH * first[key] + 1]
    print(f"grown: {grown or 'nothing'}", file=sys.stderr)
    return int(bool(grown) or float(str(report["goodput"])) < GOODPUT)


if __name__ == "__main__":
    sys.exit(main())
