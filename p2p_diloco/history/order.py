"""Puts the histories of several peers into one order: no message arrives before it is sent.

Law: pure. The clocks of two machines differ, so their times alone give no order. A message that was sent and received
shows how much two clocks differ at most, and by these bounds the clocks are put right. What is left of the error is
removed by force: an entry that receives a message comes after the entry that sends it, and is shown with no earlier
time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from p2p_diloco.core.events import Note, Received, Send
from p2p_diloco.core.messages import Commit, Head, Message, Part, Ready
from p2p_diloco.history.entry import Entry

if TYPE_CHECKING:
    from p2p_diloco.history.reading import Life  # which loads torch

DIED = "dies: its history ends without a goodbye"
STARTED = "starts"
DEAD_AFTER_S = 20.0
"""If a history ends this many seconds before the others, and its peer has not left, the peer has died. A live peer's
history lags by some seconds, because events are written together."""

Place = tuple[str, int]
"""The place of an entry: its peer, and its index among that peer's entries."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """All entries in one order, with times that never fall, in seconds since `began`, which is in seconds since 1970.

    `shifts`: by peer, the seconds that were added to its clock's times. `adrift`: the peers whose messages with the
    others are not in their histories, so that their own clocks alone place them."""

    entries: list[Entry]
    began: float
    shifts: Mapping[str, float]
    adrift: tuple[str, ...]


def ordered(lives: Sequence[Life]) -> Ordered:
    """Merge the histories of one run."""
    streams: dict[str, list[Entry]] = defaultdict(list)
    for life in lives:  # sorted by start, so the lives of one peer come in order
        if life.entries:
            streams[life.peer] += [Entry(life.entries[0].time, life.peer, STARTED), *life.entries]
    sent = _pairs(streams, {life.peer for life in lives if not life.whole})
    shifts, adrift = _shifts(streams, sent)
    straight = {peer: [entry.time + shifts[peer] for entry in stream] for peer, stream in streams.items()}
    last = {life.peer: life for life in lives}
    died = {
        peer: when for peer in streams if not last[peer].left if (when := _death(peer, streams, straight)) is not None
    }
    for peer, when in died.items():
        straight[peer].append(when)
        streams[peer].append(Entry(when, peer, DIED))
    entries = list(_merged(streams, straight, {to: of for of, to, _ in sent}))
    began = entries[0].time if entries else 0.0
    return Ordered([replace(entry, time=entry.time - began) for entry in entries], began, shifts, adrift)


def _death(peer: str, streams: Mapping[str, Sequence[Entry]], times: Mapping[str, Sequence[float]]) -> float | None:
    """When a peer died whose history ends without a goodbye; None: it lives. It has died if another peer has noted its
    death since, or if other histories go on for DEAD_AFTER_S. It died when another peer last heard from it, or when its
    history ends if that is later: a history may lack its peer's last moments."""
    end, heard, is_mourned = times[peer][-1], times[peer][-1], False
    for other in streams.keys() - {peer}:
        for time, entry in zip(times[other], streams[other], strict=True):
            if isinstance(entry.what, Received) and entry.what.sender == peer:
                heard = max(heard, time)
            is_mourned |= time > end and any(
                isinstance(effect, Note) and effect.kind == "died" and effect.text.startswith(f"{peer} ")
                for effect in entry.effects
            )
    last = max(each[-1] for each in times.values())
    return heard if is_mourned or end < last - DEAD_AFTER_S else None


def key_of(message: Message) -> Hashable:
    """Return the key by which a sent message is matched with the received one: the message itself. For a part of a
    state it is only the type and the place, because a newer one may have been sent than that in the sender's
    history."""
    match message:
        case Head(fragment):
            return Head, fragment
        case Part(fragment, number=number):
            return Part, fragment, number
    return message


