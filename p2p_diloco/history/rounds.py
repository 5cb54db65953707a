"""The rounds of a run: when each outer step of a fragment was complete, and the chain of causes that its time went to.

Law: pure. A round of a fragment ends when the first peer has the fragment's next epoch; it begins when the round before
it ends, of whatever fragment that is. Each event of a replica has one cause: a message was sent, tensor work was asked
for, a trainer was released, a time limit passed. Followed backwards over all peers, the causes fill the whole time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from p2p_diloco.core import events as e
from p2p_diloco.core import messages as m
from p2p_diloco.history.order import DIED, key_of
from p2p_diloco.history.reading import Entry

CRASHED = ("crashes", DIED)
"""Texts of entries by which a peer dies."""
SHOWN = 0.05
"""A part of a chain of causes is not told if it took a smaller share of the round's time than this."""
INNER, UNTIL = "'s inner steps", "until {} may train"
WORK = {
    e.Averaged: "{} computes a mean", e.Applied: "{}'s outer step", e.Filled: "{} loads a state",
    e.Rolled: "{} loads a state", e.Contribute: "{} encodes", e.Merge: "{}" + INNER,
}  # fmt: skip
"""What a peer has done once such an event comes."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One part of a chain of causes: what the time from `since` to `until` went to."""

    since: float
    until: float
    text: str


@dataclass(slots=True)
class Round:
    """One outer step of a fragment. `done`: by peer, when it had completed it. `why`: what the time from `began` to
    `ended` went to."""

    fragment: int
    epoch: int
    began: float
    ended: float
    done: dict[str, float] = field(default_factory=dict)
    why: list[Hop] = field(default_factory=list)

    @property
    def took(self) -> float:
        """The round's length in seconds."""
        return self.ended - self.began

    @property
    def awaited(self) -> str:
        """The peer whose inner steps the round waited for longest; empty if it waited for no inner steps."""
        inner = [hop for hop in self.why if hop.text.endswith(INNER)]
        return max(inner, key=lambda hop: hop.until - hop.since).text.removesuffix(INNER) if inner else ""

    def because(self) -> str:
        """What the round's time went to: a text with the seconds of each cause, without short ones (see `SHOWN`)."""
        hops = [hop for hop in self.why if hop.until - hop.since >= SHOWN * self.took]
        return ", ".join(f"{hop.text} {hop.until - hop.since:.2f} s" for hop in hops)


def moved(entry: Entry) -> Iterator[tuple[int, int, str]]:
    """The (fragment, epoch, digest) of each fragment that gets a new version by an entry."""
    match entry.what:
        case e.Found(_, hashes):
            yield from ((fragment, 0, digest) for fragment, digest in enumerate(hashes))
        case e.Restore(states):
            yield from ((state.fragment, state.version.epoch, state.version.chain) for state in states)
    for effect in entry.effects:
        if isinstance(effect, e.Accept) and effect.numbers is None:
            yield from ((fragment, version.epoch, version.chain) for fragment, version in effect.versions)


def rounds(entries: Sequence[Entry], fragments: int) -> list[Round]:
    """All rounds of a model with so many fragments, in the order in which they ended."""
    causes, found = list(_causes(entries)), dict[tuple[int, int], Round]()
    began = next((entry.time for entry in entries if isinstance(entry.what, e.Found)), 0.0)
    for at, entry in enumerate(entries):
        for fragment, epoch, _ in moved(entry):
            if epoch and fragment < fragments:
                if (fragment, epoch) not in found and isinstance(entry.what, e.Applied):
                    why = _chain(entries, causes, at, began)
                    found[fragment, epoch] = Round(fragment, epoch, began, entry.time, {}, why)
                    began = entry.time
                if (fragment, epoch) in found:
                    found[fragment, epoch].done.setdefault(entry.peer, entry.time)
    return list(found.values())


