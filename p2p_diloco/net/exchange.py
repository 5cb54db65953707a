"""Sends messages to other peers: over a link to each for small messages, and over further streams for payloads.

Law: knows frames and pipes, not libp2p. The peer that opens a stream sends messages on it, and the answers come back on
the same stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from weakref import WeakValueDictionary

from p2p_diloco.net.direct import DIRECT, DirectChannel
from p2p_diloco.net.framing import Refused
from p2p_diloco.net.interface import Inbox, Limits, Refusal, Traffic, Unreachable, Written, check_outgoing, unnoticed
from p2p_diloco.net.links import Dial, Links, OnePerPeer, way_of
from p2p_diloco.net.outgoing import Outgoing, Verdict
from p2p_diloco.net.receiving import Receiver
from p2p_diloco.net.streams import Streams

STREAM_LIFE_S = 60.0
"""Seconds for which a stream over libp2p takes new payloads; then a new stream is opened. The new one may avoid a relay
that the old one needed, and no stream stays open for ever to a peer that vanished."""


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
