"""Sends messages to other peers: over a link to each for small messages, and over further streams for payloads.

Law: knows frames and pipes, not libp2p. The peer that opens a stream sends messages on it, and the answers come back on
the same stream. A link is opened on first use, and moves to another path when answers fail to come, but only once that
path is open: so a frozen or dead peer is not mistaken for a peer behind a broken path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from p2p_diloco.addresses import leads_over_a_relay
from p2p_diloco.net.direct import DIRECT, DirectChannel
from p2p_diloco.net.framing import Refused
from p2p_diloco.net.interface import Inbox, Limits, Refusal, Traffic, Unreachable, Written, check_outgoing, unnoticed
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.receiving import Receiver
from p2p_diloco.net.streams import Outgoing, Streams, Verdict, start

log = logging.getLogger(__name__)

DOUBT_PART = 0.4
"""The fraction of `read_timeout_s` after which another path is sought if no answer has come on a link."""
RELAYED = "relayed"
RELAYED_S = 60.0
"""Seconds after which a link through a relay looks for a direct path."""
STREAM_LIFE_S = 60.0
"""Seconds for which a stream over libp2p takes new payloads; then a new stream is opened. The new one may avoid a relay
that the old one needed, and no stream stays open for ever to a peer that vanished."""


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


class Exchange:
    """Sends this peer's messages, and has the receiver of other peers' messages and the state that all streams share.
    `dial` opens a stream to a peer, and returns it with the peer's multiaddr; it raises `Unreachable` if it can't.
    `direct` opens direct connections, which payloads use where possible; None: this peer makes none."""

    def __init__(self, inbox: Inbox, *, limits: Limits, traffic: Traffic, dial: Dial) -> None:
        self.direct: DirectChannel | None = None
        self.streams = Streams(inbox, limits, traffic)
        self.receiver = Receiver(self.streams)
        self.links = Links(self.streams, dial, self._path_broke)
        self._dial = dial
        self._over_libp2p = OnePerPeer(self._open)
        self._sending = asyncio.Semaphore(limits.streams_max)
        self._writing = WeakValueDictionary[str, asyncio.Lock]()

    async def send(self, peer: str, header: bytes, payload: memoryview | None, written: Written = unnoticed) -> None:
        check_outgoing(self.streams.limits, header, payload)
        if self.streams.closing:
            raise Unreachable("this peer is closing")
        if payload is None:
            verdict = await self.links.send(peer, header)
        else:
            verdict = await self._send_payload(peer, header, payload.cast("B"), written)
        if isinstance(verdict, Refused):
            raise Refusal(verdict.reason)

    async def close(self) -> None:
        """End every stream and direct connection. A `send` that still waits for an answer raises `Unreachable`."""
        self.streams.closing = True
        self.links.end()
        self._over_libp2p.end()
        await self.streams.close()
        if self.direct is not None:
            await self.direct.close()

    def _path_broke(self, peer: str) -> None:
        """End the streams on which payloads to a peer are written, because the direct path to it is broken. These
        payloads are sent again, through a relay."""
        if self.direct is not None:
            self.direct.broke(peer)
        self._over_libp2p.abort(peer)

    # -- payloads

    async def _send_payload(self, peer: str, header: bytes, payload: memoryview, written: Written) -> Verdict:
        """Send a payload over a direct connection if there is one, else over libp2p; returns the receiver's answer.

        Payloads on one stream are written one after the other: each arrives as early as possible, and the link carries
        the next one while the answer is on its way. Written in parallel, all would arrive as late as the last one. They
        begin in the order of the calls.

        If a direct connection breaks, the payload is sent once more over libp2p. A libp2p stream that carried payloads
        before may have broken unnoticed: then the payload is sent once more, on a new stream.
        """
        turns, once_more = self._writing.setdefault(peer, asyncio.Lock()), True
        while True:
            with contextlib.ExitStack() as turn:
                stream = await self._lent(peer, turns, turn, len(payload), written)
                direct, fresh = self.direct if stream.way == DIRECT else None, not stream.used
                await self._sending.acquire()
                turn.callback(self._sending.release)
                try:
                    verdict = await self._transfer(stream, header, payload, turn.close)
                except Unreachable as error:
                    if direct is not None:
                        direct.failed(peer, str(error))
                    raise
            if verdict is not None:
                if direct is not None:
                    direct.succeeded(peer)
                return verdict
            self.streams.lost(peer)
            if direct is not None:
                direct.failed(peer, "the direct connection broke")
            if self.streams.closing or (direct is None and (fresh or not once_more)):
                raise Unreachable(f"{peer}: the stream ended before the payload was accepted")
            once_more = direct is not None

    async def _lent(
        self, peer: str, turns: asyncio.Lock, turn: contextlib.ExitStack, payload_bytes: int, written: Written
    ) -> Outgoing:
        """The stream on which the next payload to a peer is written. Closing `turn` gives the stream back."""
        if (direct := self.direct) is not None:
            async with turns:
                connection = await direct.take(peer)
            if connection is not None:
                turn.callback(written)
                turn.callback(direct.give_back, peer, connection, payload_bytes)
                if direct.has_room(peer):
                    written()
                return connection
        while True:
            stream = await self._over_libp2p.to(peer)
            await turns.acquire()
            if stream.fit or not stream.used:  # a new stream that has ended fails the send
                turn.callback(turns.release)
                turn.callback(written)
                return stream
            turns.release()
            self._retire(peer, stream)

    async def _open(self, peer: str) -> Outgoing:
        """Open a stream over libp2p for payloads."""
        pipe, found_at = await self._dial(peer)
        stream = self.streams.outgoing(peer, pipe, way_of(found_at))
        asyncio.get_running_loop().call_later(STREAM_LIFE_S, self._retire, peer, stream)
        return stream

    def _retire(self, peer: str, stream: Outgoing) -> None:
        self._over_libp2p.drop(peer, stream)
        stream.retire()

    async def _transfer(
        self, stream: Outgoing, header: bytes, payload: memoryview, over: Callable[[], None]
    ) -> Verdict:
        """Send a payload by `Outgoing.send`, count its bytes and measure its rate; returns the receiver's answer.
        `over` is called when the next payload may be written."""
        peer, clock, traffic = stream.frames.peer, asyncio.get_running_loop().time, self.streams.traffic
        traffic.went(peer, stream.way)
        measured = traffic.bandwidth.up.begin(peer, clock(), len(payload))

        def ended(written: asyncio.Future[None]) -> None:
            if not written.cancelled() and written.exception() is None:  # a break is reported by reading the answer
                traffic.sent(peer, len(payload))
            over()

        def reached(count: int) -> None:
            measured.reached(count, clock())
            self.streams.inbox.moving(peer)

        try:
            return await stream.send(header, payload, limits=self.streams.limits, over=ended, reached=reached)
        finally:
            measured.end(clock())
