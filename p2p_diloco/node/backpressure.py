"""Backpressure: a contribution waits while the replica already holds many payloads.

Law: a wait is bounded. If the number of held payloads doesn't fall for `patience_s`, this contribution and all later
ones are taken without a wait, until the number falls. So two peers never wait for each other for ever, and at a round's
deadline every contribution that came in time has been taken.

A waiting contribution delays the next message of its sender. So little more than one payload of each peer waits here at
a time.
"""

from __future__ import annotations

import asyncio

from p2p_diloco.core.replica import Replica
from p2p_diloco.net.attempts import within


class Backpressure:
    """Makes contributions wait while the replica holds too many payloads. Call `look` after each event. If the number
    of held payloads doesn't fall for `patience_s`, contributions wait no longer."""

    def __init__(self, replica: Replica, patience_s: float) -> None:
        self._replica, self._patience_s = replica, patience_s
        self._collected = 0
        self._made = asyncio.Event()
        self._in_vain = False  # a wait took `patience_s`, and the number has not fallen since

    async def wait(self, shard: int) -> None:
        """Wait until the replica may take a contribution to this shard."""
        while not self._in_vain and self._replica.crowded(shard):
            try:
                await within(self._patience_s, self._made.wait())
            except asyncio.TimeoutError:
                self._in_vain = True
                self._wake()

    def look(self) -> None:
        """Wake the waiting contributions if the replica holds fewer payloads than at the last call."""
        before, self._collected = self._collected, self._replica.collected
        if self._collected < before:
            self._in_vain = False
            self._wake()

    def _wake(self) -> None:
        self._made.set()
        self._made = asyncio.Event()  # the event that the remaining contributions wait for
