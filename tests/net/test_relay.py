"""What a relay does for whom, within which limits, who meets there, and that it ends in bounded time."""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial
from typing import Any

import msgpack
import pytest

from p2p_diloco.net import relay as module
from p2p_diloco.net.framing import Accepted, Frame, FrameStream, Message, Refused, encode
from p2p_diloco.net.hello import RunOf, any_run
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.relay import GONE, RELAY, RELAYED, Relay, asking
from tests.net.direct_peers import frames_on, next_frame
from tests.net.members import KEY, OTHER_KEY, id_of, invitation, membership
from tests.net.patience import plays, until
from tests.net.relays import AT_ONCE_S, ECHO, KEYS, World, heard, run


async def request(world: World, asker: str, **content: Any) -> tuple[Pipe, FrameStream]:
    """A peer's stream to the relay, with a request on it."""
    daemon = world.daemons.get(asker) or world.daemon(asker)
    pipe, _ = await daemon.open_stream("relay", RELAY, timeout_s=5.0)
    frames = frames_on(pipe)
    frames.write(Message(msgpack.packb(content)))
    return pipe, frames


def listens(world: World, name: str = "b") -> list[Pipe]:
    """A peer that keeps the streams that a relay opens to it."""
    streams = world.kept

    async def keep(peer: str, pipe: Pipe, seen_at: str) -> None:
        streams.append(pipe)
        while pipe.ended is None:
            await asyncio.sleep(0.01)

    world.daemon(name).serves[RELAYED] = keep
    return streams


async def answer(world: World, asker: str, **content: Any) -> Frame | None:
    """What the relay says to a request."""
    return await next_frame((await request(world, asker, **content))[1])


async def joined(world: World, asker: str = "a") -> tuple[Pipe, Pipe]:
    """Both ends of a relayed stream."""
    streams = world.kept if "b" in world.daemons else listens(world)
    count = len(streams)
    pipe, frames = await request(world, asker, open="b")
    await until(lambda: len(streams) > count)
    told = frames_on(streams[-1])
    assert await next_frame(told) == Message(msgpack.packb({"from": asker}))
    told.write(Message(b""))
    assert await next_frame(frames) == Message(b"")
    return pipe, told.pipe


@plays(run)
async def test_a_peer_with_a_rate_of_0_is_no_relay(world: World) -> None:
    """It refuses; it still dials back."""
    await world.relay(mbit=0)
    listens(world)
    for content in ({"open": "b"}, {"register": True}):
        assert await answer(world, "a", **content) == Refused("this peer is no relay")
    assert isinstance(await answer(world, "a", check=[]), Message)


@pytest.mark.parametrize(
    "bytes_",
    [encode(Accepted()), encode(Message(b"\xc1")), encode(Message(msgpack.packb({"open": 7}))), b"garbage", b""],
)
@plays(run)
async def test_what_is_no_request_ends_the_stream(world: World, monkeypatch: pytest.MonkeyPatch, bytes_: bytes) -> None:
    """With a refusal where the frame could be read; silence ends it at the deadline."""
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    await world.relay()
    pipe, _ = await world.daemon("a").open_stream("relay", RELAY, timeout_s=5.0)
    pipe.write(bytes_)
    await until(lambda: pipe.ended, AT_ONCE_S)


@plays(run)
async def test_the_streams_of_one_peer_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another peer isn't concerned, until all streams are in use; a stream that has ended makes room."""
    monkeypatch.setattr(module, "STREAMS_PER_PEER_MAX", 2)
    monkeypatch.setattr(module, "STREAMS_MAX", 3)
    relay = await world.relay()
    first, _ = await joined(world)
    await joined(world)
    full = Refused("this relay passes on too many streams already")
    assert await answer(world, "a", open="b") == full
    await joined(world, "c")
    assert await answer(world, "d", open="b") == full
    first.abort()
    await until(lambda: len(relay._joined) == 2)
    await joined(world)


