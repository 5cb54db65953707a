"""Tells what happened in a run, in few lines: who came, who died and who noticed, who took over, which rounds were slow
and why.

Law: pure; from entries alone, real or simulated. What many peers say of one thing becomes one line.
"""

from __future__ import annotations

import math
import re
import textwrap
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from p2p_diloco.core.events import Apply, Depart, Finished, Found, Note, Start
from p2p_diloco.history.entry import Entry
from p2p_diloco.history.rounds import CRASHED, Epochs, Round, is_slow, rounds, usual

LINES_MAX = 28
FRAGMENT = re.compile(r"^fragment \d+: ")
UNREACHED = "can't be reached any more"
"""The usual reason why a peer notes a death: the dead peer's connections are closed. The story does not repeat it."""
AGAIN_S = 5.0
"""Seconds after a peer has noticed a death. What it notes of the same death in this time is not told."""
SILENT = ("joined", "left", "revision", "takeover", "died")
"""Kinds of notes that are not quoted: their lines have other words, or tell what the peers concerned did themselves."""


@dataclass(slots=True)
class Line:
    """One line of a story. `weight`: the lines of the lowest weight are left out first if the story is too long."""

    time: float
    kind: str
    text: str
    weight: float
    also: list[str] = field(default_factory=list)
    """Further words, such as which other peers noticed."""

    def __str__(self) -> str:
        return self.text + ("; " if self.also else "") + ", ".join(self.also)


