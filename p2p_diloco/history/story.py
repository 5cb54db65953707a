"""Tells what happened in a run, in few lines: who came, who died and who noticed, who took over, which rounds were slow
and why.

Law: pure; from entries alone, real or simulated. What several peers say of one thing within `AGAIN_S` becomes one line.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

from p2p_diloco.core.events import Apply, Depart, Finished, Found, Note, Start
from p2p_diloco.core.messages import Commit
from p2p_diloco.history.order import STARTED
from p2p_diloco.history.reading import Entry
from p2p_diloco.history.rounds import CRASHED, Round, moved, rounds

LINES_MAX, AGAIN_S = 28, 5.0
SLOW, SLOW_S = 1.5, 0.1
"""A round is slow if it takes more than SLOW times the median, and over SLOW_S seconds longer than the median."""
WEIGHTS = {"death": 9, "fault": 9, "fork": 9, "takeover": 8, "leave": 7, "found": 6, "join": 6, "end": 6, "revision": 6,
           "bereaved": 8, "first": 4, "rounds": 3}  # fmt: skip
"""By kind of a line; of a note of another kind: 5. The lines of the lowest weight are left out first if the story is
too long; of slow rounds, the less slow ones. Calm rounds are told together between lines of weight 6 or more."""


@dataclass(slots=True)
class Line:
    """One line of a story. `said`: which other peers say so, and when."""

    time: float
    kind: str
    peer: str
    text: str
    weight: float
    said: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join([self.text, *([", ".join(self.said.values())] if self.said else [])])


class Story:
    """The lines of a story, and the rounds that they tell of."""

    def __init__(self, entries: Sequence[Entry], fragments: int) -> None:
        """`fragments`: how many the model has."""
        self.fragments, self.rounds, self.lines = fragments, rounds(entries, fragments), list[Line]()
        took = [[one.took for one in self.rounds[1:] if one.fragment == of] for of in range(fragments)]
        self._usual = [median(each or [0.0]) for each in took]
        self._about: dict[tuple[str, str], Line] = {}  # by kind, and what it is about: the last line
        self._started: dict[str, float] = {}
        self._versions: dict[tuple[int, int], dict[str, str]] = {}  # by fragment and epoch: digest -> who made it
        for entry in entries:
            self._read(entry)
        self._tell_rounds()
        self.lines.sort(key=lambda line: line.time)

    def _read(self, entry: Entry) -> None:
        me = entry.peer
        match entry.what:
            case str(text) if text.startswith(STARTED):
                self._started[me] = entry.time
            case str(text):
                self._say(entry, "death" if text in CRASHED else "fault", f"{me} {text}", me)
            case Depart(died=False) if ("end", "") not in self._about:
                self._say(entry, "leave", f"{me} leaves", me)
            case Found():
                self._say(entry, "found", f"{me} founds the run")
        for effect in entry.effects:
            match effect:
                case Apply(commit):
                    self._made(entry, commit)
                case Start() if not isinstance(entry.what, Found):
                    epoch = min((epoch for _, epoch, _ in moved(entry)), default=0)
                    since = entry.time - self._started.get(me, entry.time)
                    after = f" {since:.1f} s after its start" if since >= 0.05 else ""
                    self._say(entry, "join", f"{me} joins at epoch {epoch}: it holds the state{after}", me)
                case Finished():
                    self._say(entry, "end", f"{me} reaches the end of the run")
                case Note(kind, text):
                    self._note(entry, kind, re.sub(r"^fragment \d+: ", "", text))

    def _note(self, entry: Entry, kind: str, text: str) -> None:
        me, about = entry.peer, text.partition(" ")[0]
        if kind == "died":
            self._say(entry, "death", f"{me} notes that {text}", about)
        elif kind not in ("joined", "left") or about not in self._started:  # else its own history tells that
            told = text.replace("this peer", me, 1) if about == "this" else f"{me} notes {kind}: {text}"
            self._say(entry, kind, told, text)

    def _made(self, entry: Entry, commit: Commit) -> None:
        """Remember who made a version. Add a line if it is the second one of its epoch, and the epoch before has
        not two."""
        fragment, epoch = commit.fragment, commit.version.epoch
        made, before = self._versions.setdefault((fragment, epoch), {}), self._versions.get((fragment, epoch - 1), {})
        if commit.version.chain not in made:
            of = ", ".join(peer for peer, ready in commit.choice.entries if ready.weight) or "no contribution"
            made[commit.version.chain] = f"one made by {commit.leader} from {of}"
            if len(made) == 2 > len(before):
                text = f"fork: fragment {fragment} has two versions of epoch {epoch}, {' and '.join(made.values())}"
                self._say(entry, "fork", text, "versions")

    def _say(self, entry: Entry, kind: str, text: str, about: str = "") -> None:
        """Add a line; or if another peer has just said that of the same thing, this peer to its line."""
        line, me = self._about.get((kind, about)), entry.peer
        if line is None or entry.time > line.time + AGAIN_S:
            line = self._about[kind, about] = Line(entry.time, kind, me, text, WEIGHTS.get(kind, 5))
            self.lines.append(line)
        elif kind == "death" and me == about != line.peer:  # its last message was heard after another noticed its death
            line.said = {line.peer: f"{line.peer} notices 0.00 s later"} | line.said
            line.text, line.peer = text, me
        elif me != line.peer:
            verb = "notices " * (kind == "death")
            line.said.setdefault(me, f"{me} {verb}{entry.time - line.time:.2f} s later")

    # -- rounds

    def _tell_rounds(self) -> None:
        """Tell of the first round, of slow ones and of those with a death alone; of the others together."""
        cuts = [line.time for line in self.lines if line.weight >= 6]
        deaths = [line.time for line in self.lines if line.kind == "death"]

        def alone(one: Round) -> str:
            """Why a round is told alone; empty: it is not."""
            bereaved = any(one.began <= death < one.ended for death in deaths)
            if one is self.rounds[0]:
                return "first"
            if one.took > max(SLOW * self.usually(one), self.usually(one) + SLOW_S):
                return "bereaved" if bereaved else "slow"
            return "usual" if bereaved else ""

        for key, group in groupby(self.rounds, lambda one: alone(one) or sum(cut < one.ended for cut in cuts)):
            if isinstance(key, int):
                self._tell_calm(list(group))
            else:
                for one in group:
                    self._tell_one(one, key)

    def _tell_one(self, one: Round, kind: str) -> None:
        than = "" if kind == "first" else f", usually {self.usually(one):.2f} s"
        text = f"{self.name(one)} took {one.took:.2f} s{than}: {one.because() or 'no cause is recorded'}"
        weight = WEIGHTS.get(kind, 5 - self.usually(one) / max(one.took, 1e-9))
        self.lines.append(Line(one.ended, "first" if kind == "first" else "slow", "", text, weight))

    def _tell_calm(self, calm: Sequence[Round]) -> None:
        awaited, took = [one.awaited for one in calm], sorted(one.took for one in calm)
        most = max(sorted(set(awaited)), key=awaited.count)
        often = awaited.count(most)
        last = f"; {most} was waited for in {often}" if most and len(calm) > 2 and often > len(calm) / 2 else ""
        which = f"epochs {calm[0].epoch} to {calm[-1].epoch}"
        which = f"{self.name(calm[0])} to {self.name(calm[-1])}" if self.fragments > 1 else which
        text = f"{which}: {took[len(took) // 2]:.2f} s each ({took[0]:.2f} to {took[-1]:.2f}){last}"
        text = text if len(calm) > 1 else f"{self.name(calm[0])} took {took[0]:.2f} s"
        self.lines.append(Line(calm[0].ended, "rounds", "", text, WEIGHTS["rounds"]))

    def usually(self, one: Round) -> float:
        """The seconds that a round of the same fragment usually takes; 0 if no round after the first is known."""
        return self._usual[one.fragment]

    def name(self, one: Round) -> str:
        """The name of a round."""
        return f"epoch {one.epoch}" + (f" of fragment {one.fragment}" if self.fragments > 1 else "")

    # -- text

    def text(self, named: Callable[[str], str], width: int) -> Iterator[str]:
        """The story as text, in at most LINES_MAX lines of this width. `named` puts names in place of ids."""
        told = {id(line): _wrapped(named(f"{line.time:8.2f}  {line}"), width) for line in self.lines}
        rows = sum(map(len, told.values()))
        for line in sorted(self.lines, key=lambda line: (line.weight, -line.time)):
            if rows > LINES_MAX - (len(told) < len(self.lines)):
                rows -= len(told.pop(id(line)))
        for line in self.lines:
            yield from told.get(id(line), ())
        if left_out := len(self.lines) - len(told):
            yield f"({left_out} less important lines are left out; --events shows everything)"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)
