"""Sends messages to other peers: over a link to each for small messages, and over further streams for payloads. An
exchange is the sender together with the receiver.

Law: knows frames and pipes, not libp2p. The peer that opens a stream sends messages on it, and the answers come back on
the same stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from weakref import WeakValueDictionary

from p2p_diloco.addresses import leads_over_a_relay
from p2p_diloco.net.direct import DirectChannel
from p2p_diloco.net.framing import FrameStream, Refused
from p2p_diloco.net.interface import Inbox, Limits, Refusal, Traffic, Unreachable, Written, check_outgoing, unnoticed
from p2p_diloco.net.links import Dial, Links, OnePerPeer
from p2p_diloco.net.payload_stream import PayloadStream, Verdict
from p2p_diloco.net.receiving import Receiver
from p2p_diloco.net.streams import Streams

STREAM_LIFE_S = 60.0
"""Seconds for which a stream over libp2p takes new payloads; then a new stream is opened. The new one may avoid a relay
that the old one needed, and no stream stays open for ever to a peer that vanished."""


class Sender:
    """Sends messages to other peers. `dial` opens a stream to a peer, and returns it with the peer's multiaddr; it
    raises `Unreachable` if it can't. `direct` opens direct connections, which payloads use where possible; None: this
    peer makes none."""

    def __init__(self, streams: Streams, dial: Dial) -> None:
        self.direct: DirectChannel | None = None
        self._streams = streams
        self._dial = dial
        self.links = Links(streams, dial, self._path_broke)
        self._payload_streams = OnePerPeer(self._open_payload_stream)
        self._sending = asyncio.Semaphore(streams.limits.streams_max)
        self._writing = WeakValueDictionary[str, asyncio.Lock]()

    async def send(self, peer: str, header: bytes, payload: memoryview | None, written: Written = unnoticed) -> None:
        check_outgoing(self._streams.limits, header, payload)
        if self._streams.closing:
            raise Unreachable("this peer is closing")
        if payload is None:
            await self.links.send(peer, header)
        else:
            await self._send_payload(peer, header, payload.cast("B"), written)

    def end(self) -> None:
        self.links.end()
        self._payload_streams.end()

    # -- opening

    async def _open(self, peer: str) -> tuple[FrameStream, str]:
        pipe, found_at = await self._dial(peer)
        if self._streams.closing:
            pipe.abort()
            raise Unreachable("this peer is closing")
        return self._streams.frames(peer, pipe), found_at

    async def _open_payload_stream(self, peer: str) -> PayloadStream:
        frames, found_at = await self._open(peer)
        stream = PayloadStream(frames, "relayed" if leads_over_a_relay(found_at) else "libp2p")
        asyncio.get_running_loop().call_later(STREAM_LIFE_S, self._retire, peer, stream)
        return stream

    def _path_broke(self, peer: str) -> None:
        """End the streams on which payloads to a peer are written, because the direct path to it is broken. These
        payloads are sent again, through a relay."""
        if self.direct is not None:
            self.direct.broke(peer)
        self._payload_streams.forget(peer, lambda stream: stream.frames.pipe.abort())

    def _retire(self, peer: str, stream: PayloadStream) -> None:
        self._payload_streams.drop(peer, stream)
        stream.retire()

    # -- payloads

    async def _send_payload(self, peer: str, header: bytes, payload: memoryview, written: Written) -> None:
        """Send a payload over a direct connection if there is one. Without one, or if the connection breaks, send the
        payload over libp2p.

        Payloads on one connection are written one after the other: each arrives as early as possible, and the link
        carries the next one while the answer is on its way. Written in parallel, all would arrive as late as the last
        one. They begin in the order of the calls.
        """
        turns = self._writing.setdefault(peer, asyncio.Lock())
        verdict = await self._over_direct(turns, peer, header, payload, written)
        if verdict is None:
            verdict = await self._over_libp2p(turns, peer, header, payload, written)
        if isinstance(verdict, Refused):
            raise Refusal(verdict.reason)

    async def _over_direct(
        self, turns: asyncio.Lock, peer: str, header: bytes, payload: memoryview, written: Written
    ) -> Verdict:
        """Send a payload over a direct connection; returns the receiver's answer, or None if there is no connection or
        the connection broke."""
        if (direct := self.direct) is None:
            return None
        await self._sending.acquire()
        with contextlib.ExitStack() as turn:
            turn.callback(self._sending.release)
            async with turns:
                connection = await direct.take(peer)
            if connection is None:
                return None
            if direct.has_room(peer):
                written()
            turn.callback(written)
            turn.callback(direct.give_back, peer, connection, len(payload))
            try:
                verdict = await self._transfer(connection, header, payload, turn.close)
            except Unreachable as error:
                direct.failed(peer, str(error))
                raise
        if verdict is not None:
            direct.succeeded(peer)
            return verdict
        self._streams.lost(peer)
        direct.failed(peer, "the direct connection broke")
        if self._streams.closing:
            raise Unreachable("this peer is closing")
        return None

    async def _over_libp2p(
        self, turns: asyncio.Lock, peer: str, header: bytes, payload: memoryview, written: Written
    ) -> Verdict:
        """Send a payload over the libp2p stream to a peer; returns the receiver's answer. A stream that carried
        payloads before may have broken unnoticed: if this send fails on it, the payload is sent once more, on a new
        stream."""
        once_more = True
        while True:
            stream = await self._payload_streams.to(peer)  # opened before the payload's deadlines begin
            await self._sending.acquire()
            with contextlib.ExitStack() as turn:
                turn.callback(self._sending.release)
                await turns.acquire()
                turn.callback(turns.release)
                turn.callback(written)
                fresh = stream.fresh
                if not fresh and not stream.fit:
                    self._retire(peer, stream)
                    continue
                verdict = await self._transfer(stream, header, payload, turn.close)
            if verdict is not None:
                return verdict
            self._streams.lost(peer)
            if fresh or self._streams.closing or not once_more:
                raise Unreachable(f"{peer}: the stream ended before the payload was accepted")
            once_more = False

    async def _transfer(
        self, stream: PayloadStream, header: bytes, payload: memoryview, over: Callable[[], None]
    ) -> Verdict:
        """Send a payload by `PayloadStream.send`, count its bytes and measure its rate; returns the receiver's answer.
        `over` is called when the next payload may be written."""
        peer, clock, traffic = stream.frames.peer, asyncio.get_running_loop().time, self._streams.traffic
        traffic.went(peer, stream.way)
        measured = traffic.bandwidth.up.begin(peer, clock(), len(payload))

        def ended(written: asyncio.Future[None]) -> None:
            if not written.cancelled() and written.exception() is None:  # a break is reported by reading the answer
                traffic.sent(peer, len(payload))
            over()

        def reached(count: int) -> None:
            measured.reached(count, clock())
            self._streams.inbox.moving(peer)

        try:
            return await stream.send(header, payload, limits=self._streams.limits, over=ended, reached=reached)
        finally:
            measured.end(clock())


class Exchange:
    """This peer's sender and receiver, and the state that their streams share. `dial` opens a stream to a peer, as
    described in `Sender`."""

    def __init__(self, inbox: Inbox, *, limits: Limits, traffic: Traffic, dial: Dial) -> None:
        self.streams = Streams(inbox, limits, traffic)
        self.sender = Sender(self.streams, dial)
        self.receiver = Receiver(self.streams)

    async def send(self, peer: str, header: bytes, payload: memoryview | None, written: Written = unnoticed) -> None:
        await self.sender.send(peer, header, payload, written)

    async def close(self) -> None:
        """End every stream and direct connection. A `send` that still waits for an answer raises `Unreachable`."""
        self.streams.closing = True
        self.sender.end()
        await self.streams.close()
        if self.sender.direct is not None:
            await self.sender.direct.close()
