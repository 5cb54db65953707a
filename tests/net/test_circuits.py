"""Streams through a relay: who is at the other end is proved, whatever the relay does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest

from p2p_diloco.net import paths as module
from p2p_diloco.net.framing import Accepted, FrameStream, Message, Refused, encode
from p2p_diloco.net.interface import PEERS_COUNTED_MAX, Unreachable
from p2p_diloco.net.paths import RELAYS_MAX, Circuits
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.relay import GONE, RELAY, RELAYED, Relay
from tests.net.clocks import by_hand
from tests.net.direct_peers import frames_on, next_frame
from tests.net.members import tls_of
from tests.net.patience import awaited, plays, until
from tests.net.relays import AT_ONCE_S, ECHO, KEYS, World, closed, heard, run
from tests.net.relays import loops as loops

A, B = KEYS[0].peer_id, KEYS[1].peer_id
SECRET = b"nothing that a relay may read or change" * 20


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for some seconds fails no dial. What must take too long sets its own time."""
    monkeypatch.setattr(module, "OPEN_S", 30.0)


async def two(world: World) -> tuple[Circuits, Circuits, Relay]:
    """Two private peers, both registered at a relay."""
    relay = await world.relay()
    a, b = await world.peer(0), await world.peer(1)
    for peer in (a, b):
        await world.registered(peer)
    return a, b, relay


@plays(run)
async def test_the_relay_sees_no_byte(world: World) -> None:
    """What passes through it holds neither the protocol nor what is sent."""
    seen = bytearray()
    evil = Evil(world)
    evil.change = lambda data: seen.extend(data) or data  # type: ignore[func-returns-value]
    a, _ = await world.peer(0), await world.peer(1)
    pipe, _ = await a.open(B, ECHO, ["evil"])
    pipe.write(SECRET)
    assert await heard(pipe, len(SECRET)) == SECRET
    assert len(seen) > 2 * len(SECRET)
    assert ECHO.encode() not in seen
    assert SECRET[:20] not in seen
    pipe.abort()


# -- relays that lie

NOTHING = "nothing"


class Evil:
    """A relay that does as a test says, and else as it should."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.daemon = world.daemon("evil")
        self.daemon.serves[RELAY] = self.serve
        self.sender: object = A
        self.to_a: Any = Message(b"")
        self.to_b: Any = NOTHING
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.in_place_of_b: Callable[[Pipe], Awaitable[None]] | None = None

    async def serve(self, peer: str, pipe: Pipe, seen_at: str) -> None:
        a = frames_on(pipe)
        assert isinstance(await next_frame(a), Message)
        there, _ = await self.daemon.open_stream(B, RELAYED, timeout_s=5.0)
        try:
            b = frames_on(there)
            b.write(Message(msgpack.packb({"from": self.sender})))
            self.say(b, self.to_b)
            if await next_frame(b) is None:
                return
            self.say(a, self.to_a)
            if self.in_place_of_b is not None:
                await self.in_place_of_b(pipe)
                return
            passing = [asyncio.create_task(self.pass_on(*ends)) for ends in ((pipe, there), (there, pipe))]
            await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)
        finally:
            there.close()
            pipe.close()

    async def pass_on(self, source: Pipe, target: Pipe) -> None:
        while source.unread or await source.more(100.0):
            target.write(self.change(bytes(source.unread)))
            del source.unread[:]

    @staticmethod
    def say(frames: FrameStream, what: Any) -> None:
        if isinstance(what, bytes):
            frames.pipe.write(what)
        elif what is None:
            frames.pipe.close()
        elif what != NOTHING:
            frames.write(what)


async def refused_by_both(world: World, *, opens: bool) -> Unreachable | None:
    """Open a stream through the evil relay; nothing may arrive at either end. `opens`: one end may think for a moment
    that it has a stream."""
    a, b = await world.peer(0), await world.peer(1)
    began, error = time.monotonic(), None
    try:
        pipe, _ = await a.open(B, ECHO, ["evil"])
        assert opens
        pipe.write(SECRET)
        assert not await pipe.more(AT_ONCE_S)
    except Unreachable as caught:
        error = caught
        assert not error.refused
    await until(lambda: not b._answering and closed(*world.pipes), AT_ONCE_S)
    assert time.monotonic() - began < AT_ONCE_S
    assert world.heard == []
    return error


async def pose_as_b(pipe: Pipe) -> None:
    """Answer the TLS handshake with a key of its own, and hear nothing."""
    with contextlib.suppress(OSError):
        inside = await tls_of(KEYS[3]).secured(pipe, A, server=True)
        assert not await inside.more(AT_ONCE_S)  # in TLS 1.3 the server is refused afterwards


OPENS = ("another sender", "the receiver as the sender")
LIES: dict[str, dict[str, Any]] = {
    "another sender": {"sender": KEYS[2].peer_id},
    "the receiver as the sender": {"sender": B},
    "no sender": {"sender": 7},
    "garbage to the dialler": {"to_a": b"garbage" * 100},
    "garbage to the receiver": {"to_b": b"garbage" * 100},
    "a frame of another kind": {"to_a": Accepted()},
    "an answer and garbage": {"to_a": encode(Message(b"")) + b"\x00" * 1000},
    "a refusal": {"to_a": Refused("no\nsuch peer")},
    "the end for the dialler": {"to_a": None},
    "the end for the receiver": {"to_b": None},
    "in the peer's place": {"in_place_of_b": pose_as_b},
    "hangs before the answer": {"to_a": NOTHING},
    "hangs in TLS": {"change": lambda data: b""},
}


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("lie", LIES)
@plays(run)
async def test_a_lie_in_the_handshake_ends_the_stream(world: World, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends, at once or at the deadline, and nothing is delivered. In TLS 1.3 the client thinks for a moment
    that it has a stream, where the server refuses it."""
    if lie.startswith("hangs"):
        monkeypatch.setattr(module, "OPEN_S", 0.5)
    evil = Evil(world)
    vars(evil).update(LIES[lie])
    refused = await refused_by_both(world, opens=lie in OPENS)
    assert (refused is None) == (lie in OPENS)
    assert ("too long" in str(refused)) == lie.startswith("hangs")


