"""The rounds of a run: when each outer step of a fragment was complete, and the chain of causes that its time went to.

Law: pure. A round of a fragment ends when the first peer has the fragment's next epoch; it begins when the round before
it ends, of whatever fragment that is. Each event of a replica has one cause: a message was sent, tensor work was asked
for, a trainer was released, a time limit passed. Followed backwards over all peers, the causes fill the whole time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from p2p_diloco.core import events, messages
from p2p_diloco.history.entry import Entry
from p2p_diloco.history.order import DIED, key_of

WAYS = {
    **dict.fromkeys((messages.Ready, messages.Slice), "{sender}'s contribution travels to {to}"),
    messages.Close: "{sender}'s choice travels to {to}",
    messages.Mean: "{sender}'s mean travels to {to}",
    messages.Commit: "the commit travels to {to}",
    messages.Want: "{sender}'s request to {to}",
    messages.Claim: "{sender}'s claim travels to {to}",
    messages.Vote: "{sender}'s vote travels to {to}",
    **dict.fromkeys((messages.Head, messages.Part), "the state travels to {to}"),
}
CRASHED = ("crashes", DIED)
"""Texts of entries by which a peer dies."""
SLOW, SLOW_S = 1.5, 0.1
"""A round is slow if it takes more than SLOW times the median, and over SLOW_S seconds longer than the median."""
SHOWN = 0.05
"""A part of a chain of causes is not told if it took a smaller share of the round's time than this."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One part of a chain of causes: what the time from `since` to `until` went to. `peer`: which peer worked or was
    waited for; `part`: inner, encode, transfer, outer_step, group, paused, before or
    death."""

    since: float
    until: float
    peer: str
    part: str
    text: str


@dataclass(slots=True)
class Round:
    """One outer step of a fragment. `at`: the index of the entry with which the first peer had completed it. `done`: by
    peer, when it had completed it."""

    fragment: int
    epoch: int
    began: float
    ended: float
    at: int
    done: dict[str, float] = field(default_factory=dict)
    why: list[Hop] = field(default_factory=list)
    """What the time from `began` to `ended` went to."""

    @property
    def took(self) -> float:
        """The round's length in seconds."""
        return self.ended - self.began

    @property
    def awaited(self) -> str:
        """The peer whose inner steps the round waited for longest; empty if it waited for no inner steps."""
        inner = [hop for hop in self.why if hop.part == "inner"]
        longest = max(inner, key=lambda hop: hop.until - hop.since, default=None)
        return "" if longest is None else longest.peer

    def because(self) -> str:
        """What the round's time went to: a text with the seconds of each cause, without short ones (see `SHOWN`)."""
        hops = [hop for hop in self.why if hop.until - hop.since >= SHOWN * self.took]
        return ", ".join(f"{hop.text} {hop.until - hop.since:.2f} s" for hop in hops)


class Epochs:
    """Follows the epochs of every peer's fragments. `feed` returns the fragments that an entry has moved, with their
    epochs and digests."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, int], int] = {}

    def feed(self, entry: Entry) -> list[tuple[int, int, str]]:
        """Take the next entry of the history."""
        me, moved = entry.peer, []
        match entry.what:
            case "starts":
                self.of = {place: epoch for place, epoch in self.of.items() if place[0] != me}
            case events.Found(_, hashes):
                moved = [(fragment, 0, digest) for fragment, digest in enumerate(hashes)]
            case events.Restore(states):
                moved = [(state.fragment, state.version.epoch, state.version.digest) for state in states]
        for effect in entry.effects:
            if isinstance(effect, events.Accept) and effect.numbers is None:
                moved += [(fragment, version.epoch, version.digest) for fragment, version in effect.proposals]
        self.of.update({(me, fragment): epoch for fragment, epoch, _ in moved})
        return moved

    def lowest(self, peer: str, fragments: int) -> int:
        """The lowest epoch of any fragment at a peer; -1 if the peer lacks one of them."""
        return min(self.of.get((peer, fragment), -1) for fragment in range(fragments))


def rounds(entries: Sequence[Entry], fragments: int) -> list[Round]:
    """All rounds of a model with so many fragments, in the order in which they ended."""
    epochs, causes = Epochs(), Causes(entries)
    found: dict[tuple[int, int], Round] = {}
    began = next((entry.time for entry in entries if isinstance(entry.what, events.Found)), 0.0)
    for at, entry in enumerate(entries):
        for fragment, epoch, _ in epochs.feed(entry):
            if not epoch or fragment not in range(fragments):
                continue
            if (fragment, epoch) not in found and isinstance(entry.what, events.Applied):
                why = [*joined(causes.chain(at, began))]
                found[fragment, epoch] = Round(fragment, epoch, began, entry.time, at, {}, why)
                began = entry.time
            if (fragment, epoch) in found:
                found[fragment, epoch].done.setdefault(entry.peer, entry.time)
    return list(found.values())


def usual(done: Sequence[Round]) -> float:
    """The median of the rounds' lengths in seconds; 0 if there is no round."""
    return statistics.median(one.took for one in done) if done else 0.0


def is_slow(one: Round, usually: float) -> bool:
    """Whether a round took clearly longer than usual."""
    return one.took > max(SLOW * usually, usually + SLOW_S)


# -- causes