class Story:
    """The lines of a story, and what is needed to find them."""

    def __init__(self, entries: Sequence[Entry], fragments: int) -> None:
        """`fragments`: how many the model has."""
        self.entries, self.fragments = entries, fragments
        self.lines: list[Line] = []
        self.rounds = rounds(entries, fragments)
        self._usual = [usual([one for one in self.rounds[1:] if one.fragment == of]) for of in range(fragments)]
        self._started: dict[str, float] = {}
        self._of: dict[tuple[str, ...], Line] = {}  # lines to which others add words
        self._epochs, self._versions = Epochs(), defaultdict[tuple[int, int], dict[str, str]](dict)
        self._made: dict[str, str] = {}  # by digest: which peer made the version, from whose contributions
        self._forked: set[int] = set()
        self._noticed: dict[tuple[str, str], float] = {}
        for entry in entries:
            self._read(entry)
        self._tell_rounds()
        self.lines.sort(key=lambda line: line.time)

    # -- entries

    def _read(self, entry: Entry) -> None:
        me = entry.peer
        match entry.what:
            case str(text) if text.startswith("starts"):
                self._started[me] = entry.time
                self._of.pop(("died", me), None)
            case str(text):
                line = self._add(entry, "death" if text in CRASHED else "fault", f"{me} {text}", 9)
                if text in CRASHED:
                    self._of["died", me] = line
            case Depart(died=False) if ("ended", me) not in self._of:
                self._add(entry, "leave", f"{me} leaves", 7)
            case Found():
                self._add(entry, "found", f"{me} founds the run", 6)
        for fragment, epoch, digest in self._epochs.feed(entry):
            self._version(entry, fragment, epoch, digest)
        for effect in entry.effects:
            match effect:
                case Apply(commit):
                    of = ", ".join(peer for peer, ready in commit.choice.entries if ready.weight)
                    self._made.setdefault(commit.version.digest, f"{commit.leader} from {of or 'no contribution'}")
                case Start():
                    self._ready(entry)
                case Finished():
                    self._of["ended", me] = self._one_line(
                        entry, ("finished",), f"{me} reaches the end of the run", "end", 6, me
                    )
                case Note(kind, text):
                    self._note(entry, kind, text)

    def _ready(self, entry: Entry) -> None:
        me, since = entry.peer, entry.time - self._started.get(entry.peer, entry.time)
        if isinstance(entry.what, Found):
            return
        epoch = self._epochs.lowest(me, self.fragments)
        after = f" {since:.1f} s after its start" if since >= 0.05 else ""
        self._add(entry, "join", f"{me} joins at epoch {epoch}: it holds the state{after}", 6)

    def _note(self, entry: Entry, kind: str, text: str) -> None:
        me = entry.peer
        match kind, text.split():
            case "died", [peer, *reason]:
                self._death(entry, peer, " ".join(reason))
            case "left", [peer, *_] if peer not in self._started:
                self._one_line(entry, ("left", peer), f"{peer} left", "leave", 5)
            case "revision", _ if text.startswith("all"):
                what = text.removeprefix("all fragments now use ")
                self._one_line(entry, ("uses", what), f"{what} is in force at {me}", "revision", 6, me)
            case "takeover", _ if found := re.match(r"fragment (\d+): .* to epoch (\d+); (.*)", text):
                self._takeover(entry, *found.groups())
            case _ if kind not in SILENT:
                said = FRAGMENT.sub("", text)
                self._one_line(entry, (kind, said), f"{me} notes {kind}: {said}", kind, 5, me)

    def _death(self, entry: Entry, peer: str, reason: str) -> None:
        """One line for each death, to which every further peer that notices it adds some words."""
        me, line = entry.peer, self._of.get(("died", peer))
        noticed = self._noticed.setdefault((me, peer), -math.inf)
        if entry.time < noticed + AGAIN_S:
            return
        self._noticed[me, peer] = entry.time
        if line is None or line.time < noticed:
            self._of["died", peer] = self._add(entry, "death", f"{me} takes {peer} for dead: it {reason}", 8)
        elif self._started.get(me, 0.0) <= line.time:  # a newcomer has never known the peer
            said = f"{me}{'' if line.also else ' notices'} within {entry.time - line.time:.2f} s"
            line.also.append(said if reason == UNREACHED or reason in line.text else f"{said} (it {reason})")

    def _takeover(self, entry: Entry, fragment: str, epoch: str, why: str) -> None:
        """One line for all fragments in which a peer leads for one reason."""
        key, what = ("takeover", entry.peer, why), f"epoch {epoch}"
        what += f" of fragment {fragment}" if self.fragments > 1 else ""
        line = self._of.get(key)
        if line is None or line.time < entry.time - AGAIN_S:
            self._of[key] = self._add(entry, "takeover", f"{entry.peer} leads {what}, because {why}", 8)
        elif f" {what}, " not in line.text:
            line.text = f"{line.text.removesuffix(f', because {why}')}, {what}, because {why}"

    def _version(self, entry: Entry, fragment: int, epoch: int, digest: str) -> None:
        """A peer has this version of a fragment. Add a line if that shows a fork, unless one is told already."""
        known = self._versions[fragment, epoch]
        known.setdefault(digest, entry.peer)
        if len(known) < 2:
            if len(self._versions.get((fragment, epoch - 1), known)) < 2:
                self._forked.discard(fragment)
            return
        if not self._forked:
            made = [
                f"one made by {self._made.get(digest, f'{peer} or another peer')}" for digest, peer in known.items()
            ]
            text = f"fork: fragment {fragment} has two versions of epoch {epoch}, {' and '.join(made)}"
            self._add(entry, "fork", text, 9)
        self._forked.add(fragment)

    def _one_line(self, entry: Entry, key: tuple[str, ...], text: str, kind: str, weight: float, me: str = "") -> Line:
        """Make one line of what several peers say. It names each peer after the first with the delay. `key`: what they
        say; `me`: the peer that says it, or empty if peers after the first are not to be named."""
        line = self._of.get(key)
        if line is None:
            line = self._of[key] = self._add(entry, kind, text, weight)
        elif me and not any(said.startswith(f"{me} ") for said in line.also):
            line.also.append(f"{me} {entry.time - line.time:.2f} s later")
        return line

    def _add(self, entry: Entry, kind: str, text: str, weight: float) -> Line:
        self.lines.append(Line(entry.time, kind, text, weight))
        return self.lines[-1]

    # -- rounds

    def _tell_rounds(self) -> None:
        cuts = sorted(line.time for line in self.lines if line.weight >= 6)
        deaths = [line.time for line in self.lines if line.kind == "death"]

        def part(numbered: tuple[int, Round]) -> int:
            """A number that calm rounds have in common if nothing happened between them."""
            number, one = numbered
            bereaved = any(one.began <= death < one.ended for death in deaths)
            told = not number or bereaved or is_slow(one, self.usually(one))
            return ~number if told else bisect_left(cuts, one.ended)

        for key, group in groupby(enumerate(self.rounds), part):
            alike = [one for _, one in group]
            self._tell_calm(alike) if key >= 0 else self._tell_one(alike[0], deaths, first=key == -1)

    def _tell_one(self, one: Round, deaths: Sequence[float], *, first: bool) -> None:
        usually, bereaved = self.usually(one), any(one.began <= death < one.ended for death in deaths)
        than = "" if first else f", usually {usually:.2f} s"
        text = f"{self.name(one)} took {one.took:.2f} s{than}: {one.because() or 'no cause is recorded'}"
        weight = 5 - usually / max(one.took, 1e-9)  # the slowest rounds stay longest
        weight = 4 if first else 8 if bereaved and is_slow(one, usually) else weight
        self.lines.append(Line(one.ended, "first" if first else "slow", text, weight))

    def _tell_calm(self, calm: Sequence[Round]) -> None:
        awaited, took = [one.awaited for one in calm], sorted(one.took for one in calm)
        first, end = calm[0], calm[-1]
        most = max(sorted(set(awaited)), key=awaited.count)
        often = awaited.count(most)
        last = f"; {most} was waited for in {often}" if most and len(calm) > 2 and often > len(calm) / 2 else ""
        which = f"epochs {first.epoch} to {end.epoch}"
        which = f"{self.name(first)} to {self.name(end)}" if self.fragments > 1 else which
        text = f"{which}: {took[len(took) // 2]:.2f} s each ({took[0]:.2f} to {took[-1]:.2f}){last}"
        text = text if len(calm) > 1 else f"{self.name(first)} took {took[0]:.2f} s"
        self.lines.append(Line(first.ended, "rounds", text, 3))

    def usually(self, one: Round) -> float:
        """The seconds that a round of the same fragment usually takes."""
        return self._usual[one.fragment]

    def name(self, one: Round) -> str:
        """The name of a round."""
        return f"epoch {one.epoch}" + (f" of fragment {one.fragment}" if self.fragments > 1 else "")

    # -- text

    def text(self, named: Callable[[str], str], width: int, most: int = LINES_MAX) -> Iterator[str]:
        """The story as text, in at most this many lines of this width. `named` puts names in place of ids."""
        wrapped = [(line, _wrapped(named(f"{line.time:8.2f}  {line}"), width)) for line in self.lines]
        left_out = 0
        for pair in sorted(wrapped, key=lambda pair: (pair[0].weight, -pair[0].time)):
            if sum(len(rows) for _, rows in wrapped) <= most - bool(left_out):
                break
            wrapped.remove(pair)
            left_out += 1
        for _, rows in wrapped:
            yield from rows
        if left_out:
            yield f"({left_out} less important lines are left out; --events shows everything)"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)
