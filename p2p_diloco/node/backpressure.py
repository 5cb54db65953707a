"""Contributions that come while much is collected already wait for room.

Law: nothing is promised but patience: who has waited that long without any room being made goes on, and so do those
after it, until there is room again. So nobody waits for somebody who waits here, and a round's deadline finds all that
was there in time.

Whoever waits holds up what its sender would send next; what was received stays in memory. So of each peer there is
little more than one payload here, however much it has to send.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Collecting(Protocol):
    """What is asked of a replica."""

    @property
    def collected(self) -> int:
        """Payloads of others that wait in it."""

    def crowded(self, shard: int) -> bool:
        """Whether another contribution to this shard should rather wait."""


class Backpressure:
    """`look` is to be called after each event. `patience_s`: how long it is waited at most without room being made."""

    def __init__(self, replica: Collecting, patience_s: float) -> None:
        self._replica, self._patience_s = replica, patience_s
        self._collected = 0
        self._made = asyncio.Event()
        self._in_vain = False  # somebody has waited so long, and no room was made since

    async def wait(self, shard: int) -> None:
        """Return once a contribution to this shard should be taken."""
        while not self._in_vain and self._replica.crowded(shard):
            try:
                await asyncio.wait_for(self._made.wait(), self._patience_s)
            except asyncio.TimeoutError:
                self._in_vain = True
                self._wake()

    def look(self) -> None:
        """An event is over: room may have been made."""
        before, self._collected = self._collected, self._replica.collected
        if self._collected < before:
            self._in_vain = False
            self._wake()

    def _wake(self) -> None:
        self._made.set()
        self._made = asyncio.Event()  # those that go on waiting wait for the next time
