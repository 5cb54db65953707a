"""Peers with direct connections, all in one process. Streams over libp2p are socket pairs; all else is as in a run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from p2p_diloco.net.direct import DirectChannel
from p2p_diloco.net.exchange import Exchange
from p2p_diloco.net.framing import Frame, FrameStream
from p2p_diloco.net.interface import Limits, Refusal, Traffic, Unreachable
from p2p_diloco.net.listener import Offer, knock_at
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.streams import start
from p2p_diloco.net.tls import Tls
from tests.net.inboxes import Box
from tests.net.members import OPEN, id_of, key_of, membership
from tests.net.patience import leaving_nothing

LIMITS = Limits(
    connect_timeout_s=5.0, read_timeout_s=30.0, write_timeout_s=30.0, payload_bytes_max=64 << 20, streams_max=16
)
"""Deadlines that no test waits for, unless it turns the clock, and that no machine misses which stands still for a
while."""
AT_ONCE_S = LIMITS.read_timeout_s / 3
"""What has waited for no deadline takes less."""
HERE = "/ip4/127.0.0.1/tcp/1"


class Named(Tls):
    """The peers of a small world have short names in place of their ids."""

    def __init__(self, name: str) -> None:
        super().__init__(membership(id_of(name), OPEN), key_of(name))

    async def secured(self, below: socket.socket | Pipe, peer: str, *, server: bool) -> Pipe:
        return await super().secured(below, id_of(peer), server=server)


class Peer:
    """An exchange with direct connections, in a small world of such."""

    def __init__(self, world: dict[str, Peer], name: str, hosts: tuple[str, ...], limits: Limits) -> None:
        self.world, self.name, self.box, self.traffic, self.limits = world, name, Box(), Traffic(), limits
        self.seen_at: str | None = None
        """Where others' daemons see this peer; None: at `known_at`."""
        self.known_at, self.libp2p_streams, self.talks = HERE, 0, 0
        self.told: Callable[[Offer], Offer] = lambda offer: offer
        """What becomes of the offers that this peer hears."""
        self.serving: set[asyncio.Task[None]] = set()
        self.exchange = Exchange(self.box, limits=limits, traffic=self.traffic, dial=self.dial)
        self.direct = self.exchange.direct = DirectChannel(
            self.exchange.streams,
            Named(name),
            open_stream=self.ask,
            addresses=lambda peer: [world[peer].known_at],
            found_at=self.find,
            serve=functools.partial(self.exchange.receiver.serve, direct=True),
            hosts=hosts,
        )
        world[name] = self

    async def dial(self, peer: str, *, around: bool = False) -> tuple[Pipe, str]:
        self.libp2p_streams += 1
        near, far = await pair()
        there = self.world[peer]
        there.start(there.exchange.receiver.serve(self.name, far))
        return near, there.known_at

    async def ask(self, peer: str) -> tuple[Pipe, str]:
        if peer not in self.world:
            raise Unreachable(f"{peer}: nobody is there")
        self.talks += 1
        near, far = await pair()
        there = self.world[peer]
        there.start(there.direct.answer(self.name, far, self.seen_at or self.known_at))
        return near, there.known_at

    async def find(self, peer: str) -> list[str]:
        return [self.world[peer].known_at]

    def start(self, coroutine: Any) -> None:
        start(coroutine, self.serving)

    async def send(self, peer: str, payload: bytes, header: bytes = b"h") -> None:
        await self.exchange.send(peer, header, memoryview(payload))

    def connected(self, peer: str) -> bool:
        """Whether this peer has a connection on which it sends to that one."""
        return bool(self.direct._way(peer).connections)

    @property
    def port(self) -> int:
        return self.direct.listener.ports[0][1]

    async def close(self) -> None:
        await self.exchange.close()
        await self.direct.close()
        await asyncio.gather(*self.serving, return_exceptions=True)


async def pair() -> tuple[Pipe, Pipe]:
    near, far = socket.socketpair()
    return tuple([await Pipe.adopt(*await asyncio.open_connection(sock=end)) for end in (near, far)])  # type: ignore[return-value]


Start = Callable[..., Peer]


def run(test: Callable[[Start], Awaitable[None]]) -> None:
    """Run a test in a world that it fills; afterwards no task, thread or socket may be left of it."""

    async def bounded() -> None:
        world: dict[str, Peer] = {}

        def start(name: str, *, hosts: tuple[str, ...] = ("127.0.0.1",), limits: Limits = LIMITS) -> Peer:
            return Peer(world, name, hosts, limits)

        try:
            await asyncio.wait_for(test(start), 100)
        finally:
            for peer in list(world.values()):
                await peer.close()

    leaving_nothing(bounded())


@contextlib.contextmanager
def changed_offers(peer: Peer) -> Iterator[None]:
    """Let the peer hear other offers than those that are made, and make none itself."""
    ask = peer.direct._ask

    async def told(to: str, request: bytes) -> tuple[bytes, str]:
        if request:
            raise Refusal("not the other way round")
        answer, seen_at = await ask(to, request)
        return peer.told(Offer.unpack(answer)).pack(), seen_at

    peer.direct._ask = told  # type: ignore[method-assign]
    yield
    peer.direct._ask = ask  # type: ignore[method-assign]


async def offer_of(asker: Peer, peer: str) -> Offer:
    return Offer.unpack((await asker.direct._ask(peer, b""))[0])


async def let_in(asker: Peer, peer: str, offer: Offer | None = None) -> Pipe:
    """A connection on which the asker may send, and a test in its place."""
    offer = offer or await offer_of(asker, peer)
    place = "127.0.0.1", asker.world[peer].port, socket.AF_INET
    return await knock_at(asker.direct._tls, place, offer.knock, peer, sends=True)


async def ask_to_dial_back(asker: Peer, peer: str) -> None:
    """Have the peer dial the asker, and so give the asker a connection to send on."""
    mine = asker.direct.listener.offer(peer, sends=True)
    assert mine is not None
    await asker.direct._ask(peer, mine.pack())


# -- payloads

LONG = 4 << 20
"""Longer than what the system takes of a payload before anybody reads it."""


class Gate:
    """Holds what an inbox takes, until it is opened; refuses what is named."""

    def __init__(self, peer: Peer, refused: bytes = b"") -> None:
        self.open, self.come = asyncio.Event(), list[bytes]()
        self._box, self._refused, self._deliver = peer.box, refused, peer.box.deliver
        peer.box.deliver = self.deliver  # type: ignore[method-assign]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        self.come.append(header)
        await self.open.wait()
        if header == self._refused:
            raise Refusal(f"no {header.decode()}")
        await self._deliver(sender, header, payload)


def sent(peer: Peer, *headers: bytes, nbytes: int = 1000) -> list[asyncio.Task[None]]:
    """Payloads to b, of their header's bytes, all at once."""
    return [asyncio.create_task(peer.send("b", header * nbytes, header)) for header in headers]


def frames_on(pipe: Pipe) -> FrameStream:
    """The frames of a test's own end of a stream."""
    return FrameStream(pipe, "", Limits(), Traffic())


async def next_frame(frames: Pipe | FrameStream) -> Frame | None:
    """The next frame on a test's own end of a stream; None: its end."""
    frames = frames_on(frames) if isinstance(frames, Pipe) else frames
    return await frames.read(idle_s=30.0, frame_s=30.0)


async def answers(pipe: Pipe, count: int) -> list[Frame | None]:
    """The next frames on a connection of a test's own."""
    frames = frames_on(pipe)
    return [await next_frame(frames) for _ in range(count)]
