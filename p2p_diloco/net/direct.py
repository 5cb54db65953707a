"""Direct connections to peers, for payloads: which are open, and whether it is worth trying to open one.

Law: never in the way. A peer that can't be reached directly gets its payloads over libp2p, and costs no more than a
moment of one payload. Who is at the other end is proved over libp2p: an offer is told on an authenticated stream, and a
connection is made only to whom the offer is from, and only by whom it is for.

    over libp2p    A: MESSAGE with nothing                B: MESSAGE with an offer, or REFUSED
    inside TLS     A, which has dialled: ticket, "S"      B: "W"; from now on A sends payloads
    and where that fails
    over libp2p    A: MESSAGE with an offer of its own    B: MESSAGE with nothing once it has connected, or REFUSED
    inside TLS     B, which has dialled: ticket, "R"      A: "W"; from now on A sends payloads
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

from p2p_diloco.net.addresses import leads_over_a_relay
from p2p_diloco.net.framing import FrameError, Message, Refused
from p2p_diloco.net.interface import PEERS_COUNTED_MAX, Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.link import FrameStream
from p2p_diloco.net.listener import I_SEND, YOU_SEND, Listener, present
from p2p_diloco.net.offer import Offer, OfferError
from p2p_diloco.net.pacing import Pacer
from p2p_diloco.net.payload_stream import PayloadStream
from p2p_diloco.net.pipe import Pipe, PipeBroken, PipeStalled
from p2p_diloco.net.tls import connect

log = logging.getLogger(__name__)

DIAL_S = 3.0
"""How long an attempt may take, the talk over libp2p included; a second one, the other way round, as long."""
STAGGER_S = 0.25
"""How long an address may take before the next one is tried beside it."""
PATIENCE_PART = 0.1
"""How much of the time to connect a payload waits for its direct connection before it goes over libp2p."""
PLACES_MAX = 8
"""Addresses of a peer that are tried."""
PER_PEER_MAX = 2
"""Connections to one peer. A payload that finds them all busy goes over libp2p."""
OPEN_MAX = 256
"""Connections to all peers. Beyond, the one that was used least lately is closed."""
RETRY_S, RETRY_S_MAX = 30.0, 600.0
"""How long after a failure it is tried again; twice as long after each further one."""
CARRIED_BYTES_MAX = 1 << 37
"""What a connection carries before another takes its place: AES-GCM may encrypt about 2²⁴ records of 16 KiB under one
key (RFC 8446, 5.5), and this is half of it."""

_FAILURES = (
    OSError, asyncio.TimeoutError, Refusal, Unreachable, OfferError, FrameError, PipeBroken, PipeStalled,
)  # fmt: skip

Opened = tuple[Pipe, str]
"""A stream over libp2p, and the multiaddr at which the peer was found."""


@dataclass(slots=True)
class _Way:
    """What is known of the way to one peer."""

    free: list[PayloadStream] = field(default_factory=list)
    """Those on which nobody writes."""
    carried: dict[PayloadStream, int] = field(default_factory=dict)
    """The open connections, and the bytes that each has carried."""
    connecting: int = 0
    patient_until: float = 0.0
    failures: int = 0
    retry_at: float = 0.0

    def pop(self) -> PayloadStream | None:
        """A connection on which nobody writes: the one used last, for its window is widest."""
        while self.free:
            if (stream := self.free.pop()).fit:
                return stream
            self.drop(stream)
        return None

    def drop(self, stream: PayloadStream) -> None:
        """Write no more on it."""
        self.carried.pop(stream, None)
        if stream in self.free:
            self.free.remove(stream)
        stream.retire()


class DirectChannel:
    """Direct connections of one peer, in both directions.

    `open_stream` opens a stream to a peer's `answer`; `addresses` gives the multiaddrs at which a peer is known;
    `serve` takes the payloads that come on a connection; `hosts` are the IP addresses to listen on.

    Raises:
        OSError: the port can't be listened on.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        traffic: Traffic,
        open_stream: Callable[[str], Awaitable[Opened]],
        addresses: Callable[[str], Sequence[str]],
        serve: Callable[[str, Pipe], Awaitable[None]],
        hosts: Sequence[str],
        port: int = 0,
    ) -> None:
        self.limits, self._traffic = limits, traffic
        self._open_stream, self._addresses, self._serve = open_stream, addresses, serve
        self._clock = asyncio.get_running_loop().time
        self._ways: dict[str, _Way] = {}
        self._pacer = Pacer()
        self._streams = WeakSet[PayloadStream]()  # retired ones too, while an answer is awaited on them
        self._dialled_back: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.listener = Listener(serve=serve, lend=self._keep)
        self.listener.listen(hosts, port)

    # -- for whoever sends

    async def take(self, peer: str) -> PayloadStream | None:
        """A connection to write a payload on, the caller's until `give_back`; None: use libp2p.

        A first attempt is waited for, for a moment. What comes of it later serves later payloads.
        """
        way = self._way(peer)
        if (stream := way.pop()) is not None or self._closing:
            return self._taken(peer, stream)
        now = self._clock()
        waited_out = bool(way.connecting) and now >= way.patient_until
        if waited_out or now < way.retry_at or len(way.carried) + way.connecting >= PER_PEER_MAX:
            return None
        if not way.connecting:
            way.patient_until = now + PATIENCE_PART * self.limits.connect_timeout_s
        way.connecting += 1
        attempt = self._start(self._attempt(peer, way))
        if not way.failures:
            await asyncio.wait({attempt}, timeout=max(0.0, way.patient_until - self._clock()))
        return self._taken(peer, way.pop())

    def _taken(self, peer: str, stream: PayloadStream | None) -> PayloadStream | None:
        if stream is not None and (paced := stream.frames.pipe.paced) is not None:
            self._pacer.begin(peer, paced)
        return stream

    def give_back(self, peer: str, stream: PayloadStream, sent_bytes: int) -> None:
        """Return a connection, on which so much was written."""
        self._pacer.over(peer)
        way = self._way(peer)
        carried = way.carried.get(stream, 0) + sent_bytes
        if stream.fit and carried < CARRIED_BYTES_MAX:
            way.carried[stream] = carried
            way.free.append(stream)
            self._ways[peer] = self._ways.pop(peer)  # the latest is the last
        else:
            way.drop(stream)

    def succeeded(self, peer: str) -> None:
        """A payload was answered for."""
        way = self._way(peer)
        way.failures, way.retry_at = 0, 0.0

    def failed(self, peer: str, why: str) -> None:
        """A connection broke or stood still under a payload: leave this way alone for a while."""
        way = self._way(peer)
        for stream in list(way.carried):
            way.drop(stream)
        self._note_failure(peer, way, why)

    def end(self) -> None:
        """End every connection, and whatever is on its way to one."""
        self._closing = True
        self._pacer.end()
        self.listener.end()
        for stream in list(self._streams):
            stream.frames.pipe.abort()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """The same, and wait for it."""
        self.end()
        await asyncio.gather(*self._tasks, self.listener.ended(), return_exceptions=True)

    # -- for whoever asks over libp2p

    async def answer(self, peer: str, pipe: Pipe, seen_at: str) -> None:
        """Answer what a peer asks on a stream that it opened."""
        stream, read_s = FrameStream(pipe, peer, self.limits, self._traffic), self.limits.read_timeout_s
        try:
            match await stream.read(idle_s=read_s, frame_s=read_s):
                case Message(request):
                    stream.write(await self._answered(peer, request, seen_at))
                    await stream.read(idle_s=read_s, frame_s=read_s)  # until it hangs up
                case _:
                    pass
        except _FAILURES as error:
            log.debug("%s asked for a direct connection in vain: %r", peer, error)
        finally:
            pipe.close()

    async def _answered(self, peer: str, request: bytes, seen_at: str) -> Message | Refused:
        if self._closing:
            return Refused("this peer is closing")
        if not request:
            offer = self.listener.offer(peer)
            return Refused("this peer takes no direct connections") if offer is None else Message(offer.pack())
        if self._dialled_back.get(peer, 0) >= PER_PEER_MAX:
            return Refused("there are enough direct connections")
        self._dialled_back[peer] = self._dialled_back.get(peer, 0) + 1
        try:
            pipe = await self._dial(peer, Offer.unpack(request), seen_at, YOU_SEND)
        except BaseException as error:
            self._leave_back(peer)
            if not isinstance(error, _FAILURES):
                raise
            return Refused(f"no direct connection the other way round either: {_said(error)}")
        self._start(self._serve_back(peer, pipe))
        return Message(b"")

    async def _serve_back(self, peer: str, pipe: Pipe) -> None:
        """Take payloads on a connection that this peer dialled for them."""
        try:
            await self._serve(peer, pipe)
        finally:
            pipe.abort()
            self._leave_back(peer)

    def _leave_back(self, peer: str) -> None:
        self._dialled_back[peer] -= 1
        if not self._dialled_back[peer]:
            del self._dialled_back[peer]

    # -- connecting

    async def _attempt(self, peer: str, way: _Way) -> None:
        try:
            await self._connect(peer)
        except _FAILURES as error:
            self._note_failure(peer, way, _said(error))
        except Exception:
            log.exception("no direct connection to %s could be made", peer)
            self._note_failure(peer, way, "it failed here")
        finally:
            way.connecting -= 1

    async def _connect(self, peer: str) -> None:
        """Make a connection, dialled by this peer or else by the other one."""
        trouble: Exception
        try:
            offer, seen_at = await asyncio.wait_for(self._ask(peer, b""), DIAL_S)
        except Refusal as refusal:
            trouble = refusal
        else:
            try:
                self._keep(peer, await self._dial(peer, Offer.unpack(offer), seen_at, I_SEND))
                return
            except _FAILURES as error:
                trouble = error
        if (mine := self.listener.offer(peer)) is None:
            raise trouble
        await asyncio.wait_for(self._ask(peer, mine.pack()), 2 * DIAL_S)

    async def _ask(self, peer: str, request: bytes) -> tuple[bytes, str]:
        pipe, seen_at = await self._open_stream(peer)
        stream = FrameStream(pipe, peer, self.limits, self._traffic)
        read_s = self.limits.read_timeout_s
        try:
            stream.write(Message(request))
            match await stream.read(idle_s=read_s, frame_s=read_s):
                case Message(answer):
                    return answer, seen_at
                case Refused(reason):
                    raise Refusal(reason)
                case frame:
                    raise FrameError(f"{frame} is no answer to that")
        finally:
            pipe.abort()

    async def _dial(self, peer: str, offer: Offer, seen_at: str, role: bytes) -> Pipe:
        """Connect to whoever made an offer, and show the ticket that came with it."""
        places = places_of(offer.ports, (seen_at, *self._addresses(peer)))
        if not places:
            raise OSError("it listens nowhere that is known here")

        async def attempt(host: str, port: int, family: int) -> Pipe:
            return await present(await connect(host, port, family, offer.certificate), offer.ticket, role)

        return await asyncio.wait_for(_first([partial(attempt, *place) for place in places]), DIAL_S)

    def _keep(self, peer: str, pipe: Pipe) -> None:
        """Have one more connection to send payloads on, whoever of the two has dialled."""
        way = self._way(peer)
        if self._closing or len(way.carried) >= PER_PEER_MAX:
            pipe.abort()
            return
        stream = PayloadStream(FrameStream(pipe, peer, self.limits, self._traffic), "direct")
        self._streams.add(stream)
        way.carried[stream] = 0
        way.free.append(stream)
        self._ways[peer] = self._ways.pop(peer)  # the latest is the last
        self._make_room()

    def _make_room(self) -> None:
        """Close what was used least lately, as long as too much is open."""
        excess = sum(len(way.carried) for way in self._ways.values()) - OPEN_MAX
        for way in list(self._ways.values()):
            for stream in way.free[: max(0, excess)]:
                way.drop(stream)
                excess -= 1

    # -- inside

    def _way(self, peer: str) -> _Way:
        way = self._ways.get(peer)
        if way is None:
            if len(self._ways) >= PEERS_COUNTED_MAX:
                unused = (p for p, w in self._ways.items() if not w.connecting and all(c.ended for c in w.carried))
                if (forgotten := next(unused, None)) is not None:
                    del self._ways[forgotten]
            way = self._ways[peer] = _Way()
        return way

    def _note_failure(self, peer: str, way: _Way, why: str) -> None:
        if self._clock() < way.retry_at:
            return  # of several attempts at once
        way.failures += 1
        wait_s = min(RETRY_S * 2 ** (way.failures - 1), RETRY_S_MAX)
        way.retry_at = self._clock() + wait_s
        level = logging.INFO if way.failures == 1 else logging.DEBUG
        log.log(level, "payloads to %s go over libp2p for the next %.0f s: %s", peer, wait_s, why)

    def _start(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def places_of(ports: Iterable[tuple[int, int]], addresses: Iterable[str]) -> list[tuple[str, int, int]]:
    """Where to dial, as (host, port, address family), in the order of the addresses; none that leads over a relay."""
    ports = tuple(ports)
    places: dict[tuple[str, int, int], None] = {}
    for address in addresses:
        match address.split("/"):
            case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6" as kind, host, *_] if not leads_over_a_relay(address):
                for version, port in ports:
                    if not kind.startswith(("ip", "dns")) or kind[-1] in (str(version), "s"):
                        family = socket.AF_INET if version == 4 else socket.AF_INET6
                        places[host, port, int(family)] = None
    return list(places)[:PLACES_MAX]


async def _first(attempts: Sequence[Callable[[], Coroutine[object, object, Pipe]]]) -> Pipe:
    """The first attempt that succeeds. Each next one begins when one has failed, or when the others take long.

    Raises:
        OSError: what became of the last one that failed.
    """
    waiting, running = list(attempts), set[asyncio.Task[Pipe]]()
    error: BaseException = OSError("no address")
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(waiting.pop(0)()))
            timeout_s = STAGGER_S if waiting else None
            done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (failure := task.exception()) is None:
                    running.discard(task)
                    return task.result()
                error = failure
            running -= done
        raise error
    finally:
        for task in running:
            task.cancel()
        if running:
            for outcome in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(outcome, Pipe):
                    outcome.abort()


def _said(error: BaseException) -> str:
    return "it took too long" if isinstance(error, asyncio.TimeoutError) else str(error) or repr(error)
