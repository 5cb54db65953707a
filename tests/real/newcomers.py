"""Peers die, newcomers join, and θ shows who is counted: `python -m tests.real.newcomers --case tiny --times 10 --seed
1`.

Three peers train. After a random number of rounds all processes of one of them are killed, and a newcomer with its own
identity joins. When it has made its exchanges, the laws (`broken`) are checked against the lines of all peers about
every epoch. After a play that breaks a law a new run begins; after others one more peer dies in the same run. Prints
one line for each play; the exit code is 1 if a law was broken. Give `--folder` to keep the logs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from attendance import Attendance, attendance, commits, looks, rounds, shared, unlike
from swarm import Member, Swarm, stall_s, usual_round_s
from warm import Nursery

PEERS = 3
FREE_EXCHANGES = 1
"""So many of a newcomer's first exchanges may be missed, and their steps be lost."""
ROUNDS_AT_ONCE = 4.0
"""The most rounds of one peer's steps that a commit may count: the present one, and the few that it carries."""
STALL_S = 5.0
"""The longest that the death or the newcomer may delay a round: half of `heartbeat_timeout`."""
SLOWER = 3.0
"""Rounds with the newcomer may take this many times the usual, on a machine with other work."""
IN_S, SPARE_S = 120.0, 30.0
"""A newcomer must be in the run within this time; its exchanges may take four times the usual time, plus this."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run: its size, H, how long a step takes each of the first three peers, and how many exchanges a newcomer
    makes."""

    numel: int
    shard_elements: int
    every: int
    exchanges: int
    pauses_s: tuple[float, ...] = (0.0,) * PEERS
    newcomer_s: float | None = None
    """Step time until it is judged; None: that of the peer that it replaces."""


CASES = {
    "ten-million": Case(10_000_000, 2**20, every=1, exchanges=40),
    "tiny": Case(100_000, 25_000, every=1, exchanges=400),
    "fifty": Case(1_000_000, 2**18, every=50, exchanges=40),
    "unlike": Case(1_000_000, 2**18, every=1, exchanges=40, pauses_s=(0.05, 0.05, 0.15)),
    "slow-newcomer": Case(1_000_000, 2**18, every=1, exchanges=20, newcomer_s=0.3),
}


