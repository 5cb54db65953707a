"""Limits how many payloads are received at a time, and how much others may ask for. No single member of a private run
gets all slots.

Law: only counts; knows no stream. In an open run peers have no shares of the slots, because anyone
could make further identities. There a limit on the memory of all payloads together applies instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

PER_PEER, PER_GRANT = 1 / 4, 3 / 4
"""The fraction of the slots that one member may hold, and that all members of one grant together may hold. So there are
always slots for members of other grants."""
UNPROVEN_BYTES_MAX = 2 << 30
"""The most bytes of payloads that the peers of an open run, who have proven nothing, may have under way together. A
longer payload is taken while there is no other."""
ASKERS_MAX = 4096
"""The most askers that a `Budget` remembers; the one that asked longest ago is forgotten first."""


class Groups(Protocol):
    """A function that returns the grant by which a peer was admitted."""

    def __call__(self, peer: str) -> Hashable | None:
        """The grant of a member; None: the run is open."""


def no_groups(peer: str) -> Hashable | None:
    """The `Groups` of an open run: it returns None, because peers of an open run have no grants."""
    return None


def has_room(peer: str, holders: Counter[str], count: int, groups: Groups) -> bool:
    """Whether a peer may take one more of `count` places: one must be free, and in a private run neither the peer nor
    all peers of its grant together may have their whole share. `holders`: the number of places that each peer holds."""
    if holders.total() >= count:
        return False
    if (group := groups(peer)) is None:
        return True
    theirs = sum(held for other, held in holders.items() if groups(other) == group)
    return holders[peer] < PER_PEER * count and theirs < PER_GRANT * count


class Slots:
    """The slots for payloads that are being received."""

    def __init__(self, count: int) -> None:
        self.free = asyncio.Semaphore(count)
        self._count = count
        self._shares = WeakValueDictionary[Hashable, asyncio.Semaphore]()
        self._unproven_bytes = 0
        self._fewer = asyncio.Event()

    async def take(
        self, peer: str, group: Hashable | None, nbytes: int, within_s: float
    ) -> contextlib.ExitStack | None:
        """Wait for a slot for a payload of `nbytes` bytes; the caller closes the returned stack when the payload is
        there. None: no slot was free within `within_s` seconds. `group`: the peer's grant; None: the run is open."""
        held, needed = contextlib.ExitStack(), [self.free]
        if group is not None:
            needed = [self._share(("peer", peer), PER_PEER), self._share(("grant", group), PER_GRANT), self.free]
        taking = self._take(held, needed, nbytes if group is None else 0)
        try:
            if any(one.locked() for one in needed) or not self._fits(nbytes):
                await asyncio.wait_for(taking, within_s)
            else:
                await taking  # at once
        except asyncio.TimeoutError:
            held.close()
            return None
        except BaseException:
            held.close()
            raise
        return held

    async def _take(self, held: contextlib.ExitStack, needed: list[asyncio.Semaphore], unproven_bytes: int) -> None:
        for semaphore in needed:
            await semaphore.acquire()
            held.callback(semaphore.release)
        while not self._fits(unproven_bytes):
            self._fewer.clear()
            await self._fewer.wait()
        self._unproven_bytes += unproven_bytes
        held.callback(self._give_back, unproven_bytes)

    def _fits(self, unproven_bytes: int) -> bool:
        return not self._unproven_bytes or self._unproven_bytes + unproven_bytes <= UNPROVEN_BYTES_MAX

    def _give_back(self, unproven_bytes: int) -> None:
        self._unproven_bytes -= unproven_bytes
        self._fewer.set()

    def _share(self, of: Hashable, part: float) -> asyncio.Semaphore:
        return self._shares.setdefault(of, asyncio.Semaphore(max(1, int(part * self._count))))


@dataclass(slots=True)
class Budget:
    """What each asker may have of something: `at_once` at once, and `per_s` more each second, up to `at_once` again.
    One that isn't remembered has its full budget. `now`: the present time in seconds."""

    at_once: float
    per_s: float
    _left: dict[Hashable, tuple[float, float]] = field(default_factory=dict)  # by asker: how much was left, and when

    def left(self, asker: Hashable, now: float) -> float:
        """How much an asker may have now; it may have had more than its budget."""
        left, since = self._left.get(asker, (self.at_once, now))
        return min(left + max(now - since, 0.0) * self.per_s, self.at_once)

    def spend(self, asker: Hashable, cost: float, now: float) -> None:
        """Take `cost` from an asker's budget, even if it has less."""
        left = self.left(asker, now) - cost
        self._left.pop(asker, None)
        self._left[asker] = left, now
        if len(self._left) > ASKERS_MAX:
            del self._left[next(iter(self._left))]

    def takes(self, asker: Hashable, cost: float, now: float) -> bool:
        """Take `cost` from an asker's budget. If the budget is too low, take nothing, and return False."""
        allowed = self.left(asker, now) >= cost
        self.spend(asker, cost if allowed else 0.0, now)
        return allowed