def test_all_streams_together_keep_to_the_rate() -> None:
    """Two streams take as long as one with twice as many bytes, and a relay of twice the rate half as long."""
    count = 1 << 19

    def seconds(streams: int, mbit: float) -> float:
        times: list[float] = []

        async def test(world: World) -> None:
            await world.relay(mbit=mbit)
            ends = [await joined(world) for _ in range(streams)]
            began = time.monotonic()
            for here, _ in ends:
                here.write(bytes(count // streams))
            await asyncio.gather(*(heard(there, count // streams) for _, there in ends))
            times.append(time.monotonic() - began)

        run(test)
        return times[0]

    one, two, fast = seconds(1, 8.0), seconds(2, 8.0), seconds(1, 16.0)
    assert one > 0.8 * (count / 1e6 - module.BURST_S)
    assert 0.6 < two / one < 1.6
    assert 0.3 < fast / one < 0.8


# -- registered peers


async def registered(world: World, relay: Relay, name: str = "b") -> tuple[Pipe, FrameStream]:
    pipe, frames = await request(world, name, register=True)
    assert await next_frame(frames) == Message(b"")
    assert name in relay._registered
    return pipe, frames


async def reason(world: World, other: str) -> str:
    """Why a peer can't be reached through the relay."""
    refusal = await answer(world, "a", open=other)
    assert isinstance(refusal, Refused)
    return refusal.reason


@plays(run)
async def test_a_peer_that_was_registered_a_moment_ago_is_gone(world: World) -> None:
    """One that never was isn't, nor one that is registered, also by a newer connection: the older one may have broken
    unnoticed. After a while it's forgotten."""
    relay = await world.relay()
    assert "can't reach it" in await reason(world, "b")
    older, _ = await registered(world, relay)
    newer, _ = await registered(world, relay)
    await until(lambda: older.ended)
    await until(lambda: len(world.tasks) == 1)
    assert relay._gone == {}
    assert "can't reach it" in await reason(world, "b")
    newer.abort()
    await until(lambda: "b" not in relay._registered)
    assert await reason(world, "b") == GONE
    relay._gone["b"] -= module.GONE_S
    assert "can't reach it" in await reason(world, "b")
    again, _ = await registered(world, relay)
    assert relay._gone == {}
    again.abort()


@plays(run)
async def test_pings_are_answered_and_silence_ends_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that hangs is gone after the two deadlines."""
    monkeypatch.setattr(module, "PING_S", 0.2)
    monkeypatch.setattr(module, "PONG_S", 0.2)
    relay = await world.relay()
    pipe, frames = await registered(world, relay)
    for _ in range(3):
        frames.write(Message(b""))
        assert await next_frame(frames) == Message(b"")
    await until(lambda: pipe.ended, AT_ONCE_S)
    await until(lambda: "b" in relay._gone)


@plays(run)
async def test_a_full_table_refuses_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that are in it; what is remembered of the gone is bounded too."""
    monkeypatch.setattr(module, "PEERS_COUNTED_MAX", 1)
    relay = await world.relay()
    await registered(world, relay, "b")
    assert await answer(world, "c", register=True) == Refused("this relay is full")
    again, _ = await registered(world, relay, "b")
    again.abort()
    await until(lambda: relay._gone)
    other, _ = await registered(world, relay, "c")
    other.abort()
    await until(lambda: "c" not in relay._registered)
    assert list(relay._gone) == ["b"]
    relay._gone["b"] -= module.GONE_S  # it's over, and makes room
    other, _ = await registered(world, relay, "c")
    other.abort()
    await until(lambda: list(relay._gone) == ["c"], AT_ONCE_S)


@plays(run)
async def test_a_flood_of_pings_takes_no_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that reads no answers is dropped at a deadline, and doesn't fill the relay's buffers meanwhile."""
    monkeypatch.setattr(module, "PONG_S", 0.5)
    relay = await world.relay()
    pipe, _ = await registered(world, relay)
    there = relay._registered["b"]
    pipe.transport.pause_reading()
    flood, most = encode(Message(b"")) * 10_000, 0
    for _ in range(200):
        pipe.write(flood)
        await asyncio.sleep(0.001)
        most = max(most, there.transport.get_write_buffer_size())
    await until(lambda: "b" not in relay._registered, AT_ONCE_S)
    assert most < 1 << 20


# -- dialling back


@plays(run)
async def test_few_requests_at_a_time_are_dialled_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are refused at once; afterwards there is room again."""
    monkeypatch.setattr(module, "CHECKS_MAX", 1)
    monkeypatch.setattr(module, "CHECKS_WAITING_MAX", 2)
    leave, dialled = asyncio.Event(), list[str]()

    async def dial_back(peer: str, seen_at: str, addresses: list[str], budget: object) -> dict[str, str | None]:
        dialled.append(peer)
        await leave.wait()
        return dict.fromkeys(addresses)

    monkeypatch.setattr(module, "dial_back", dial_back)
    relay = await world.relay()
    first = await request(world, "a", check=["x", 7])
    second = await request(world, "b", check=[])
    await until(lambda: len(relay._checked) == 2)
    busy = Refused("this peer dials too many others back already")
    for asker in ("a", "c"):
        assert await answer(world, asker, check=[]) == busy
    assert dialled == ["a"]
    leave.set()
    told = await next_frame(first[1])
    assert isinstance(told, Message)
    assert msgpack.unpackb(told.header) == {"seen": "/ip4/127.0.0.1/tcp/4001", "reached": {"x": None}}
    assert isinstance(await next_frame(second[1]), Message)
    assert isinstance(await answer(world, "c", check=[]), Message)


# -- who meets there


A, B = KEYS[0].peer_id, KEYS[1].peer_id
REFUSED = Refused("not a member of this run")
MINE, THEIRS = invitation(), invitation(key=OTHER_KEY)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.1)


HERE_ONLY = partial(any_run, among=frozenset([KEY.public]))


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(
    ("run_of", "opener", "other", "meet"),
    [
        (any_run, MINE, invitation(name="bob"), True),
        (HERE_ONLY, MINE, invitation(name="bob"), True),
        (any_run, MINE, THEIRS, False),
        (any_run, MINE, None, False),
        (any_run, None, MINE, False),
    ],
    ids=["one run", "at their own relay", "two runs", "to open", "from open"],
)
@plays(run)
async def test_only_members_of_one_run_meet(
    world: World, run_of: RunOf, opener: Invitation | None, other: Invitation | None, meet: bool, registered: bool
) -> None:
    """Whether the other peer is registered at the relay, or the relay dials it. If one is a member of another run, or
    of none, no byte reaches the other's handler."""
    await world.relay(run_of=run_of)
    await world.peer(0, opener)
    b = await world.peer(1, other)
    if registered:
        await world.registered(b)
    if meet:
        pipe, found_at = await world.circuits[0].open(B, ECHO, ["relay"])
        world.pipes.append(pipe)
        assert found_at.endswith("/p2p/relay/p2p-circuit")
        pipe.write(b"hello")
        assert await heard(pipe, 5) == b"hello"
    else:
        with pytest.raises(Unreachable) as error:
            await world.circuits[0].open(B, ECHO, ["relay"])
        assert not error.value.refused
    assert world.heard == [(B, A, b"hello")] * meet


@plays(run)
async def test_a_peer_of_a_private_run_hears_only_members_through_any_relay(world: World) -> None:
    """A relay that passes on a stranger's stream, or shows a member's certificate beside a stranger's id, gets nothing
    from the peer: neither an answer nor a handshake."""
    await world.peer(1, MINE)
    evil = world.daemon("relay")
    for told in ({"from": A}, {"from": A, "member": membership(A, THEIRS).chain}, {"from": A, "member": b""},
                 {"from": A, "member": membership(id_of("c")).chain}, {"from": A, "member": 1}):  # fmt: skip
        pipe, _ = await evil.open_stream(B, RELAYED, timeout_s=5.0)
        frames = frames_on(pipe)
        frames.write(asking(told, None))
        frames.write(Message(b"whatever"))
        assert await next_frame(frames) is None


@plays(run)
async def test_a_restricted_relay_serves_strangers_with_nothing(world: World) -> None:
    """It neither opens nor dials, and its answer is the same for all."""
    await world.relay(run_of=HERE_ONLY)
    await world.peer(1, MINE)
    relay, asker = world.daemons["relay"], world.daemon(A)
    strange: list[Any] = [None, membership(A, THEIRS).chain, membership(id_of("c")).chain, b"x", 7]
    for shown, content in itertools.product(strange, ({"open": B}, {"register": True}, {"check": []}, {"ping": True})):
        pipe, _ = await asker.open_stream("relay", RELAY, timeout_s=5.0)
        frames = frames_on(pipe)
        frames.write(asking(content, shown))
        assert await next_frame(frames) == REFUSED
    assert relay.opened == 0