@dataclass
class Run:
    """A run in which peers die and join again and again; each life has its own slot."""

    swarm: Swarm
    case: Case
    lives: int
    rng: random.Random
    members: list[Member] = field(default_factory=list)
    living: list[int] = field(default_factory=list)
    pauses_s: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Three peers, in rounds of all."""
        self.swarm.bootstrap()
        for pause_s in self.case.pauses_s:
            self.join(pause_s, pause_s)

    def join(self, pause_s: float, for_good_s: float) -> Member:
        """Start one more life."""
        case, life = self.case, len(self.members)
        config = {"sync_every": case.every, "shard_elements": case.shard_elements, "start_peers": PEERS}
        options = {"slot": life, "slots": self.lives, "numel": case.numel, "step_s": pause_s, "config": config}
        member = self.swarm.start(f"life{life}", "counted.py", **options)
        self.members.append(member)
        self.living.append(life)
        self.pauses_s[life] = for_good_s
        return member

    def play(self) -> Played:
        """One peer dies, one joins."""
        ahead = self.rng.randint(5, 25)
        for life in self.living:
            self.members[life].wait_for("epoch")
        goal = max(self.members[life].reached() for life in self.living) + ahead
        for life in self.living:
            self.members[life].epoch(goal)
        victim = self.rng.choice(self.living)
        killed_at = self.members[victim].die()
        self.living.remove(victim)
        survivors = [self.members[life] for life in self.living]
        usual_s = statistics.median(usual_round_s(member, killed_at, 20) for member in survivors)
        pause_s = self.pauses_s[victim] if self.case.newcomer_s is None else self.case.newcomer_s
        expected_s = usual_s + self.case.every * (pause_s - self.pauses_s[victim])
        newcomer = self.join(pause_s, self.pauses_s[victim])
        newcomer.wait_for("in", IN_S)
        enough = self.case.exchanges * self.case.every
        patience_s = 4 * self.case.exchanges * expected_s + SPARE_S
        with contextlib.suppress(AssertionError):  # its exchanges until now are judged
            last = newcomer.wait_for("epoch", patience_s, lambda line: line["step"] >= enough)
            for member in survivors:
                member.epoch(last["epoch"], SPARE_S)
        played = self.judged(ahead, victim, killed_at, expected_s)
        if self.case.newcomer_s is not None:
            newcomer.tell("hurry")
        return played

    def judged(self, ahead: int, victim: int, killed_at: float, expected_s: float) -> Played:
        """What became of the newcomer, and of the others meanwhile."""
        said = {member.name: list(member.said) for member in self.members}
        *survivors, newest = (self.members[life] for life in self.living)
        log = commits(said[member.name] for member in self.members if member is not newest)
        slots = {self.members[life].name: life for life in self.living}
        counted = {name: attendance(said[name], slot, self.case.every, log) for name, slot in slots.items()}
        entered = newest.last("in")
        mine = rounds(said[newest.name])
        took_part_at = mine[FREE_EXCHANGES]["time"] if len(mine) > FREE_EXCHANGES else entered["time"]
        times = [[line["time"] for line in rounds(said[member.name])] for member in survivors]
        gaps = [b - a for one in times for a, b in itertools.pairwise(one) if a > took_part_at]
        return Played(
            what=f"life{victim} died after {ahead} rounds, {newest.name} came at epoch {entered['epoch']}",
            newcomer=counted.pop(newest.name),
            wanted=self.case.exchanges,
            every=self.case.every,
            survivors=tuple(counted.values()),
            shared=shared(said[newest.name], [said[member.name] for member in survivors]),
            unlike=tuple(unlike(said)),
            looks=sum(len(looks(lines)) for lines in said.values()),
            expected_s=expected_s,
            round_s=statistics.median(gaps) if gaps else float("inf"),
            stall_s=max(stall_s(member, killed_at) for member in survivors),
        )


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a play. `expected_s`: a round's usual time before, plus the additional time of a slower
    newcomer."""

    what: str
    newcomer: Attendance
    wanted: int
    every: int
    survivors: tuple[Attendance, ...]
    shared: tuple[int, int]
    unlike: tuple[str, ...]
    looks: int
    expected_s: float
    round_s: float
    stall_s: float

    @property
    def broken(self) -> list[str]:
        """The laws that this play broke, a sentence each."""
        one, wrong = self.newcomer, []
        missed = [number for number in one.missed if number > FREE_EXCHANGES]
        if one.exchanges < self.wanted:
            wrong.append(f"it made {one.exchanges} of {self.wanted} exchanges in time")
        if missed:
            wrong.append(f"{len(missed)} of its {one.exchanges} exchanges were not counted, the first: {missed[:5]}")
        both, alike = self.shared
        if not both or alike < both:
            wrong.append(f"of {both} epochs that it and another looked at, {alike} were alike")
        if self.unlike:
            wrong.append(f"at {len(self.unlike)} epochs looks differ, the first: {self.unlike[0]}")
        for who, peer in (("it", one), *(("a survivor", peer) for peer in self.survivors)):
            if peer.rounds_at_once > ROUNDS_AT_ONCE:
                wrong.append(f"steps of {peer.rounds_at_once:g} rounds of {who} were counted at once")
            if peer.lost > FREE_EXCHANGES * self.every:
                wrong.append(f"{peer.lost} steps of {who} were not counted")
            if not peer.counted[0] <= peer.said <= peer.counted[1]:
                fewest, most = peer.counted
                wrong.append(f"{who} says sync_count={peer.said}, and {fewest} to {most} outer steps counted it")
        if self.round_s > SLOWER * self.expected_s:
            wrong.append(f"rounds with it take {self.round_s:.3f} s, and {self.expected_s:.3f} s were to be expected")
        if self.stall_s > STALL_S:
            wrong.append(f"a round took {self.stall_s:.1f} s longer than usual")
        return wrong

    def __str__(self) -> str:
        one = self.newcomer
        return (
            f"{self.what}; {one.exchanges - len(one.missed)} of {one.exchanges} exchanges counted, {one.in_part} more "
            f"in part, the first: {one.first}; at most {one.rounds_at_once:g} rounds at once, {one.lost} steps not in "
            f"θ; sync_count {one.said}, counted {one.counted[0]} to {one.counted[1]}; alike {self.shared[1]} of "
            f"{self.shared[0]} epochs; rounds {self.round_s:.3f} s of {self.expected_s:.3f}, stall {self.stall_s:.1f} s"
        )


def plays(case: Case, times: int, rng: random.Random, folder: Path, nursery: Nursery | None = None) -> Iterator[Played]:
    """This many plays; after one that breaks a law, in a new run."""
    done = 0
    while done < times:
        (place := folder / f"from-{done}").mkdir()
        swarm = Swarm(place, nursery)
        try:
            run = Run(swarm, case, PEERS + times - done, rng)
            run.begin()
            broken = False
            while done < times and not broken:
                played = run.play()
                yield played
                done, broken = done + 1, bool(played.broken)
        finally:
            swarm.end()


def main() -> int:
    """Play, print each result, then the summary."""
    parser = argparse.ArgumentParser(description="Let peers die and newcomers join, and check which are counted.")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the logs stay")
    asked = parser.parse_args()
    worst = 0
    for name in CASES if asked.case == "all" else [asked.case]:
        with tempfile.TemporaryDirectory() as kept:
            folder = (asked.folder or Path(kept)) / f"{name}-{asked.seed}-{time.time():.0f}"
            folder.mkdir(parents=True)
            all_played = []
            for number, played in enumerate(plays(CASES[name], asked.times, random.Random(asked.seed), folder), 1):
                all_played.append(played)
                print(f"{name} {number}: {played}", *played.broken, sep="\n    BROKEN: ", flush=True)
        wrong = sum(bool(played.broken) for played in all_played)
        print(f"{name}: {wrong} of {len(all_played)} plays broke a law", flush=True)
        worst = max(worst, wrong)
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())
