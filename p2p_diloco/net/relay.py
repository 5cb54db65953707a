"""The relay service that a bootstrap or a peer offers. It passes bytes on between two peers, and dials a peer back at
its request.

Law: a relay can't read the bytes that it passes on: the two peers encrypt them end to end (`paths`). It passes bytes
on only to peers that are connected to it or that it can dial, and not faster than its rate. It passes bytes on between
two members of the same private run, or between two peers of open runs.

    peer to relay      MESSAGE {"register"}       stays open; the relay answers MESSAGE, empty, to it and to each ping
                       MESSAGE {"open": peer}     MESSAGE, empty, and then the other peer's bytes; or REFUSED
                       MESSAGE {"check": [...]}   MESSAGE {"seen": address, "reached": {address: None or the reason}}
                       MESSAGE {"ping"}           MESSAGE, empty: the direct path works
    relay to the other peer                       MESSAGE {"from": peer}, and then the first peer's bytes

A member of a private run adds its chain to each request, as "member". The relay adds this chain to {"from": peer}. The
other peer answers with MESSAGE, its own chain (in an open run empty), which the relay checks and doesn't pass on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgpack

from p2p_diloco.net.certificates import Stranger
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.dial_back import PortBudget, dial_back
from p2p_diloco.net.framing import VERSION, FrameError, FrameStream, Message, Refused
from p2p_diloco.net.hello import PENDING_MAX, Pending, RunOf, any_run
from p2p_diloco.net.interface import PEERS_COUNTED_MAX, Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled
from p2p_diloco.net.streams import start, stop

log = logging.getLogger(__name__)

RELAY = f"/p2p-diloco/{VERSION}/relay"
"""The protocol that a relay serves."""
RELAYED = f"/p2p-diloco/{VERSION}/relayed"
"""The protocol by which a relay reaches the second peer."""
GONE = "this peer was connected to the relay until a moment ago, and isn't any more"
"""The reason with which a relay refuses a stream to a peer whose registration has just ended: it probably died."""

LINGER_S = 2.0
"""Seconds that a peer has to read a refusal before the relay closes the stream."""
REQUEST_S = 5.0
"""Deadline for a request."""
OPEN_S = 3.0
"""Deadline for reaching the second peer."""
GONE_S = 60.0
"""Seconds for which a relay remembers that a registered peer's connection has ended."""
IDLE_S = 600.0
"""Seconds after which a stream that passes on nothing ends."""
PING_S, PONG_S = 10.0, 10.0
"""Seconds between two pings of a registered peer, and the deadline for their answers."""
STREAMS_MAX, STREAMS_PER_PEER_MAX = 1024, 64
"""The most pairs of streams that a relay joins at a time, and the most of them that one peer has opened."""
CHECKS_MAX, CHECKS_WAITING_MAX = 4, 64
"""CHECKS_MAX: the most peers that are dialled back at a time. CHECKS_WAITING_MAX: the most peers that are being dialled
back or wait for that. A peer is dialled back for one request at a time."""
CHECK_S = 10.0
"""Deadline for dialling a peer back."""
CLOSE_S = 3.0
"""Seconds that closing a relay may take: a daemon that was started to dial a peer back has to end."""
BURST_S = 0.1
"""After a pause, as many bytes may pass at once as the rate allows in this many seconds."""

_FAILURES = (OSError, FrameError, PipeBroken, PipeStalled, Unreachable, asyncio.TimeoutError)


