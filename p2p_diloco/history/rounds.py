"""The rounds of a run: when each outer step of a fragment was complete, and what its time went to.

Law: pure. A round of a fragment ends when the first peer has the fragment's next epoch. The round begins when the round
before it ends, of whatever fragment that is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from p2p_diloco.core import events, messages
from p2p_diloco.history.causes import CRASHED, Causes, Hop, joined
from p2p_diloco.history.entry import Entry

PARTS = ("inner", "encode", "transfer", "group", "outer", "merge", "paused")
"""What a peer spends the time of a round on; group: waiting for the averaging group."""
CAME = (messages.Mean, messages.Commit)
"""Messages whose way to a peer is a transfer, besides its contributions' ways."""
SLOW, SLOW_S = 1.5, 0.1
"""A round is slow if it takes more than SLOW times the median, and over SLOW_S seconds longer than the median."""
SHOWN = 0.05
"""A part of a chain of causes is not told if it took a smaller share of the round's time than this."""


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


# -- one round in detail


@dataclass(frozen=True, slots=True)
class Span:
    """A time that a peer spent on one of `PARTS`."""

    since: float
    until: float
    part: str


def spans(entries: Sequence[Entry], peer: str) -> list[Span]:
    """What a peer spent its time on. Later spans cover earlier ones: within an exchange, what is neither transfer nor
    outer step is a wait for the group."""
    training, above = list[Span](), list[Span]()
    since, part = None, ""
    sending, stepping = dict[tuple[str, object], float](), dict[tuple[object, ...], float]()
    sent: dict[tuple[str, object], float] = {}
    for entry in entries:
        for effect in entry.effects:
            if isinstance(effect, events.Send) and effect.to == peer and isinstance(effect.message, CAME):
                sent[entry.peer, effect.message] = entry.time
        if entry.peer != peer:
            continue
        now, began = entry.time, _begins(entry)
        if entry.what in CRASHED and since is not None:
            training.append(Span(since, now, part))
            since, part = None, ""
        if began and (began != part or began == "inner"):
            if since is not None:
                training.append(Span(since, now, "encode" if part == "inner" and began == "group" else part))
            since, part = now, began
        match entry.what:
            case events.Averaged(fragment, _, _, number) if (fragment, number) in stepping:
                above.append(Span(stepping.pop((fragment, number)), now, "outer"))
            case events.Applied(fragment) if (fragment,) in stepping:
                above.append(Span(stepping.pop((fragment,)), now, "outer"))
            case events.Delivered(to, messages.Ready() | messages.Slice() as message) if (to, message) in sending:
                above.append(Span(sending.pop((to, message)), now, "transfer"))
            case events.Received(sender, messages.Mean() | messages.Commit() as message) if (sender, message) in sent:
                above.append(Span(sent.pop((sender, message)), now, "transfer"))
        for effect in entry.effects:
            match effect:
                case events.Average(fragment, number=number):
                    stepping[fragment, number] = now
                case events.Apply(commit):
                    stepping[(commit.fragment,)] = now
                case events.Send(to, messages.Ready() | messages.Slice() as message):
                    sending[to, message] = now
    if since is not None:
        training.append(Span(since, entries[-1].time, part))
    above.sort(key=lambda span: span.part == "outer")
    return [*training, *above]


def _begins(entry: Entry) -> str:
    """The part that begins for the trainer with this entry; empty: none."""
    if any(isinstance(effect, events.Release) for effect in entry.effects):
        return "merge"
    if any(isinstance(effect, (events.Load, events.Start)) for effect in entry.effects):
        return "inner" if isinstance(entry.what, events.Merge) else "merge"
    match entry.what:
        case events.Contribute():
            return "group"
        case events.Pause(paused):
            return "paused" if paused else "inner"
    return ""


def gantt(
    entries: Sequence[Entry], one: Round, peers: Sequence[str], named: Callable[[str], str], width: int
) -> Iterator[str]:
    """A round as text: a row of letters for each peer, and a table of seconds. A letter is the first one of the part
    (`PARTS`) on which the peer spent that time."""
    label = max([7, *(len(named(peer)) for peer in peers)])
    columns = width - label - 2
    cell = max(one.took, 1e-9) / columns
    until = [entry for entry in entries if entry.time <= one.ended]
    rows = {}
    for peer in peers:
        row = [" "] * columns
        for span in spans(until, peer):
            first, last = (span.since - one.began) / cell, (span.until - one.began) / cell
            for column in range(max(0, int(first)), min(columns, int(last) + (span.until > span.since))):
                row[column] = span.part[0]
        if any(letter != " " for letter in row):
            rows[peer] = row
            yield f"{named(peer):{label}}  {''.join(row).rstrip()}"
    yield f"{'':{label}}  {'0 s':{columns - 10}}{one.took:8.2f} s"
    yield ""
    yield f"{'seconds':{label}}" + "".join(f"{part:>9}" for part in PARTS)
    for peer, row in rows.items():
        yield f"{named(peer):{label}}" + "".join(f"{row.count(part[0]) * cell:9.2f}" for part in PARTS)
