"""A contribution waits while the replica has collected many payloads already.

Law: a wait is bounded. If no room is made for so long, this contribution is taken, and so are all that follow, until
room is made again. So two peers never wait for each other, and a round's deadline finds every contribution that came in
time.

A waiting contribution delays the next message of its sender. So little more than one payload of each peer waits here,
however many it has to send.
"""

from __future__ import annotations

import asyncio

from p2p_diloco.core.replica import Replica


class Backpressure:
    """Call `look` after each event. `patience_s`: the longest wait during which no room is made."""

    def __init__(self, replica: Replica, patience_s: float) -> None:
        self._replica, self._patience_s = replica, patience_s
        self._collected = 0
        self._made = asyncio.Event()
        self._in_vain = False  # a wait took `patience_s`, and no room was made since

    async def wait(self, shard: int) -> None:
        """Return once a contribution to this shard should be taken."""
        while not self._in_vain and self._replica.crowded(shard):
            try:
                await asyncio.wait_for(self._made.wait(), self._patience_s)
            except asyncio.TimeoutError:
                self._in_vain = True
                self._wake()

    def look(self) -> None:
        """An event is over, and may have made room."""
        before, self._collected = self._collected, self._replica.collected
        if self._collected < before:
            self._in_vain = False
            self._wake()

    def _wake(self) -> None:
        self._made.set()
        self._made = asyncio.Event()  # contributions that go on waiting wait for this one
