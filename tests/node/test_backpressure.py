"""Contributions wait for room, and for nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from p2p_diloco.node.backpressure import Backpressure
from tests.net.patience import plays

PATIENCE_S = 60.0


class Replica:
    """One that holds as much as the test says; above 2, only shard 0 is welcome."""

    def __init__(self) -> None:
        self.collected = 3

    def crowded(self, shard: int) -> bool:
        return self.collected > 2 and shard > 0


class Table:
    """A room, and the shards that were let in."""

    def __init__(self) -> None:
        self.replica, self.came, self.time = Replica(), list[int](), 100.0
        self.room = Backpressure(self.replica, PATIENCE_S)
        self.room.look()
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, *shards: int) -> list[int]:
        """Contributions arrive; returns those that were let in so far."""

        async def one(shard: int) -> None:
            await self.room.wait(shard)
            self.came.append(shard)

        self.tasks += [asyncio.create_task(one(shard)) for shard in shards]
        return await self.now()

    async def hold(self, collected: int) -> list[int]:
        """After an event the replica holds this many payloads; returns those let in so far."""
        self.replica.collected = collected
        self.room.look()
        return await self.now()

    async def wait(self, seconds: float) -> list[int]:
        """Time passes; returns the contributions let in so far."""
        self.time += seconds
        return await self.now()

    async def now(self) -> list[int]:
        for _ in range(10):
            await asyncio.sleep(0)
        return self.came


def at_table(test: Callable[[Table], Awaitable[None]]) -> None:
    async def life() -> None:
        loop, table = asyncio.get_running_loop(), Table()
        loop.time = lambda: table.time  # type: ignore[method-assign]  # turned by hand
        await test(table)
        for task in table.tasks:
            task.cancel()

    asyncio.run(life())


@plays(at_table)
async def test_a_contribution_with_room_does_not_wait(table: Table) -> None:
    """Nor does a contribution to the shard that makes room. Others wait until room is made, and keep waiting while more
    is held."""
    assert await table.come(1, 0, 2) == [0]
    assert await table.hold(4) == [0]
    assert await table.hold(3) == [0]
    assert await table.hold(2) == [0, 1, 2]
    assert await table.come(3) == [0, 1, 2, 3]


@plays(at_table)
async def test_patience_ends_for_all_until_there_is_room_again(table: Table) -> None:
    """One that waited long goes on, and so do those that came after it; once room was made, the next ones wait anew."""
    await table.come(1)
    await table.wait(0.9 * PATIENCE_S)
    assert await table.come(2) == []
    assert sorted(await table.wait(0.2 * PATIENCE_S)) == [1, 2]
    assert len(await table.come(3)) == 3
    await table.hold(5)
    assert len(await table.come(4)) == 4
    await table.hold(4)
    assert len(await table.come(5)) == 4


@plays(at_table)
async def test_patience_counts_from_when_room_was_made_last(table: Table) -> None:
    """While rounds end, contributions go on waiting for their turn; other events don't extend the wait."""
    await table.hold(100)
    await table.come(1)
    for held in range(99, 91, -1):
        await table.wait(0.9 * PATIENCE_S)
        assert await table.hold(held) == []
    await table.wait(0.9 * PATIENCE_S)
    assert await table.hold(92) == []
    assert await table.wait(0.2 * PATIENCE_S) == [1]