class Rate:
    """Limits the bytes that pass on all streams together to `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid_until = 0.0

    async def spend(self, count: int) -> None:
        """Wait until the limit lets `count` more bytes pass."""
        now = asyncio.get_running_loop().time()
        self._paid_until = max(self._paid_until, now - BURST_S) + count / self._bytes_per_s
        if self._paid_until > now:
            await asyncio.sleep(self._paid_until - now)


class Relay:
    """Serves one daemon's `RELAY` protocol until `close`. `mbit`: the most that it passes on, in Mbit/s; 0: it passes
    on nothing, and only dials back. `run_of`: returns the run of a peer that asks, or raises Stranger to refuse it."""

    def __init__(self, daemon: Daemon, mbit: float, run_of: RunOf = any_run) -> None:
        self._daemon, self._run_of = daemon, run_of
        self._rate = Rate(mbit * 125_000) if mbit else None
        self._registered: dict[str, Pipe] = {}
        self._run_at: dict[str, bytes | None] = {}  # the public run key that each registered peer has shown
        self._gone: dict[str, float] = {}
        self._joined: list[str] = []  # the peer that opened each pair of streams
        self._pending = Pending(PENDING_MAX)
        self._checks = asyncio.Semaphore(CHECKS_MAX)
        self._checked: set[str] = set()
        self._budget = PortBudget(asyncio.get_running_loop().time)
        self._tasks: set[asyncio.Task[None]] = set()
        self.traffic = Traffic()

    async def start(self) -> None:
        await self._daemon.serve_streams(RELAY, self.serve)

    async def serve(self, peer: str, pipe: Pipe, seen_at: str) -> None:
        """Read the request on a stream that a peer has opened, and answer it."""
        serving = start(self._serve(peer, pipe, seen_at), self._tasks)
        await asyncio.wait({serving})  # `close` cancels it without an error for the caller

    async def _serve(self, peer: str, pipe: Pipe, seen_at: str) -> None:
        frames = FrameStream(pipe, peer, Limits(), self.traffic)
        try:
            request = await self._request(frames)
            shown = request.get("member") if isinstance(request, dict) else None
            run = self._run_of(peer, shown if isinstance(shown, bytes) else None)
            match request:
                case {"register": _}:
                    await self._register(peer, run, frames)
                case {"open": str(other)}:
                    await self._open(peer, shown if run else None, other, frames)
                case {"ping": _}:
                    frames.write(Message(b""))
                case {"check": list(addresses)}:
                    await self._check(peer, seen_at, addresses, frames)
                case _:
                    raise Refusal("this is no request to a relay")
        except (Refusal, Stranger) as refusal:
            frames.write(Refused(str(refusal)))
            if isinstance(refusal, Stranger):  # few strangers may linger: the oldest one's stream is closed
                self._pending.add(peer, pipe)
            with contextlib.suppress(*_FAILURES):
                await frames.discard(None, LINGER_S)  # if unread bytes were left, the refusal could be lost on its way
        except _FAILURES as error:
            log.debug("a request of %s to this relay failed: %r", peer, error)
        finally:
            self._pending.remove(pipe)
            pipe.close()

    async def _request(self, frames: FrameStream) -> object:
        """The content of the first message; None if it can't be read."""
        self._pending.add(frames.peer, frames.pipe)
        try:
            frame = await frames.read(idle_s=REQUEST_S, frame_s=REQUEST_S)
        finally:
            self._pending.remove(frames.pipe)
        return unpacked(frame.header) if isinstance(frame, Message) else None

    def cut(self, peer: str) -> None:
        """End a peer's registration, because it is no longer a member."""
        if (registered := self._registered.get(peer)) is not None:
            registered.abort()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    # -- registered peers

    async def _register(self, peer: str, run: bytes | None, frames: FrameStream) -> None:
        """Keep the peer registered until its stream ends or its pings stop. A newer registration replaces this one."""
        if self._rate is None or (len(self._registered) >= PEERS_COUNTED_MAX and peer not in self._registered):
            raise Refusal("this peer is no relay" if self._rate is None else "this relay is full")
        if (older := self._registered.get(peer)) is not None:
            older.abort()
        self._registered[peer], self._run_at[peer] = frames.pipe, run
        self._gone.pop(peer, None)
        try:
            frame: object = Message(b"")
            while isinstance(frame, Message):
                frames.write(Message(b""))
                await frames.pipe.drain(PONG_S)  # the answers to a flood of pings must not pile up
                await asyncio.sleep(0)  # many pings may be waiting: let other tasks run between two of them
                frame = await frames.read(idle_s=PING_S + PONG_S, frame_s=REQUEST_S)
        finally:
            if self._registered.get(peer) is frames.pipe:
                del self._registered[peer], self._run_at[peer]
                self._remember_gone(peer)

    def _remember_gone(self, peer: str) -> None:
        now = asyncio.get_running_loop().time()
        self._gone = {other: when for other, when in self._gone.items() if now - when < GONE_S}
        if len(self._gone) < PEERS_COUNTED_MAX:
            self._gone[peer] = now

    # -- passing on

    async def _open(self, peer: str, hello: bytes | None, other: str, frames: FrameStream) -> None:
        """Open a stream to the other peer, and join it with this one. `hello`: the peer's certificate in a private
        run; the other peer must show one of the same run."""
        if self._rate is None:
            raise Refusal("this peer is no relay")
        if len(self._joined) >= STREAMS_MAX or self._joined.count(peer) >= STREAMS_PER_PEER_MAX:
            raise Refusal("this relay passes on too many streams already")
        self._joined.append(peer)
        try:
            try:
                there, _ = await self._daemon.open_stream(other, RELAYED, timeout_s=OPEN_S)
            except Unreachable as error:
                raise Refusal(self._why_not(other, error)) from None
            try:
                await self._introduce(peer, hello, FrameStream(there, other, Limits(), self.traffic))
                frames.write(Message(b""))
                await self._join(frames.pipe, there)
            finally:
                there.close()
        finally:
            self._joined.remove(peer)

    async def _introduce(self, peer: str, hello: bytes | None, there: FrameStream) -> None:
        """Tell the other peer which peer opens the stream.

        Raises:
            Stranger: the two are neither members of the same private run, nor both in open runs.
        """
        run = self._run_of(peer, hello)
        if self._run_at.get(there.peer, run) != run:
            raise Stranger
        there.write(Message(_packed({"from": peer} if hello is None else {"from": peer, "member": hello})))
        match await there.read(idle_s=OPEN_S, frame_s=OPEN_S):
            case Message(shown) if self._run_of(there.peer, shown or None) == run:
                return
        raise Stranger

    def _why_not(self, other: str, error: Unreachable) -> str:
        gone_for_s = asyncio.get_running_loop().time() - self._gone.get(other, float("-inf"))
        return GONE if gone_for_s < GONE_S else f"the relay can't reach it either: {error}"

    async def _join(self, one: Pipe, other: Pipe) -> None:
        """Pass bytes on in both directions until one of the streams ends."""
        directions = [asyncio.create_task(self._pass_on(a, b)) for a, b in ((one, other), (other, one))]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop(*directions)

    async def _pass_on(self, source: Pipe, target: Pipe) -> None:
        assert self._rate is not None
        while True:
            if not source.unread and not await source.more(IDLE_S):
                return
            data = bytes(source.unread)
            del source.unread[:]
            await self._rate.spend(len(data))
            target.write(data)
            await target.drain(IDLE_S)

    # -- dialling back

    async def _check(self, peer: str, seen_at: str, addresses: Sequence[object], frames: FrameStream) -> None:
        if peer in self._checked or len(self._checked) >= CHECKS_WAITING_MAX:
            raise Refusal("this peer dials too many others back already")
        self._checked.add(peer)
        try:
            async with self._checks:
                told = dial_back(peer, seen_at, [a for a in addresses if isinstance(a, str)], self._budget)
                reached = await asyncio.wait_for(told, CHECK_S)
        finally:
            self._checked.discard(peer)
        if reached is None:
            raise Refusal("too many ports of that address were dialled lately")
        frames.write(Message(_packed({"seen": seen_at, "reached": reached})))


def _packed(content: dict[str, Any]) -> bytes:
    return bytes(msgpack.packb(content))


def asking(content: dict[str, Any], certificate: bytes | None) -> Message:
    """A request to a relay. `certificate`: this peer's, if it is a member of a private run."""
    return Message(_packed(content if certificate is None else {**content, "member": certificate}))


def unpacked(header: bytes) -> object:
    """Decode a message between a peer and a relay; None if it can't be decoded."""
    try:
        return msgpack.unpackb(header)
    except (ValueError, msgpack.UnpackException):
        return None