def _chain(entries: Sequence[Entry], causes: Sequence[tuple[int, str]], at: int, since: float) -> list[Hop]:
    """What the time from `since` to the entry with the index `at` went to, oldest part first. Neighbours of one text
    are one part."""
    hops: list[Hop] = []
    until = entries[at].time
    while until > since and at >= 0:
        at, text = causes[at]
        begun = min(until, max(since, entries[at].time)) if at >= 0 else since
        hops.append(Hop(begun, until, text))
        until = begun
    told = groupby((hop for hop in reversed(hops) if hop.since < hop.until), lambda hop: hop.text)
    return [Hop(alike[0].since, alike[-1].until, text) for text, alike in ((text, [*group]) for text, group in told)]


def _causes(entries: Sequence[Entry]) -> Iterator[tuple[int, str]]:
    """For each entry, the index of the entry that led to it, and what the time between the two went to. An index of -1:
    a chain of causes begins here."""
    commits = [effect.commit for entry in entries for effect in entry.effects if isinstance(effect, e.Apply)]
    counted = {it.version.chain: [peer for peer, ready in it.choice.entries if ready.weight] for it in commits}
    starts = {at for at, entry in enumerate(entries) if any(isinstance(effect, e.Start) for effect in entry.effects)}
    last: dict[Hashable, int] = {}  # by what entries have asked for or begun: the last such entry
    for at, entry in enumerate(entries):
        me = entry.peer
        match entry.what:
            case str() if entry.what in CRASHED:
                yield -1, f"before the death of {me}"
            case _ if at in starts:
                yield -1, UNTIL.format(me)
            case e.Received(sender, message) if (sent := (sender, me, key_of(message))) in last:
                yield last[sent], f"{sender}'s {type(message).__name__} travels to {me}"
            case e.Broke(peer) | e.SendFailed(peer, _, True) if last.get((peer, DIED), -1) > last.get(peer, -1):
                yield last[peer, DIED], f"{me} notices the death of {peer}"
            case e.Averaged() | e.Applied() | e.Filled() | e.Rolled() as done:
                yield last.get((me, _place(done)), -1), WORK[type(done)].format(me)
            case e.Merge() if (at_start := last.get((me, "trainer"), -1)) in starts:
                yield at_start, UNTIL.format(me)  # it held a state, and waited for others (restart_wait)
            case e.Contribute() | e.Merge():
                yield last.get((me, "trainer"), -1), WORK[type(entry.what)].format(me)
            case e.Pause(paused):
                yield last.get((me, "trainer"), -1), f"{me}{INNER}" if paused else f"{me} pauses"
            case _:
                yield last.get((me, "acts"), -1), f"{me} waits {_for(entry, counted)}"
        last.update(dict.fromkeys(_leaves(entry), at))


def _for(entry: Entry, counted: Mapping[str, Sequence[str]]) -> str:
    """What a peer waited for until an entry: the words after "waits". `counted`: by digest, whom a version counts."""
    for effect in entry.effects:
        match effect:
            case e.Note("died", text):
                return f"until {text}"
            case e.Send(_, m.Close(base=base, choice=m.Choice(entries=entries))):
                if missing := [peer for peer in counted.get(base.chain, ()) if peer not in dict(entries)]:
                    return f"in vain for {' and '.join(missing)}"
    return f"for {entry.what.sender}" if isinstance(entry.what, e.Received) else "for its timer"


def _leaves(entry: Entry) -> Iterator[Hashable]:
    """The keys by which later entries find this one as their cause."""
    me = entry.peer
    match entry.what:
        case str(text):
            yield (me, DIED) if text in CRASHED else me
        case e.Pause():
            yield me, "trainer"
        case e.Contribute() | e.Found():
            yield me, "acts"
    for effect in entry.effects:
        match effect:
            case e.Send(to, message):
                yield me, to, key_of(message)
                if not isinstance(message, m.Probe | m.ProbeAck):
                    yield me, "acts"
            case e.Load() | e.Release() | e.Start():
                yield me, "trainer"
            case e.Average() | e.Apply() | e.Fill() | e.Roll():
                yield me, _place(effect)


def _place(work: Any) -> tuple[int, int | None]:
    """The fragment and the slice that tensor work is for; no slice: all."""
    return getattr(work, "commit", work).fragment, getattr(getattr(work, "mean", work), "number", None)
