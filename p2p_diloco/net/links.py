"""The links that carry small messages, one to each peer. A link is opened on first use, and moves to another path when
answers fail to come.

Law: knows streams and paths, not libp2p. A link moves only once the other path is open, so that a frozen or dead peer
is not mistaken for a peer behind a broken path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Protocol

from p2p_diloco.addresses import leads_over_a_relay
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.outgoing import Outgoing, Verdict
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.streams import Streams, start


class OnePerPeer:
    """Keeps one stream to each peer. `open` opens a stream to a peer, or raises `Unreachable` if it can't."""

    def __init__(self, open: Callable[[str], Coroutine[object, object, Outgoing]]) -> None:
        self._open = open
        self._opened: dict[str, Outgoing] = {}
        self._opening: dict[str, asyncio.Task[Outgoing]] = {}
        self._ended = False

    async def to(self, peer: str) -> Outgoing:
        """Return the stream to a peer; if there is none, open it first.

        Raises:
            Unreachable: the stream can't be opened.
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

    async def _open_to(self, peer: str) -> Outgoing:
        try:
            one = self._opened[peer] = await self._open(peer)
            return one
        finally:
            del self._opening[peer]

    def peers(self) -> list[str]:
        return list(self._opened)

    def has(self, peer: str, one: Outgoing) -> bool:
        """Whether `one` is the stream that is kept to `peer`."""
        return self._opened.get(peer) is one

    def replace(self, peer: str, one: Outgoing, other: Outgoing) -> bool:
        """Replace the peer's stream `one` by `other`; returns False if `one` is no longer the peer's stream."""
        if self.has(peer, one):
            self._opened[peer] = other
            return True
        return False

    def drop(self, peer: str, one: Outgoing) -> None:
        """Stop keeping the stream `one`, so that the next call of `to` opens another. Nothing happens if the peer has
        another stream already."""
        if self.has(peer, one):
            del self._opened[peer]

    def abort(self, peer: str) -> None:
        """End the stream to a peer, if there is one."""
        if (one := self._opened.pop(peer, None)) is not None:
            one.frames.pipe.abort()

    def end(self) -> None:
        """Cancel all attempts to open a stream that are under way, and start no new ones."""
        self._ended = True
        for opening in self._opening.values():
            opening.cancel()


log = logging.getLogger(__name__)

DOUBT_PART = 0.4
"""The fraction of `read_timeout_s` after which another path is sought if no answer has come on a link."""
RELAYED = "relayed"
RELAYED_S = 60.0
"""Seconds after which a link through a relay looks for a direct path."""


def way_of(found_at: str) -> str:
    """The path of a stream over libp2p to a peer that was found at this multiaddr."""
    return RELAYED if leads_over_a_relay(found_at) else "libp2p"


class Dial(Protocol):
    """A function that opens a stream to a peer; it returns the stream, and the multiaddr at which the peer was found.
    With `around` it uses only relays, because the direct path may be broken. It raises Unreachable if it can't open a
    stream."""

    async def __call__(self, peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        """Open a stream to `peer`."""
        ...


class Links:
    """Sends small messages over one link to each peer. When a peer's direct path is broken, and its link has moved to a
    relay, `moved` is called with the peer."""

    def __init__(self, streams: Streams, dial: Dial, moved: Callable[[str], None]) -> None:
        self._streams, self._dial, self._moved = streams, dial, moved
        self._links = OnePerPeer(self._open)
        self._moving = set[str]()

    def peers(self) -> list[str]:
        return self._links.peers()

    async def send(self, peer: str, header: bytes) -> Verdict:
        """Send a message without a payload; returns the receiver's answer. Raises Unreachable if none comes."""
        link, loop = await self._links.to(peer), asyncio.get_running_loop()
        doubt_s = DOUBT_PART * self._streams.limits.read_timeout_s
        doubting = loop.call_later(doubt_s, self._doubt, peer, link, loop.time())
        try:
            if (verdict := await link.send(header, None, limits=self._streams.limits)) is None:
                raise Unreachable(f"{peer}: {link.frames.pipe.ended or 'the link was closed'}")
            return verdict
        except Unreachable:
            self._links.drop(peer, link)  # at once: a caller that tries again must not get the dead link
            raise
        finally:
            doubting.cancel()

    def end(self) -> None:
        self._links.end()

    async def _open(self, peer: str, around: bool = False) -> Outgoing:
        pipe, found_at = await self._dial(peer, around=around)
        link = self._streams.outgoing(peer, pipe, way_of(found_at), partial(self._ended, peer))
        self._look_for_a_direct_path(peer, link)
        return link

    def _ended(self, peer: str, link: Outgoing) -> None:
        self._links.drop(peer, link)
        self._streams.lost(peer)

    # -- another path

    def _doubt(self, peer: str, link: Outgoing, since: float) -> None:
        """Look for a path through relays if no answer has come on the link since the time `since`, when a message was
        sent."""
        if link.heard_at < since:
            self._move(peer, link, True)

    def _move(self, peer: str, link: Outgoing, around: bool) -> None:
        if self._links.has(peer, link) and peer not in self._moving and not self._streams.closing:
            self._moving.add(peer)
            start(self._open_another(peer, link, around), self._streams.tasks)

    async def _open_another(self, peer: str, link: Outgoing, around: bool) -> None:
        """Open a second link to a peer over another path, and replace `link` by it. Keep `link` instead if an answer
        came on it meanwhile, or if the second link should be direct but goes through a relay too."""
        began = asyncio.get_running_loop().time()
        try:
            other = await self._open(peer, around)
        except Unreachable:
            self._look_for_a_direct_path(peer, link)
            return
        finally:
            self._moving.discard(peer)
        better = link.heard_at < began if around else other.way != RELAYED
        if not better or not self._links.replace(peer, link, other):
            other.fail("it isn't needed")
            self._look_for_a_direct_path(peer, link)
            return
        link.fail("another path is used")
        if around:
            log.info("the direct path to %s is broken: messages and payloads to it go through a relay", peer)
            self._moved(peer)

    def _look_for_a_direct_path(self, peer: str, link: Outgoing) -> None:
        """If this link goes through a relay, plan an attempt to move it to a direct path in `RELAYED_S` seconds."""
        if link.way == RELAYED:
            asyncio.get_running_loop().call_later(RELAYED_S, self._move, peer, link, False)
