"""The path of a stream to a peer: the direct path, or one through a relay if the direct dial fails or takes long.

Law: a direct path is tried first, unless it is known to be broken. A peer that announces no relay and refuses every
dial is not sought through relays: its machine answers, and no process listens there. A relay is not trusted. Both ends
of the TLS connection inside the relayed stream must prove who they are; so the relay can only break the stream.

    through the relay    A: the request to open     B: its answer to the relay; then TLS, in which B is the server
    inside TLS           A: MESSAGE, the protocol; from now on as on any stream
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from p2p_diloco.addresses import leads_over_a_relay, peer_of
from p2p_diloco.net.attempts import first, within
from p2p_diloco.net.certificates import Stranger
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.framing import FrameError, FrameStream, Message, Refused
from p2p_diloco.net.hello import Hellos, Pending, Serve
from p2p_diloco.net.interface import PEERS_COUNTED_MAX, Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled
from p2p_diloco.net.reach import answers
from p2p_diloco.net.relay import GONE, PING_S, PONG_S, RELAY, RELAYED, asking, unpacked
from p2p_diloco.net.streams import stop
from p2p_diloco.net.tls import Tls

log = logging.getLogger(__name__)

OPEN_S = 5.0
"""Deadline for opening a stream through a relay, the handshake included."""
STAGGER_S = 0.3
"""Seconds after which the next relay is asked as well, while the present one has not answered."""
RELAYS_MAX = 3
"""The most relays that this peer is registered at, and the most that are asked for one stream."""
REGISTER_AGAIN_S = 1.0
"""Seconds from the end of a registration to the next attempt; they double with each failure, up to `PING_S`."""
ANSWERED_MAX = 64
"""The most handshakes at a time with peers that open a stream to this peer."""

Opened = tuple[Pipe, str]

_FAILURES = (OSError, asyncio.TimeoutError, FrameError, PipeBroken, PipeStalled, Refusal, Stranger, Unreachable)


class Circuits:
    """Opens streams to other peers through relays, and serves streams that come through relays.

    Args:
        daemon: opens the streams to relays.
        tls: encrypts the streams, and makes sure who is at the other end.
        hellos: checks whether a peer that opens a stream is a member of this peer's private run; if it isn't, the
            stream is refused before the TLS handshake. None: the run is open.
    """

    def __init__(self, daemon: Daemon, tls: Tls, hellos: Hellos | None = None) -> None:
        self._daemon, self._tls, self._hellos = daemon, tls, hellos
        self._protocols: dict[str, Serve] = {}
        self._relays: dict[str, asyncio.Task[None]] = {}
        self._registering = asyncio.Semaphore(RELAYS_MAX)
        self.registered: dict[str, str] = {}
        """The relays that keep a connection to this peer, with their multiaddrs."""
        self._relays_of: dict[str, tuple[str, ...]] = {}
        self._answering = 0
        self._pending = Pending(ANSWERED_MAX)  # in a private run: streams whose certificate has not come
        self.traffic = Traffic()

    async def serve(self, protocol: str, serve: Serve) -> None:
        """Serve a protocol: call `serve(peer id, pipe, address)` for every stream that another peer opens for the
        protocol through a relay."""
        if not self._protocols:
            await self._daemon.serve_streams(RELAYED, self._answer)
        self._protocols[protocol] = serve

    async def close(self) -> None:
        tasks = list(self._relays.values())
        self.register(())
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- relays of this peer and of others

    def register(self, relays: Iterable[str]) -> None:
        """Keep this peer registered at the relays with these full multiaddrs, so that other peers can reach it through
        them. End the registrations at all other relays."""
        wanted: dict[str, list[str]] = {}
        for address in relays:
            wanted.setdefault(peer_of(address), []).append(address)
        wanted.pop(self._daemon.peer_id, None)
        for relay in self._relays.keys() - wanted.keys():
            self._relays.pop(relay).cancel()
        for relay, addresses in wanted.items():
            if relay not in self._relays:
                self._daemon.introduce(relay, addresses)
                self._relays[relay] = asyncio.create_task(self._stay_registered(relay))

    @property
    def addresses(self) -> list[str]:
        """The multiaddrs at which other peers can reach this peer through its relays."""
        me = self._daemon.peer_id
        return [f"{address}/p2p/{relay}/p2p-circuit/p2p/{me}" for relay, address in self.registered.items()]

    def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        """Remember the relays that are named in a peer's addresses."""
        relays: dict[str, list[str]] = {}
        for address in addresses:
            way, circuit, named = address.partition("/p2p-circuit")
            host, _, relay = way.rpartition("/p2p/")
            if circuit and named == f"/p2p/{peer}" and relay and relay != self._daemon.peer_id:
                relays.setdefault(relay, []).append(f"{host}/p2p/{relay}")
        self._relays_of.pop(peer, None)
        if not relays:
            return
        if len(self._relays_of) >= PEERS_COUNTED_MAX:
            del self._relays_of[next(iter(self._relays_of))]
        self._relays_of[peer] = tuple(relays)[:RELAYS_MAX]
        for relay in self._relays_of[peer]:
            if not self._daemon.known_at(relay):
                self._daemon.introduce(relay, relays[relay])

    def relays_of(self, peer: str) -> tuple[str, ...]:
        """The relays through which a peer can be reached, according to its own addresses; empty for a peer that can be
        dialled directly."""
        return self._relays_of.get(peer, ())

    async def _stay_registered(self, relay: str) -> None:
        """Keep this peer registered at a relay until cancelled: when the registration fails or ends, register again.
        Wait while this peer is registered at `RELAYS_MAX` other relays."""
        again_s = REGISTER_AGAIN_S
        while True:
            try:
                async with self._registering:
                    await self._registration(relay)
                again_s = REGISTER_AGAIN_S
            except _FAILURES as error:
                again_s = min(2 * again_s, PING_S)
                log.debug("the registration at the relay %s failed: %s", relay, error)
            finally:
                self.registered.pop(relay, None)
            await asyncio.sleep(again_s)

    async def _registration(self, relay: str) -> None:
        """Register at a relay, and ping it to stay registered; returns when the relay ends the registration."""
        pipe, found_at = await self._daemon.open_stream(relay, RELAY, timeout_s=OPEN_S)
        frames = FrameStream(pipe, relay, Limits(), self.traffic)
        try:
            frames.write(asking({"register": True}, self._daemon.chain))
            while isinstance(frame := await frames.read(idle_s=PONG_S, frame_s=PONG_S), Message):
                self.registered[relay] = found_at
                with contextlib.suppress(PipeStalled):  # nothing comes unless the relay ends the stream
                    if not await pipe.more(PING_S):
                        return
                frames.write(Message(b""))
            if isinstance(frame, Refused):
                raise Unreachable(frame.reason)
        finally:
            pipe.abort()

    # -- opening

    def relays_to(self, peer: str, linked: Iterable[str]) -> list[str]:
        """Choose at most `RELAYS_MAX` relays to ask for a stream to `peer`: first the relays of `peer`, then those of
        this peer, then the peers in `linked`."""
        relays = dict.fromkeys((*self.relays_of(peer), *self.registered, *self._relays, *linked))
        return [relay for relay in relays if relay not in (peer, self._daemon.peer_id)][:RELAYS_MAX]

    async def open(self, peer: str, protocol: str, relays: Sequence[str]) -> Opened:
        """Open a stream to a peer through the first of these relays that reaches it.

        Raises:
            Unreachable: no relay reaches the peer. `refused`: a relay has just lost its connection to the peer.
        """
        if not relays:
            raise Unreachable("no relay is known")
        reasons: list[BaseException] = []
        attempts = [partial(self._open_through, relay, peer, protocol) for relay in relays]
        try:
            return await first(attempts, stagger_s=STAGGER_S, discard=abort_stream, failed=reasons.append)
        except Unreachable:
            refused = any(isinstance(reason, Unreachable) and reason.refused for reason in reasons)
            raise Unreachable("; ".join(map(str, reasons)), refused=refused) from None

    async def _open_through(self, relay: str, peer: str, protocol: str) -> Opened:
        try:
            return await within(OPEN_S, self._dialled(relay, peer, protocol), discard=abort_stream)
        except asyncio.TimeoutError:
            raise Unreachable(f"the relay {relay} took too long") from None
        except Unreachable:
            raise
        except Refusal as refusal:
            raise Unreachable(refusal.reason, refused=refusal.reason == GONE) from None
        except _FAILURES as error:
            raise Unreachable(f"through the relay {relay}: {error}") from None

    async def _dialled(self, relay: str, peer: str, protocol: str) -> Opened:
        try:
            pipe, found_at = await self._daemon.open_stream(relay, RELAY, timeout_s=OPEN_S)
        except Unreachable as error:  # `refused` would mean that the relay has ended, not the peer
            raise Unreachable(f"the relay {error}") from None
        try:
            frames = FrameStream(pipe, relay, Limits(), self.traffic)
            frames.write(asking({"open": peer}, self._daemon.chain))
            await frames.answer(OPEN_S)  # the relay has reached the peer, which waits for the handshake
            inside = await self._tls.secured(pipe, peer, server=False)
        except BaseException:
            pipe.abort()
            raise
        FrameStream(inside, peer, Limits(), self.traffic).write(Message(protocol.encode()))
        return inside, f"{found_at}/p2p/{relay}/p2p-circuit"

    # -- answering

    async def _answer(self, relay: str, pipe: Pipe, seen_at: str) -> None:
        """Serve a stream that a peer opens to this one through a relay."""
        if self._hellos is not None:
            self._pending.add(relay, pipe)
        if self._answering - len(self._pending) >= ANSWERED_MAX:
            pipe.abort()
            self._pending.remove(pipe)
            return
        self._answering += 1
        try:
            accepting = self._accepted(relay, pipe)
            peer, protocol, inside = await within(OPEN_S, accepting, discard=lambda opened: opened[2].abort())
        except _FAILURES as error:
            log.debug("a stream through the relay %s failed: %r", relay, error)
            pipe.abort()
            return
        finally:
            self._answering -= 1
            self._pending.remove(pipe)
        await self._protocols[protocol](peer, inside, f"{seen_at}/p2p/{relay}/p2p-circuit")

    async def _accepted(self, relay: str, pipe: Pipe) -> tuple[str, str, Pipe]:
        """Do the answering end's part of the handshake; returns the other peer's id, the protocol that it asks for, and
        the encrypted pipe."""
        frames = FrameStream(pipe, relay, Limits(), self.traffic)
        match unpacked(await frames.answer(OPEN_S)):
            case {"from": str(peer), **told}:
                frames.write(self._admit(peer, told.get("member"), pipe))
            case _:
                raise FrameError("the relay doesn't say who opens the stream")
        inside = await self._tls.secured(pipe, peer, server=True)
        try:
            protocol = (await FrameStream(inside, peer, Limits(), self.traffic).answer(OPEN_S)).decode(
                "utf-8", "replace"
            )
            if protocol not in self._protocols:
                raise FrameError(f"this peer doesn't serve {protocol}")
        except BaseException:
            inside.abort()
            raise
        return peer, protocol, inside

    def _admit(self, peer: str, chain: object, pipe: Pipe) -> Message:
        """The answer to the relay, after which the handshake begins. In a private run, check the other peer's chain,
        which the relay has passed on, and show this peer's. The handshake proves that the other end is that peer.

        Raises:
            Stranger: the other peer isn't a member.
        """
        if self._hellos is None:
            return Message(b"")
        self._hellos.run_of(peer, chain if isinstance(chain, bytes) else None)
        self._pending.remove(pipe)
        return Message(self._hellos.membership.chain)


