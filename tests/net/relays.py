"""Peers and relays in one process. Streams to and from their daemons are socket pairs; all else is as in a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import uvloop

from p2p_diloco.net.hello import Hellos, RunOf, any_run
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.paths import Circuits
from p2p_diloco.net.pipe import Pipe, PipeStalled
from p2p_diloco.net.relay import Relay
from p2p_diloco.net.signing import SigningKey
from p2p_diloco.net.streams import start
from p2p_diloco.net.tls import Tls
from tests.net.direct_peers import pair
from tests.net.members import OPEN, membership
from tests.net.patience import leaving_nothing, until

ECHO = "/p2p-diloco/test/echo"
AT_ONCE_S = 10.0
"""What waits for no deadline takes far less."""


KEYS = [SigningKey(bytes([number]) * 32) for number in range(4)]


class FakeDaemon:
    """Opens streams to the daemons of a world; those of `private` peers can't be dialled by peers that are private, but
    by relays."""

    def __init__(self, world: World, name: str, *, private: bool = False) -> None:
        self.world, self.peer_id, self.private = world, name, private
        self.addresses = [f"/ip4/127.0.0.1/tcp/{4000 + len(world.daemons)}/p2p/{name}"]
        self.known: dict[str, list[str]] = {}
        self.chain: bytes | None = None
        self.serves: dict[str, Callable[[str, Pipe, str], Awaitable[None]]] = {}
        self.opened = 0
        world.daemons[name] = self

    async def open_stream(self, peer: str, protocol: str, *, timeout_s: float) -> tuple[Pipe, str]:
        there = self.world.daemons.get(peer)
        if there is None or protocol not in there.serves or (there.private and self.private):
            raise Unreachable(f"{peer}: no route", refused=there is None)
        self.opened += 1
        near, far = await pair()
        self.world.pipes += [near, far]
        seen_at = self.addresses[0].partition("/p2p/")[0]
        start(_as_coroutine(there.serves[protocol](self.peer_id, far, seen_at)), self.world.tasks)
        return near, there.addresses[0].partition("/p2p/")[0]

    async def serve_streams(self, protocol: str, serve: Callable[[str, Pipe, str], Awaitable[None]]) -> None:
        self.serves[protocol] = serve

    def introduce(self, peer: str, addresses: Sequence[str]) -> None:
        self.known[peer] = list(addresses)

    def known_at(self, peer: str) -> list[str]:
        return self.known.get(peer, [])


async def _as_coroutine(serving: Awaitable[None]) -> None:
    await serving


class World:
    """Daemons, and what is to be closed at a test's end."""

    def __init__(self) -> None:
        self.daemons: dict[str, FakeDaemon] = {}
        self.pipes: list[Pipe] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.circuits: list[Circuits] = []
        self.hellos: list[Hellos] = []
        self.relays: list[Relay] = []
        self.kept: list[Pipe] = []
        self.heard: list[tuple[str, str, bytes]] = []
        """What arrived at the peers that echo: receiver, sender and bytes."""

    def daemon(self, name: str, *, private: bool = False) -> Any:
        return FakeDaemon(self, name, private=private)

    async def relay(self, name: str = "relay", mbit: float = 1000.0, run_of: RunOf = any_run) -> Relay:
        relay = Relay(self.daemon(name), mbit, run_of)
        self.relays.append(relay)
        await relay.start()
        return relay

    async def peer(self, number: int, invited: Invitation | None = None) -> Circuits:
        """A peer that others can't dial, and that echoes what it hears through relays. `invited`: to a private run."""
        daemon, hellos = self.daemon(KEYS[number].peer_id, private=True), None
        if invited is not None:
            hellos = Hellos(membership(daemon.peer_id, invited), lambda peer: None)
            daemon.chain = hellos.membership.chain
            self.hellos.append(hellos)
        own = membership(daemon.peer_id, OPEN) if hellos is None else hellos.membership
        circuits = Circuits(daemon, Tls(own, KEYS[number]), hellos)
        self.circuits.append(circuits)
        me = KEYS[number].peer_id

        async def echo(peer: str, pipe: Pipe, seen_at: str) -> None:
            with contextlib.suppress(PipeStalled):
                while pipe.unread or await pipe.more(100.0):
                    self.heard.append((me, peer, bytes(pipe.unread)))
                    pipe.write(bytes(pipe.unread))
                    del pipe.unread[:]
            pipe.close()

        await circuits.serve(ECHO, echo)
        return circuits

    async def registered(self, circuits: Circuits, relay: str = "relay") -> None:
        """Register a peer at a relay, and wait until it is."""
        circuits.register(self.daemons[relay].addresses)
        await until(lambda: relay in circuits.registered)

    async def close(self) -> None:
        for closes in (*self.circuits, *self.hellos):
            await closes.close()
        for relay in self.relays:
            await relay.close()
        for pipe in self.pipes:
            pipe.abort()
        if self.tasks:
            await asyncio.wait(self.tasks, timeout=AT_ONCE_S)
        assert not self.tasks


def closed(*pipes: Pipe) -> bool:
    """Whether these are closed. One that carries an encrypted stream isn't told of its end itself."""
    return all(pipe.ended is not None or pipe.transport.is_closing() for pipe in pipes)


async def heard(pipe: Pipe, count: int) -> bytes:
    """The next bytes on a pipe."""
    target = bytearray(count)
    await pipe.read_into(memoryview(target), stall_s=30.0, total_s=60.0)
    return bytes(target)


def run(test: Callable[[World], Awaitable[None]]) -> None:
    """Run a test in a world that it fills; afterwards no task, thread or socket may be left of it."""

    async def bounded() -> None:
        world = World()
        try:
            await asyncio.wait_for(test(world), 100)
        finally:
            await world.close()

    leaving_nothing(bounded())


@pytest.fixture(params=["asyncio", "uvloop"])
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test runs on both event loops: each has TLS of its own."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy() if request.param == "uvloop" else None)
    yield request.param
    asyncio.set_event_loop_policy(None)
