"""Six short traces for readers, kept in docs/traces: `python -m tests.sim.stories` writes them (`make traces`).

Each world is small and not random: every draw is the middle of its range. So a trace changes only when the protocol
or the wording of `history/reading.py` changes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from tests.sim.settings import Settings
from tests.sim.world import World

FOLDER = Path(__file__).parents[2] / "docs" / "traces"
SAID = re.compile(r" *(?P<time>[\d.]+) (?P<peer>\S+) +(?P<what>.+)")
TOLD = re.compile(
    r"starts|crashes|is cut|loses|the network|Send\(\S+ (?!Probe)|Average\(|Apply\(|Fill\(|Load\(fragments|Start\("
    r"|takes|Note\((?!joined)"
)
"""The events that a story shows. A full trace has every event."""


class Even(Random):
    """Not random: each number is the middle of its range."""

    drawn = 0

    def random(self) -> float:
        return 0.5

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1 / lambd

    def getrandbits(self, k: int) -> int:
        self.drawn += 1  # each incarnation gets another salt
        return self.drawn


class Calm(World):
    """A world without random faults; `p0` founds the run, a story starts the others."""

    def __init__(self, **settings: Any) -> None:
        calm = {"peers": 3, "drop": 0.0, "duplicate": 0.0, "clock_skew": 0.0, "delay_mean": 0.02, "faults": ()}
        of = Settings(**{**calm, "interval": 2, "late": (1e6, 1e6), **settings})
        super().__init__(0, of, trace=True)
        self.rng = self.lags = self.links = Even()

    def join(self, name: str, at: float, step_time: float = 0.5) -> None:
        self.run(at)
        self.start(name)
        self.alive[name].step_time = step_time

    def all_join(self, **step_times: float) -> None:
        """All peers start within two seconds, and train at 6 s."""
        self.run(0.1)
        self.alive["p0"].step_time = step_times.get("p0", 0.5)
        for number, name in enumerate(self.names[1:]):
            self.join(name, 1.2 + 0.1 * number, step_times.get(name, 0.5))
        self.run(6.0)

    def part(self, name: str) -> None:
        """Cut all links of this peer."""
        self.cut = {frozenset((name, other)) for other in self.names if other != name}
        self.say(name, "is cut off from the others")

    def heal(self) -> None:
        self.cut, self.mute = set(), set()
        self.say("all", "the network is whole again")


@dataclass(frozen=True)
class Story:
    """A trace: its world, whose docstring says what it shows; the part of that world that it tells, in simulated
    seconds; and of the line for which it was made."""

    play: Callable[[], World]
    since: float
    until: float
    shown: str

    def text(self) -> str:
        """The file in docs/traces."""
        return "\n".join([inspect.cleandoc(self.play.__doc__ or ""), "", *self.lines(), ""])

    def lines(self) -> Iterator[str]:
        """Time, peer and action, one a line; one line for a message to several peers."""
        world = self.play()
        world.run(self.until)
        found = (SAID.fullmatch(line) for line in world.lines)
        said = [Said(float(one["time"]), one["peer"], plain(one["what"])) for one in found if one]
        told = [one for one in said if one.time >= self.since and TOLD.match(one.what)]
        yield f"{'time':>6}  {'peer':8}  what it does"
        for (time, peer, what), sent in groupby(told, lambda one: (one.time, one.peer, one.message)):
            to = " and ".join(re.split("[(,]", one.what)[1] for one in sent) if what.startswith("Send(") else ""
            yield f"{time:6.2f}  {peer:8}  {what.replace('...', to)}"


@dataclass(frozen=True)
class Said:
    time: float
    peer: str
    what: str

    @property
    def message(self) -> str:
        """The action without its recipient."""
        return re.sub(r"^Send\([^,]+", "Send(...", self.what)


def plain(what: str) -> str:
    """A shorter line: without the fragment, which is 0, the first term, incarnations, and most of each digest."""
    left_out = r"(?<=served=Close\()fragment=0, base=\S+ |, due=0|fragment=0, |term=0, "
    for long, short in ((left_out, ""), (r"#\d{4}\.", "#"), (r"(\d/\w{4})\w\w\b", r"\1")):
        what = re.sub(long, short, what)
    return what


def join() -> World:
    """A third peer joins a run of two.

    It finds the others in the DHT (not shown), asks both what they hold, fetches the state from one of them and trains
    on it. The open round does not wait for it: p2 merges its commit, keeps its progress, and contributes to the next
    round. The next commit counts that.
    """
    world = Calm()
    world.join("p1", 1.2)
    world.join("p2", 6.0)
    return world


def commit() -> World:
    """One round of three peers and a model of two slices.

    The commit before leads to a leader of this round, p1, and to an owner of each slice. The others send what they
    contribute to the leader, and each slice to its owner. The leader chooses what is counted; the owners compute the
    means and send them to all; with all means the leader makes the commit, and every peer applies it to its own copy of
    the outer state. A version is its epoch and letters that name it: it is the same everywhere.
    """
    world = Calm(slices_per_fragment=2)
    world.all_join()
    return world


def takeover() -> World:
    """The leader dies between its choice and its commit.

    p0 is next in the succession, and claims. The vote of p2 tells it the choice for which p2 has made a mean. So p0
    completes the choice of p1, also with what p1 itself contributed: had p1 made the commit and died then, the version
    would be the same one.
    """
    world = Calm()
    world.all_join()
    world.run(7.5)
    world.crash("p1")
    return world


def fork() -> World:
    """The network is cut, both sides go on, and one lineage wins.

    p0 alone and p1 with p2 reach different states of one epoch. After the cut p0 hears from both others that they hold
    another lineage. It fetches the whole state, goes on from there, and drops its own progress since the cut.
    """
    world = Calm(interval=4)
    world.all_join()
    world.run(7.4)
    world.part("p0")
    world.run(15.0)
    world.heal()
    return world


def carry() -> World:
    """A contribution is lost, but none of its inner steps.

    p2 hears p1, but all that p2 sends to p1 is lost, also contribution #4. The leader p1 waits for it until
    `round_timeout` (1.5 s here) and closes the round without it. p2 sees that the commit does not count #4, keeps its
    progress, and sends it with #5.
    """
    world = Calm(round_timeout=1.5)
    world.all_join()
    world.run(6.95)
    world.mute = {("p2", "p1")}
    world.say("p2", "loses what it sends to p1")
    world.run(8.7)
    world.heal()
    return world


def asynchronous() -> World:
    """Asynchronous mode: no peer waits for another.

    Each contribution makes a commit of its own. The leader p1 sends it to its successor first. Once the successor
    confirms that it holds the commit, the contribution's author gets it, and one more death can't undo it. p2 is slower
    than the others: it gets all commits since its last one, and its own, at once.
    """
    world = Calm(mode="async")
    world.all_join(p2=0.8)
    return world


STORIES = {
    "join": Story(join, 6.95, 8.6, "Start()"),
    "commit": Story(commit, 6.6, 7.7, "Average(base=6/7650, number=1"),
    "takeover": Story(takeover, 7.3, 8.0, "term=1, leader=p0"),
    "fork": Story(fork, 15.9, 18.6, "the lineage that most others hold"),
    "carry": Story(carry, 6.8, 10.1, "p0 #8, p1 #6, p2 #5"),
    "async": Story(asynchronous, 11.2, 11.52, "Held("),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, story in STORIES.items():
        (FOLDER / f"{name}.txt").write_text(story.text())


if __name__ == "__main__":
    main()
