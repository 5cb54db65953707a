"""A private run over real daemons: members exchange as in an open run, also under a flood, and a stranger reads and
changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgpack
import pytest

from p2p_diloco.net.framing import VERSION, Bulk, Message, Refused
from p2p_diloco.net.hello import PENDING_MAX
from p2p_diloco.net.hivemind import DIRECT
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.relay import RELAY, RELAYED
from tests.net.attacker import attacker
from tests.net.inboxes import Box
from tests.net.members import OTHER_KEY, id_of, invitation, membership, revocation
from tests.net.patience import until
from tests.net.swarm import Join, real

STREAMS = f"/p2p-diloco/{VERSION}/real"
REFUSED = Refused("not a member of this run")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers have less time to read the refusal."""
    for module in ("hello", "relay"):
        monkeypatch.setattr(f"p2p_diloco.net.{module}.LINGER_S", 0.2)


def hello_of(victim: Any) -> list[bytes]:
    """Certificates that a stranger may have: none, stolen ones, one of another run."""
    stolen, other = membership(id_of("x")).chain, membership(id_of("x"), invitation(key=OTHER_KEY)).chain
    return [b"", b"?" + stolen, b"!" + stolen, b"?" + other, b"!" + victim.membership.chain]


@real
async def test_a_stranger_is_told_one_text_on_every_stream(join: Join) -> None:
    """On links, for payloads, offers of direct connections, relays and dial-backs: the inbox sees nothing, no payload
    is read, no offer is made, nothing is dialled."""
    box = Box()
    victim = await join(box, invitation=invitation())
    said = [Message(b"fetch"), Bulk(b"contribution", 10), Message(b"")]
    async with attacker(victim) as stranger:
        for protocol in (STREAMS, STREAMS + DIRECT):
            for frame in said:
                assert await stranger.told(protocol, frame) == [REFUSED]
            for shown in hello_of(victim):
                assert await stranger.told(protocol, Message(shown), *said) == [REFUSED]
        me = stranger.daemon.peer_id
        requests = [{"open": me}, {"register": True}, {"ping": True}, {"check": ["/ip4/127.0.0.1/tcp/22"]}]
        for request in (*requests, *({**r, "member": victim.membership.chain} for r in requests)):
            assert await stranger.told(RELAY, Message(msgpack.packb(request))) == [REFUSED]
        for shown in (None, membership(id_of("x")).chain):
            told = {"from": "x"} if shown is None else {"from": me, "member": shown}
            assert await stranger.told(RELAYED, Message(msgpack.packb(told)), Message(b"")) == []
    assert box.got == []
    assert not victim._exchange.direct.listener._knocks


@real
async def test_a_revoked_member_loses_its_connections_at_once(join: Join) -> None:
    """Its link and its direct connections end; what it sends later is refused. The other member notices nothing."""
    banned, box = invitation(name="mallory"), Box()
    a = await join(box, invitation=invitation())
    mallory = await join(invitation=banned, initial_peers=a.addresses())
    c = await join(invitation=invitation(name="carol"), initial_peers=a.addresses())
    for sender in (mallory, c):
        await sender.send(a.peer_id, b"hello")
        await sender.send(a.peer_id, b"bulk", memoryview(bytes(1000)))
        assert sender.traffic.ways() == {a.peer_id: "direct"}
    await a.send(mallory.peer_id, b"hello")
    assert (a.member(c.peer_id).name, c.member(a.peer_id).name) == ("carol", "alice")
    assert a.revoke(revocation(banned))
    theirs = [pipe for pipe, peer in a._exchange.streams.pipes.items() if peer == mallory.peer_id]
    assert [pipe.ended is None for pipe in theirs] == [False] * len(theirs) != []
    await until(lambda: box.closed_peers[:1] == [mallory.peer_id], 20.0)
    for payload in (None, memoryview(bytes(1000))):
        await until(lambda: not mallory._exchange.links.peers(), 20.0)
        with pytest.raises(Exception, match="not a member of this run"):
            await mallory.send(a.peer_id, b"again", payload)
        with pytest.raises(Unreachable, match="not a member") as error:
            await a.send(mallory.peer_id, b"again", payload)
        assert error.value.refused
    await c.send(a.peer_id, b"fine")
    assert box.headers == [b"hello", b"bulk", b"hello", b"bulk", b"fine"]


# -- a flood

FLOODS = [
    (STREAMS, Message(b"?" + bytes(900)), Bulk(b"contribution", 1 << 30)),
    (STREAMS + DIRECT,),
    (RELAY, Message(msgpack.packb({"register": True}))),
    (RELAYED, Message(msgpack.packb({"from": "x"})), Message(b"")),
]
"""The protocol and the frames of each connection's flood: bytes that are no certificate, silence, requests to relay."""
FLOOD_S = 2.0


async def watch(victim: Any, most: list[int]) -> None:
    """Note how many streams are pending, again and again."""
    while True:
        for guard in (victim._hellos, victim._relay, victim._circuits):
            most.append(len(guard._pending))
        await asyncio.sleep(0.005)


@real
async def test_members_exchange_under_a_flood(join: Join) -> None:
    """Every message and payload arrives, also those of a member that joins meanwhile; no link or registration goes to a
    stranger, and no more streams are pending than are allowed."""
    boxes = [Box() for _ in range(3)]
    a = await join(boxes[0], invitation=invitation())
    b = await join(boxes[1], invitation=invitation(name="bob"), initial_peers=a.addresses())
    most, exchanged, floods = list[int](), 0, list[asyncio.Task[int]]()
    async with contextlib.AsyncExitStack() as strangers:
        for protocol, *said in FLOODS:
            stranger = await strangers.enter_async_context(attacker(a))
            floods += [asyncio.create_task(stranger.flood(protocol, *said)) for _ in range(4)]
        watching = asyncio.create_task(watch(a, most))
        c = await join(boxes[2], invitation=invitation(name="carol"), initial_peers=a.addresses())
        over = time.monotonic() + FLOOD_S
        while time.monotonic() < over or exchanged < 3:
            for member in (b, c):
                await member.send(a.peer_id, b"bulk", memoryview(bytes(1 << 20)))
                await a.send(member.peer_id, b"hello")
            exchanged += 1
        assert a._relay._registered == {}
        assert set(a._exchange.receiver._links) <= {b.peer_id, c.peer_id}
        for task in (*floods, watching):
            task.cancel()
        opened = [await flood for flood in floods]
    assert min(sum(opened[at : at + 4]) for at in range(0, len(opened), 4)) > 0
    assert max(most) <= PENDING_MAX
    assert [len(box.got) for box in boxes] == [2 * exchanged, exchanged, exchanged]