def abort_stream(opened: Opened) -> None:
    """Drop a stream that was opened after the deadline, or after another attempt had succeeded."""
    opened[0].abort()


HEAD_START_S = 0.5
"""Seconds that a direct dial has before relays are asked as well."""
RELAYED_FOR_S = 30.0
"""When a relay was faster than a direct dial, direct dials to that peer have no head start for this many seconds."""
LOOK_EVERY_S = 5.0
"""Seconds between two looks whether a broken direct path works again, and the deadline for each."""
AVOIDED_S = 600.0
"""The longest time for which a direct path is avoided."""
REMEMBERED_MAX = 4096
"""The most peers remembered because a relay was faster, and the most remembered because their direct path is broken."""


class Paths:
    """Opens streams to other peers, directly or through relays. `linked` returns the peers that this peer is connected
    to: each of them may serve as a relay."""

    def __init__(self, daemon: Daemon, circuits: Circuits, linked: Callable[[], Iterable[str]]) -> None:
        self._daemon, self._circuits, self._linked = daemon, circuits, linked
        self._relayed_until: dict[str, float] = {}
        self._broken: dict[str, asyncio.Task[None]] = {}  # peers whose direct path is broken, with the watch over it

    async def open(self, peer: str, protocol: str, *, timeout_s: float, around: bool = False) -> Opened:
        """Open a stream to a peer; returns it with the multiaddr at which the peer was found. With `around` it uses
        only relays, because the direct path may be broken. If a relay then reaches the peer, later streams avoid the
        direct path until the peer answers on it again.

        Raises:
            Unreachable: neither path leads to the peer. `refused`: as far as can be told, the peer has ended.
        """
        if around or peer in self._broken:
            try:
                opened = await self._circuits.open(peer, protocol, self._circuits.relays_to(peer, self._linked()))
            except Unreachable as error:
                if around or error.refused:
                    raise
            else:
                self._avoid(peer)
                return opened
        clock = asyncio.get_running_loop().time
        relays = self._circuits.relays_to(peer, self._linked())
        sought = bool(relays and self._circuits.relays_of(peer))
        reasons: list[str] = []

        async def direct() -> Opened:
            try:
                return await self._daemon.open_stream(peer, protocol, timeout_s=timeout_s)
            except Unreachable as error:
                raise Unreachable(str(error), refused=error.refused and not sought) from None

        def failed(error: BaseException) -> None:
            if not isinstance(error, Unreachable) or error.refused:
                raise error
            reasons.append(str(error))

        ways: list[Callable[[], Coroutine[Any, Any, Opened]]] = [direct]
        if relays:
            ways.append(partial(self._circuits.open, peer, protocol, relays))
        head_start_s = 0.0 if clock() < self._relayed_until.get(peer, 0.0) else HEAD_START_S
        try:
            opened = await first(ways, stagger_s=head_start_s, discard=abort_stream, failed=failed)
        except Unreachable as error:
            if error.refused:
                raise
            raise Unreachable("; ".join(reasons)) from None
        self._remember(peer, clock() + RELAYED_FOR_S if leads_over_a_relay(opened[1]) else 0.0)
        return opened

    async def close(self) -> None:
        await stop(*self._broken.values())

    def _avoid(self, peer: str) -> None:
        if peer not in self._broken and len(self._broken) < REMEMBERED_MAX:
            self._broken[peer] = asyncio.create_task(self._watch(peer))

    async def _watch(self, peer: str) -> None:
        """Check a broken direct path until the peer answers on it, or until `AVOIDED_S` have passed. Then later streams
        use the direct path again."""
        try:
            for _ in range(round(AVOIDED_S / LOOK_EVERY_S)):
                await asyncio.sleep(LOOK_EVERY_S)
                if await answers(self._daemon, peer, LOOK_EVERY_S):
                    return
        finally:
            del self._broken[peer]

    def _remember(self, peer: str, until: float) -> None:
        self._relayed_until.pop(peer, None)
        if until:
            if len(self._relayed_until) >= REMEMBERED_MAX:
                del self._relayed_until[next(iter(self._relayed_until))]
            self._relayed_until[peer] = until