def _pairs(streams: Mapping[str, Sequence[Entry]], torn: set[str]) -> list[tuple[Place, Place, bool]]:
    """(sending, receiving, unique) of each message that is in two histories; unique: whether it was sent and received
    once. Equal messages between two peers are matched in order: the n-th can't arrive before n were sent. `torn`: peers
    of whose histories a part is missing; of their messages only unique commits and contributions are matched."""
    sends, receipts = defaultdict[Any, list[Place]](list), defaultdict[Any, list[Place]](list)
    for peer, stream in streams.items():
        for number, entry in enumerate(stream):
            if isinstance(entry.what, Received) and entry.what.sender in streams:
                receipts[entry.what.sender, peer, key_of(entry.what.message)].append((peer, number))
            for effect in entry.effects:
                if isinstance(effect, Send) and effect.to in streams:
                    sends[peer, effect.to, key_of(effect.message)].append((peer, number))
    found = []
    for (sender, to, message), arrived in receipts.items():
        left = sends.get((sender, to, message), [])
        unique = len(left) == len(arrived) == 1 and not isinstance(message, tuple)
        if sender not in torn or (unique and isinstance(message, Commit | Ready)):
            found += [(of, at, unique) for of, at in zip(left, arrived, strict=False)]
    return found


def _shifts(
    streams: Mapping[str, Sequence[Entry]], sent: Sequence[tuple[Place, Place, bool]]
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The seconds to add to the times of each peer's clock; and the peers for which no message shows how many."""
    least = defaultdict[tuple[str, str], float](lambda: math.inf)  # a message's shortest transfer, by the two clocks
    for (sender, left), (to, arrived), unique in sent:
        if unique:
            way = streams[to][arrived].time - streams[sender][left].time
            least[sender, to] = min(least[sender, to], way)
    count = {peer: sum(peer in pair for pair in least) for peer in streams}
    shifts: dict[str, float] = {}
    adrift = []
    for root in sorted(streams, key=lambda peer: -count[peer]):
        if root in shifts:
            continue
        if shifts:
            adrift.append(root)
        shifts[root], known = 0.0, [root]
        while known:
            one = known.pop(0)
            for other in streams:
                if other not in shifts and (least[one, other] < math.inf or least[other, one] < math.inf):
                    # no transfer takes less than no time: the other clock is behind this one by `low` to `high`
                    low, high = -least[one, other], least[other, one]
                    shifts[other] = shifts[one] + _within(low, high, -shifts[one])
                    known.append(other)
    return shifts, tuple(adrift)


def _within(low: float, high: float, as_it_is: float) -> float:
    """A shift between these bounds: `as_it_is` if it lies between them; else the middle, or the only finite bound."""
    if low <= as_it_is <= high:
        return as_it_is
    if math.inf in (-low, high):
        return low if high == math.inf else high
    return (low + high) / 2


def _merged(
    streams: Mapping[str, Sequence[Entry]], times: Mapping[str, Sequence[float]], before: Mapping[Place, Place]
) -> Iterator[Entry]:
    """The entries of all streams, by time, but each one after the entry that `before` names for it."""
    at = dict.fromkeys(streams, 0)
    shown: dict[Place, float] = {}
    now = -math.inf

    def due(peer: str) -> float:
        """The earliest time at which the peer's next entry can be shown; inf: another entry must come first."""
        place = peer, at[peer]
        cause = before.get(place)
        if cause is not None and cause not in shown:
            return math.inf
        return max(
            times[peer][at[peer]], shown.get((peer, at[peer] - 1), -math.inf), shown.get(cause or place, -math.inf)
        )

    while left := [peer for peer in streams if at[peer] < len(streams[peer])]:
        peer = min(left, key=lambda peer: (due(peer), times[peer][at[peer]]))
        earliest = due(peer)
        now = max(now, times[peer][at[peer]] if earliest == math.inf else earliest)
        shown[peer, at[peer]] = now
        yield replace(streams[peer][at[peer]], time=now)
        at[peer] += 1