@plays(run)
async def test_handshakes_at_a_time_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is closed at once; later ones are served again."""
    monkeypatch.setattr(module, "ANSWERED_MAX", 2)
    a, b, _ = await two(world)
    stranger = world.daemon("stranger")
    waiting = [(await stranger.open_stream(B, RELAYED, timeout_s=5.0))[0] for _ in range(2)]
    await until(lambda: b._answering == 2)
    with pytest.raises(Unreachable):
        await a.open(B, ECHO, ["relay"])
    for pipe in waiting:
        pipe.abort()
    await until(lambda: not b._answering)
    pipe, _ = await a.open(B, ECHO, ["relay"])
    pipe.abort()


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02])
@plays(run)
async def test_a_cancelled_dial_leaves_nothing(world: World, after_s: float) -> None:
    """At whichever moment; `run` looks for what is left."""
    a, b, _ = await two(world)
    registrations = len(world.pipes)
    opening = asyncio.create_task(a.open(B, ECHO, ["relay"]))
    await asyncio.sleep(after_s)
    opening.cancel()
    await asyncio.wait({opening})
    if not opening.cancelled():
        opening.result()[0].abort()
    await until(lambda: not b._answering and closed(*world.pipes[registrations:]))


# -- relays of this peer and of others


@plays(run)
async def test_a_registration_is_renewed_after_a_restart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile the peer announces no address there."""
    monkeypatch.setattr(module, "REGISTER_AGAIN_S", 0.05)
    a, _, relay = await two(world)
    assert a.addresses == [f"/ip4/127.0.0.1/tcp/4000/p2p/relay/p2p-circuit/p2p/{A}"]
    served = dict(world.daemons["relay"].serves)
    world.daemons["relay"].serves.clear()
    await relay.close()
    await until(lambda: not a.registered)
    assert a.addresses == []
    world.daemons["relay"].serves.update(served)
    await until(lambda: a.registered)


@awaited
async def test_a_registration_is_attempted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seldom at last: a relay may be away for hours, and 2.0 ** 1024 is no number."""
    attempts: list[float] = []

    async def fails(self: Circuits, relay: str) -> None:
        attempts.append(asyncio.get_running_loop().time())
        raise Unreachable("away")

    monkeypatch.setattr(Circuits, "_registration", fails)
    with by_hand() as clock:
        circuits = Circuits(World().daemon(A), tls_of(KEYS[0]))
        circuits.register(["/ip4/127.0.0.1/tcp/1/p2p/away"])
        for _ in range(1100):
            await clock.passes(module.PING_S)
        await circuits.close()
    assert len(attempts) >= 1099
    assert attempts[1] - attempts[0] >= module.REGISTER_AGAIN_S


@plays(run)
async def test_a_relay_that_is_away_takes_no_other_s_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more relays than registrations at a time, those that answer are used, in whichever order they are given.
    What isn't wanted any more ends, at the relays too."""
    monkeypatch.setattr(module, "REGISTER_AGAIN_S", 0.05)
    await world.relay()
    a = await world.peer(0)
    away = [f"/ip4/127.0.0.1/tcp/1/p2p/away{number}" for number in range(RELAYS_MAX)]
    a.register([*away, *world.daemons["relay"].addresses])
    await until(lambda: a.registered)
    for number in range(RELAYS_MAX):
        await world.relay(f"relay{number}")
    everyone = [address for name, there in world.daemons.items() if "relay" in name for address in there.addresses]
    a.register(everyone)
    await until(lambda: len(a.registered) == RELAYS_MAX)
    await asyncio.sleep(0.2)
    assert len(a.registered) == RELAYS_MAX
    a.register(())
    await until(lambda: not any(A in relay._registered for relay in world.relays))
    assert (a.registered, a.addresses) == ({}, [])


