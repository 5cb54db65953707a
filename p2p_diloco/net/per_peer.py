"""Keeps one object for each peer, such as its link or payload stream. An object is opened on first use.

Law: nothing here looks into the objects. Callers that ask while an object is being opened wait for it, and fail if
opening fails; the next call tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from p2p_diloco.net.interface import Unreachable

T = TypeVar("T")


class OnePerPeer(Generic[T]):
    """Keeps one object for each peer. `open` makes the object of a peer, or raises `Unreachable` if it can't."""

    def __init__(self, open: Callable[[str], Coroutine[object, object, T]]) -> None:
        self._open = open
        self._opened: dict[str, T] = {}
        self._opening: dict[str, asyncio.Task[T]] = {}
        self._ended = False

    async def to(self, peer: str) -> T:
        """Return the object of a peer; if there is none, open it first.

        Raises:
            Unreachable: the object can't be opened.
        """
        if peer in self._opened:
            return self._opened[peer]
        if self._ended:
            raise Unreachable("this peer is closing")
        opening = self._opening.get(peer)
        if opening is None:
            opening = self._opening[peer] = asyncio.create_task(self._open_to(peer))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # even if no caller waits
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise Unreachable("this peer is closing") from None
            raise

    async def _open_to(self, peer: str) -> T:
        try:
            one = self._opened[peer] = await self._open(peer)
            return one
        finally:
            del self._opening[peer]

    def peers(self) -> list[str]:
        return list(self._opened)

    def has(self, peer: str, one: T) -> bool:
        """Whether `one` is the object that is kept for `peer`."""
        return self._opened.get(peer) is one

    def replace(self, peer: str, one: T, other: T) -> bool:
        """Replace the peer's object `one` by `other`; returns False if `one` is no longer the peer's object."""
        if self.has(peer, one):
            self._opened[peer] = other
            return True
        return False

    def forget(self, peer: str, end: Callable[[T], None]) -> None:
        """Remove the peer's object, if there is one, and pass it to `end`, which ends it."""
        if (one := self._opened.pop(peer, None)) is not None:
            end(one)

    def drop(self, peer: str, one: T) -> None:
        """Remove the peer's object `one`, so that the next call of `to` opens another. Nothing is removed if the peer
        has another object already."""
        if self.has(peer, one):
            del self._opened[peer]

    def end(self) -> None:
        """Cancel all attempts to open an object that are under way, and start no new ones."""
        self._ended = True
        for opening in self._opening.values():
            opening.cancel()
