"""No member of a private run takes all the room that another one needs; strangers' payloads take bounded memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack

import pytest

from p2p_diloco.net import shares as module
from p2p_diloco.net.shares import Slots, has_room, no_groups
from tests.net.patience import awaited

WITHIN_S = 30.0
AT_ONCE_S = 0.01


async def taken(slots: Slots, peer: str, grant: str | None, count: int, nbytes: int = 1) -> list[ExitStack]:
    """As many of these slots as are given at once."""
    stacks = [await slots.take(peer, grant, nbytes, AT_ONCE_S) for _ in range(count)]
    return [stack for stack in stacks if stack is not None]


@awaited
async def test_slots_are_shared_by_members_and_grants() -> None:
    # A member takes a quarter of the slots and a grant three quarters. However many peers use the grant. Another
    # grant's member still finds slots.
    slots = Slots(16)
    theirs = [await taken(slots, peer, "g", 6) for peer in "abcd"]
    assert [len(stacks) for stacks in theirs] == [4, 4, 4, 0]
    held = await taken(slots, "e", "h", 6)
    assert len(held) == 4
    assert len(await taken(slots, "f", "i", 1)) == 0  # all are taken
    held[0].close()
    assert len(await taken(slots, "f", "i", 2)) == 1

    # A slot that is given back goes to the next. A peer at its share waits for its own, and others pass it by;
    # nothing is lost if it gives up.
    slots = Slots(8)
    first, *_ = await taken(slots, "a", "g", 2)
    waiting = asyncio.create_task(slots.take("a", "g", 1, WITHIN_S))
    given_up = asyncio.create_task(slots.take("a", "g", 1, WITHIN_S))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    given_up.cancel()
    assert len(await taken(slots, "b", "g", 2)) == 2
    first.close()
    stack = await waiting
    assert stack is not None
    assert slots.free._value == 4


@awaited
async def test_payloads_of_an_open_run_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share all slots as they come, one peer may have all; but what is beyond the limit waits until earlier ones
    are there, and one that is longer than the limit is taken alone."""
    assert len(await taken(Slots(8), "a", None, 10)) == 8
    monkeypatch.setattr(module, "UNPROVEN_BYTES_MAX", 100)
    slots = Slots(64)
    first, second = await taken(slots, "a", None, 3, nbytes=50)
    waiting = asyncio.create_task(slots.take("b", None, 1000, WITHIN_S))
    await asyncio.sleep(0.01)
    first.close()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    second.close()
    alone = await waiting
    assert alone is not None
    assert await taken(slots, "c", None, 1) == []
    alone.close()
    assert len(await taken(slots, "c", None, 1)) == 1
    assert slots.free._value == 63


def test_connections_have_shares_too() -> None:
    """By peer and by grant; in an open run only all together are limited."""
    grant = {"a": "g", "b": "g", "c": "g", "d": "h"}.get
    assert has_room("a", Counter(a=1), 8, grant)
    assert not has_room("a", Counter(a=2), 8, grant)
    assert not has_room("c", Counter(a=2, b=2, d=2, c=2), 8, grant)
    assert not has_room("c", Counter(a=3, b=3), 8, grant)
    assert has_room("d", Counter(a=3, b=3), 8, grant)
    assert has_room("a", Counter(a=7), 8, no_groups)
    assert not has_room("b", Counter(a=8), 8, no_groups)