@plays(run)
async def test_the_relays_in_a_peer_s_addresses_are_remembered(world: World) -> None:
    """With their own addresses, unless these are known. Anything else is ignored, and a later record replaces all.
    Peers without relays take no room, and with too many that have some the oldest is forgotten."""
    a = await world.peer(0)
    a._daemon.introduce("r2", ["/ip4/20.0.0.2/tcp/1/p2p/r2"])
    a.introduce(
        B,
        [
            f"/ip4/20.0.0.1/tcp/1/p2p/r1/p2p-circuit/p2p/{B}",
            f"/ip6/::1/tcp/1/p2p/r1/p2p-circuit/p2p/{B}",
            f"/ip4/66.0.0.2/tcp/1/p2p/r2/p2p-circuit/p2p/{B}",
            "/ip4/20.0.0.3/tcp/1/p2p/r3/p2p-circuit/p2p/another",
            f"/ip4/20.0.0.4/tcp/1/p2p/{A}/p2p-circuit/p2p/{B}",
            f"/ip4/20.0.0.5/tcp/1/p2p/{B}",
            "/p2p-circuit",
        ],
    )
    assert a.relays_of(B) == ("r1", "r2")
    assert a._daemon.known_at("r1") == ["/ip4/20.0.0.1/tcp/1/p2p/r1", "/ip6/::1/tcp/1/p2p/r1"]
    assert a._daemon.known_at("r2") == ["/ip4/20.0.0.2/tcp/1/p2p/r2"]
    a.introduce(B, [f"/ip4/20.0.0.5/tcp/1/p2p/{B}"])
    assert a.relays_of(B) == ()
    a.introduce(B, [f"/ip4/20.0.0.1/tcp/1/p2p/many{n}/p2p-circuit/p2p/{B}" for n in range(100)])
    assert len(a.relays_of(B)) == RELAYS_MAX
    assert len([relay for relay in a._daemon.known if relay.startswith("many")]) == RELAYS_MAX
    for number in range(PEERS_COUNTED_MAX + 5):
        a.introduce(f"plain{number}", [f"/ip4/20.0.0.1/tcp/1/p2p/plain{number}"])
        a.introduce(f"{number}", [f"/ip4/20.0.0.1/tcp/1/p2p/r/p2p-circuit/p2p/{number}"])
    assert len(a._relays_of) == PEERS_COUNTED_MAX
    assert (a.relays_of("0"), a.relays_of(f"{PEERS_COUNTED_MAX + 4}")) == ((), ("r",))


@plays(run)
async def test_the_relays_to_ask_are_the_peer_s_then_ours_then_linked_peers(world: World) -> None:
    """Each once, a few at most, and neither of the two ends."""
    await world.relay("ours")
    a = await world.peer(0)
    await world.registered(a, "ours")
    assert a.relays_to(B, ["linked", B, A, "more", "most"]) == ["ours", "linked", "more"]
    a.introduce(B, [f"/ip4/20.0.0.1/tcp/1/p2p/theirs/p2p-circuit/p2p/{B}"])
    assert a.relays_to(B, ["theirs", "linked"]) == ["theirs", "ours", "linked"]


@plays(run)
async def test_a_relay_that_lost_the_peer_makes_a_refusal(world: World) -> None:
    """Even if another relay only fails. A relay that merely doesn't reach it makes none, and one that refuses the dial
    itself neither: that relay has ended, and not the peer."""
    a, b, _ = await two(world)
    await world.relay("other")
    with pytest.raises(Unreachable) as caught:
        await a.open(KEYS[2].peer_id, ECHO, ["relay", "other", "none"])
    assert not caught.value.refused
    assert str(caught.value).count("relay can't reach it either") == 2
    del world.daemons[B]
    await b.close()
    await until(lambda: B not in world.relays[0]._registered)
    with pytest.raises(Unreachable, match=GONE) as caught:
        await a.open(B, ECHO, ["other", "relay"])
    assert caught.value.refused
