"""A private run over real daemons: members exchange as in an open run, and a stranger reads and changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.framing import VERSION, Bulk, Message, Refused
from p2p_diloco.net.hivemind import DIRECT
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.relay import RELAY, RELAYED
from tests.net.attacker import attacker
from tests.net.members import OTHER_KEY, id_of, invitation, membership, revocation
from tests.net.patience import awaited, until
from tests.net.swarm import Box, join

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("no_daemon_is_left")]

STREAMS = f"/p2p-diloco/{VERSION}/real"
REFUSED = Refused("not a member of this run")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers have less time to read the refusal."""
    for module in ("hello", "relay"):
        monkeypatch.setattr(f"p2p_diloco.net.{module}.LINGER_S", 0.2)


async def two(*given: Invitation | None) -> tuple[list[Any], list[Box]]:
    """Peers of the run "real", the first of which the others join."""
    boxes, peers = [Box() for _ in given], list[Any]()
    for box, invited in zip(boxes, given, strict=True):
        peers.append(await join(box, invitation=invited, initial_peers=peers[0].addresses() if peers else []))
    return peers, boxes


async def closed(*transports: Any) -> None:
    for transport in reversed(transports):
        await transport.close()


@awaited
async def test_members_exchange_messages_and_payloads() -> None:
    """In both directions, and each knows the other's name."""
    (a, b), boxes = await two(invitation(), invitation(name="bob"))
    for sender, receiver, box in ((a, b, boxes[1]), (b, a, boxes[0])):
        await sender.send(receiver.peer_id, b"hello")
        await sender.send(receiver.peer_id, b"bulk", memoryview(bytes(1 << 20)))
        assert [box.headers.get_nowait() for _ in range(2)] == [b"hello", b"bulk"]
        assert sender.traffic.ways() == {receiver.peer_id: "direct"}
    assert (a.member(b.peer_id).name, b.member(a.peer_id).name) == ("bob", "alice")
    await closed(a, b)


@awaited
async def test_a_peer_without_an_invitation_to_this_run_exchanges_nothing() -> None:
    """Whether it has none or another run's, and whichever of the two dials; the member takes the other for dead."""
    (a, *others), boxes = await two(invitation(), None, invitation(key=OTHER_KEY))
    for other in others:
        for payload in (None, memoryview(bytes(1000))):
            with pytest.raises(Exception, match="not a member of this run"):
                await other.send(a.peer_id, b"hello", payload)
            with pytest.raises(Unreachable):
                await a.send(other.peer_id, b"hello", payload)
    assert boxes[0].headers.empty()
    await closed(a, *others)


def hello_of(victim: Any) -> list[bytes]:
    """Certificates that a stranger may have: none, stolen ones, one of another run."""
    stolen, other = membership(id_of("x")).chain, membership(id_of("x"), invitation(key=OTHER_KEY)).chain
    return [b"", b"?" + stolen, b"!" + stolen, b"?" + other, b"!" + victim.membership.chain]


@awaited
async def test_a_stranger_is_told_one_text_on_every_stream() -> None:
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
    assert box.headers.empty()
    assert not victim._exchange.direct.listener._knocks
    await closed(victim)


@awaited
async def test_a_revoked_member_loses_its_connections_at_once() -> None:
    """Its link and its direct connections end; what it sends later is refused. The other member notices nothing."""
    banned = invitation(name="mallory")
    (a, mallory, c), boxes = await two(invitation(), banned, invitation(name="carol"))
    for sender in (mallory, c):
        await sender.send(a.peer_id, b"hello")
        await sender.send(a.peer_id, b"bulk", memoryview(bytes(1000)))
    await a.send(mallory.peer_id, b"hello")
    assert a.revoke(revocation(banned))
    theirs = [pipe for pipe, peer in a._exchange.streams.pipes.items() if peer == mallory.peer_id]
    assert [pipe.ended is None for pipe in theirs] == [False] * len(theirs) != []
    assert await asyncio.wait_for(boxes[0].closed_peers.get(), 20.0) == mallory.peer_id
    for payload in (None, memoryview(bytes(1000))):
        await until(lambda: not mallory._exchange.links.peers(), 20.0)
        with pytest.raises(Exception, match="not a member of this run"):
            await mallory.send(a.peer_id, b"again", payload)
        with pytest.raises(Unreachable, match="not a member") as error:
            await a.send(mallory.peer_id, b"again", payload)
        assert error.value.refused
    await c.send(a.peer_id, b"fine")
    assert [boxes[0].headers.get_nowait() for _ in range(5)] == [b"hello", b"bulk", b"hello", b"bulk", b"fine"]
    await closed(a, mallory, c)


@awaited
async def test_an_invitation_that_has_expired_is_a_config_error() -> None:
    """The daemon that was started by then ends."""
    with pytest.raises(ConfigError, match="has expired"):
        await join(invitation=invitation(life_s=-1.0))
