"""One of a kind for each peer, opened when it is needed first, and kept: its link, its stream for payloads.

Law: knows nothing of what it keeps. Those that ask while one is being opened wait for the same one, and hear together
that it can't be had; whoever asks next has it tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from p2p_diloco.net.interface import Unreachable

T = TypeVar("T")


class OnePerPeer(Generic[T]):
    """What `open` opens to a peer, or raises `Unreachable` for."""

    def __init__(self, open: Callable[[str], Coroutine[object, object, T]]) -> None:
        self._open = open
        self._kept: dict[str, T] = {}
        self._opening: dict[str, asyncio.Task[T]] = {}
        self._ended = False

    async def to(self, peer: str) -> T:
        """The one to this peer.

        Raises:
            Unreachable: it can't be opened.
        """
        if peer in self._kept:
            return self._kept[peer]
        if self._ended:
            raise Unreachable("this peer is closing")
        opening = self._opening.get(peer)
        if opening is None:
            opening = self._opening[peer] = asyncio.create_task(self._opened(peer))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody else looks
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise Unreachable("this peer is closing") from None
            raise

    async def _opened(self, peer: str) -> T:
        try:
            one = self._kept[peer] = await self._open(peer)
            return one
        finally:
            del self._opening[peer]

    def drop(self, peer: str, one: T) -> None:
        """Keep it no longer."""
        if self._kept.get(peer) is one:
            del self._kept[peer]

    def end(self) -> None:
        """Open no more, nor what is being opened."""
        self._ended = True
        for opening in self._opening.values():
            opening.cancel()