class Causes:
    """The cause of each entry: the entry that led to it, and what happened between the two."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._of: list[tuple[int, str, str] | None] = []  # (cause, part, text), by entry
        self._sent = defaultdict[Any, deque[int]](deque)
        self._last: dict[Any, int] = {}
        self._died: dict[str, int] = {}
        self._groups: dict[str, tuple[str, ...]] = {}  # by digest of a version: whom it counts
        for at, entry in enumerate(entries):
            self._of.append(self._cause(entry))
            self._remember(at, entry)

    def chain(self, at: int, since: float) -> list[Hop]:
        """What the time from `since` to the entry with the index `at` went to, oldest part first."""
        hops: list[Hop] = []
        until = self._entries[at].time
        while until > since and (cause := self._of[at]) is not None and not self._root(self._entries[at]):
            at, part, text = cause
            begun = max(since, self._entries[at].time)
            if begun < until:
                hops.append(Hop(begun, until, self._entries[at].peer, part, text))
            until = min(until, begun)
        if until > since and (root := self._root(self._entries[at])):
            hops.append(Hop(since, until, self._entries[at].peer, "before", root))
        return hops[::-1]

    @staticmethod
    def _root(entry: Entry) -> str:
        """A name for the time before an entry with which a chain of causes begins: a death, or the moment from which a
        peer may train. Empty for all other entries."""
        if entry.what in CRASHED:
            return f"before the death of {entry.peer}"
        begins = any(isinstance(effect, events.Start) for effect in entry.effects)
        return f"until {entry.peer} may train" if begins else ""

    def _cause(self, entry: Entry) -> tuple[int, str, str] | None:
        me = entry.peer
        match entry.what:
            case events.Received(sender, message):
                sent = self._sent.get((sender, me, key_of(message)))
                if not sent:  # the sender's history is missing, or lacks its end
                    return self._at((me, "act"), "group", f"{me} waits for {sender}")
                text = WAYS.get(type(message), "{sender}'s message travels to {to}").format(sender=sender, to=me)
                return sent.popleft() if len(sent) > 1 else sent[0], "transfer", text
            case events.Averaged(fragment, base, _, number):
                return self._at((me, fragment, base, number), "outer_step", f"{me} computes a mean")
            case events.Applied(fragment, base):
                return self._at((me, fragment, base), "outer_step", f"{me}'s outer step")
            case events.Filled(fragment, version, number) | events.Rolled(fragment, version, number):
                return self._at((me, fragment, version, number), "transfer", f"{me} loads a state")
            case events.Contribute():
                return self._at((me, events.Load), "encode", f"{me} encodes")
            case events.Merge():
                return self._at((me, events.Release), "inner", f"{me}'s inner steps")
            case events.Pause(paused):
                why = ("inner", f"{me}'s inner steps") if paused else ("paused", f"{me} pauses")
                return self._at((me, events.Release), *why)
            case events.Delivered(to, message) | events.SendFailed(to, message):
                gone = isinstance(entry.what, events.SendFailed) and entry.what.gone
                if gone and to in self._died:
                    return self._died[to], "death", f"{me} notices the death of {to}"
                return self._at((me, to, key_of(message)), "transfer", f"the answer of {to} to {me}")
            case events.Closed(peer) if peer in self._died:
                return self._died[peer], "death", f"{me} notices the death of {peer}"
            case events.Closed() | events.Wakeup():
                return self._at((me, "act"), "group", f"{me} waits {self._for(entry)}")
        return None

    def _for(self, entry: Entry) -> str:
        """What a peer waited for until a timer or a broken connection let it go on: the words after "waits"."""
        for effect in entry.effects:
            match effect:
                case events.Note("died", text):
                    return f"until {text}"
                case events.Send(_, messages.Close(base=base, choice=messages.Choice(entries=entries))):
                    if missing := self._missing(base.digest, {peer for peer, _ in entries}):
                        return f"in vain for {missing}"
                case events.Average(_, base, slices=slices):
                    if missing := self._missing(base.digest, {part.author for _, part in slices}):
                        return f"in vain for {missing}"
        return "for its timer"

    def _missing(self, base: str, came: set[str]) -> str:
        """The peers that the version with this digest counts, and that its successor does not."""
        return " and ".join(peer for peer in self._groups.get(base, ()) if peer not in came)

    def _at(self, key: Any, part: str, text: str) -> tuple[int, str, str] | None:
        return None if key not in self._last else (self._last[key], part, text)

    def _remember(self, at: int, entry: Entry) -> None:
        me, last, acts = entry.peer, self._last, False
        if entry.what in CRASHED:
            self._died[me] = at
        elif entry.what == "starts":
            self._died.pop(me, None)
        for effect in entry.effects:
            match effect:
                case events.Send(to, message):
                    if isinstance(message, messages.Commit):
                        self._counts(message)
                    self._sent[me, to, key_of(message)].append(at)
                    last[me, to, key_of(message)] = at
                    acts |= not isinstance(message, (messages.Probe, messages.ProbeAck))
                case events.Average(fragment, base, number=number):
                    last[me, fragment, base, number] = at
                case events.Apply(commit):
                    self._counts(commit)
                    last[me, commit.fragment, commit.base] = at
                case events.Fill(fragment, version, number):
                    last[me, fragment, version, number] = at
                case events.Roll(commit, mean):
                    last[me, commit.fragment, commit.version, mean.number] = at
                case events.Load():
                    last[me, events.Load] = at
                case events.Release() | events.Start():
                    last[me, events.Release] = at
        if isinstance(entry.what, events.Pause):
            last[me, events.Release] = at  # what the trainer does from now on is another part
        if acts or isinstance(entry.what, (events.Contribute, events.Found)):
            last[me, "act"] = at

    def _counts(self, commit: messages.Commit) -> None:
        self._groups[commit.version.digest] = tuple(peer for peer, ready in commit.choice.entries if ready.weight)


def joined(hops: Iterable[Hop]) -> Iterator[Hop]:
    """Join neighbouring hops that have the same text to one."""
    for _, alike in groupby(hops, attrgetter("text")):
        first, *others = alike
        yield replace(first, until=others[-1].until) if others else first
