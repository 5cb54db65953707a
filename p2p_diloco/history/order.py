"""Puts the histories of several peers into one order: no message arrives before it is sent.

Law: pure. The clocks of two machines differ, so their times alone give no order. A message that was sent once and
received once shows how much two clocks differ at most, and by these bounds the clocks are put right. What is left of
the error is removed by force: an entry that receives such a message comes after the entry that sends it, and is shown
with no earlier time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from p2p_diloco.core.events import Died, Received, Send
from p2p_diloco.core.messages import Message
from p2p_diloco.history.reading import Entry

if TYPE_CHECKING:
    from p2p_diloco.history.reading import Life  # which loads torch

DIED, STARTED = "dies: its history ends without a goodbye", "starts"
DEAD_AFTER_S = 20.0
"""If a peer has not left and is heard of for the last time so many seconds before the histories end, it has died. A
live peer's history lags by some seconds, because events are written together."""

Streams = Mapping[str, Sequence[Entry]]
"""The entries of each peer, in their own order."""
Place = tuple[str, int]
"""The place of an entry: its peer, and its index among that peer's entries."""


class Ordered(NamedTuple):
    """All entries in one order, with times that never fall, in seconds since `began`, which is in seconds since 1970.

    `shifts`: by peer, the seconds that were added to its clock's times."""

    entries: list[Entry]
    began: float
    shifts: Mapping[str, float]


def ordered(lives: Sequence[Life]) -> Ordered:
    """Merge the histories of one run."""
    streams: dict[str, list[Entry]] = defaultdict(list)
    for life in lives:  # sorted by start, so the lives of one peer come in order
        if life.entries:
            streams[life.peer] += [Entry(life.entries[0].time, life.peer, STARTED), *life.entries]
    sent = _pairs(streams)
    shifts = _shifts(streams, sent)
    straight = {peer: [replace(it, time=it.time + shifts[peer]) for it in stream] for peer, stream in streams.items()}
    entries = list(_merged(straight, dict(sent)))
    starts = {peer: [it.time for it in entries if it.peer == peer and it.what == STARTED] for peer in streams}
    deaths = []
    for life in lives:
        if life.entries:
            starts[life.peer].pop(0)
            until = min(starts[life.peer], default=math.inf)
            deaths += [] if life.head.left else [_death(life.peer, entries, until)]
    entries = sorted([*entries, *(death for death in deaths if death)], key=lambda entry: entry.time)
    began = entries[0].time if entries else 0.0
    return Ordered([replace(entry, time=entry.time - began) for entry in entries], began, shifts)


def _death(peer: str, entries: Sequence[Entry], until: float) -> Entry | None:
    """A peer's death, if it has died: at the time at which it was heard of for the last time, which may be later than
    its history's end. `until`: when it has started again."""
    senders = ((it, it.what.sender if isinstance(it.what, Received) else "") for it in entries if it.time < until)
    heard = max((it.time for it, sender in senders if peer in (it.peer, sender)), default=until)
    if until < math.inf:
        return Entry(heard, peer, DIED)
    after = [effect for it in entries if it.time > heard for effect in it.effects]
    is_noted = any(isinstance(effect, Died) and effect.peer == peer for effect in after)
    return Entry(heard, peer, DIED) if is_noted or entries[-1].time > heard + DEAD_AFTER_S else None


def key_of(message: Message) -> Hashable:
    """What a message has in common when it is sent and when it is received. Of what it says, only what it is about:
    a part of a state may be a newer one when it leaves than in its sender's history."""
    return type(message), *(getattr(message, name, None) for name in ("fragment", "base", "number", "author"))


def _pairs(streams: Streams) -> list[tuple[Place, Place]]:
    """The (receiving, sending) entries of each message that was sent once and received once."""
    sends, receipts = defaultdict[Any, list[Place]](list), defaultdict[Any, list[Place]](list)
    for peer, stream in streams.items():
        for number, entry in enumerate(stream):
            if isinstance(entry.what, Received):
                receipts[entry.what.sender, peer, key_of(entry.what.message)].append((peer, number))
            for effect in entry.effects:
                if isinstance(effect, Send):
                    sends[peer, effect.to, key_of(effect.message)].append((peer, number))
    return [(at[0], sends[key][0]) for key, at in receipts.items() if len(at) == len(sends[key]) == 1]


def _shifts(streams: Streams, sent: Sequence[tuple[Place, Place]]) -> dict[str, float]:
    """The seconds to add to the times of each peer's clock; none if no message links it to others before it."""
    least = defaultdict[tuple[str, str], float](lambda: math.inf)  # a message's shortest transfer, by the two clocks
    for (to, arrived), (sender, left) in sent:
        least[sender, to] = min(least[sender, to], streams[to][arrived].time - streams[sender][left].time)
    shifts: dict[str, float] = {}
    for root in streams:
        linked = [] if root in shifts else [root]
        for one in linked:  # which grows
            shifts.setdefault(one, 0.0)
            for other in streams:
                # no transfer takes less than no time: the other clock is behind this one by `low` to `high`
                low, high = -least[one, other], least[other, one]
                if other not in shifts and (low, high) != (-math.inf, math.inf):
                    as_it_is = -shifts[one]
                    middle = (low + high) / 2 if math.isfinite(low + high) else min(max(low, as_it_is), high)
                    shifts[other] = 0.0 if low <= as_it_is <= high else shifts[one] + middle
                    linked.append(other)
    return shifts


def _merged(streams: Streams, before: Mapping[Place, Place]) -> Iterator[Entry]:
    """The entries of all streams, by time, but each one after the entry that `before` names for it."""
    at, now = dict.fromkeys(streams, 0), -math.inf
    while left := [peer for peer in streams if at[peer] < len(streams[peer])]:
        causes = {peer: before.get((peer, at[peer])) for peer in left}
        may = [peer for peer, cause in causes.items() if cause is None or cause[1] < at[cause[0]]]
        peer = min(may or left, key=lambda peer: streams[peer][at[peer]].time)
        now = max(now, streams[peer][at[peer]].time)
        yield replace(streams[peer][at[peer]], time=now)
        at[peer] += 1
