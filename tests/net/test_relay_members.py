"""A relay passes on between members of one private run, or between peers of open runs; no other pair meets there."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from p2p_diloco.net import relay as module
from p2p_diloco.net.framing import FrameStream, Message, Refused
from p2p_diloco.net.hello import RunOf, any_run
from p2p_diloco.net.interface import Limits, Traffic, Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.relay import RELAY, RELAYED, asking
from tests.net.members import KEY, OTHER_KEY, id_of, invitation, membership, revocation
from tests.net.patience import plays, until
from tests.net.relays import ECHO, KEYS, World, heard, run

A, B = KEYS[0].peer_id, KEYS[1].peer_id
REFUSED = Refused("not a member of this run")
MINE, THEIRS = invitation(), invitation(key=OTHER_KEY)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.1)


async def echoed(world: World, opener: int = 0, other: str = B) -> None:
    """A peer opens a stream to another through the relay, and hears its own bytes back."""
    pipe, found_at = await world.circuits[opener].open(other, ECHO, ["relay"])
    world.pipes.append(pipe)
    assert found_at.endswith("/p2p/relay/p2p-circuit")
    pipe.write(b"hello")
    assert await heard(pipe, 5) == b"hello"


@pytest.mark.parametrize(
    "run_of", [any_run, partial(any_run, among=frozenset([KEY.public]))], ids=["any run", "this run only"]
)
@pytest.mark.parametrize("registered", [True, False])
@plays(run)
async def test_members_of_one_run_meet(world: World, run_of: RunOf, registered: bool) -> None:
    """Whether the other peer is registered at the relay, or the relay dials it."""
    await world.relay(run_of=run_of)
    await world.peer(0, MINE)
    b = await world.peer(1, invitation(name="bob"))
    if registered:
        await world.registered(b)
    await echoed(world)
    assert world.heard == [(B, A, b"hello")]


@pytest.mark.parametrize(
    ("opener", "other"), [(MINE, THEIRS), (MINE, None), (None, MINE)], ids=["two runs", "to open", "from open"]
)
@pytest.mark.parametrize("registered", [True, False])
@plays(run)
async def test_others_do_not_meet(
    world: World, opener: Invitation | None, other: Invitation | None, registered: bool
) -> None:
    """Members of two runs, or a member and a peer of an open run: no byte reaches the other peer's handler."""
    await world.relay()
    await world.peer(0, opener)
    b = await world.peer(1, other)
    if registered:
        await world.registered(b)
    with pytest.raises(Unreachable) as error:
        await echoed(world)
    assert not error.value.refused
    assert world.heard == []


@plays(run)
async def test_a_peer_of_a_private_run_hears_only_members_through_any_relay(world: World) -> None:
    """A relay that passes on a stranger's stream, or shows a member's certificate beside a stranger's id, gets nothing
    from the peer: neither an answer nor a handshake."""
    await world.peer(1, MINE)
    evil = world.daemon("relay")
    for told in ({"from": A}, {"from": A, "member": membership(A, THEIRS).chain}, {"from": A, "member": b""},
                 {"from": A, "member": membership(id_of("c")).chain}, {"from": A, "member": 1}):  # fmt: skip
        pipe, _ = await evil.open_stream(B, RELAYED, timeout_s=5.0)
        frames = FrameStream(pipe, B, Limits(), Traffic())
        frames.write(asking(told, None))
        frames.write(Message(b"whatever"))
        assert await frames.read(idle_s=30.0, frame_s=30.0) is None


@plays(run)
async def test_a_restricted_relay_serves_strangers_with_nothing(world: World) -> None:
    """It neither opens nor dials, and its answer is the same for all."""
    await world.relay(run_of=partial(any_run, among=frozenset([KEY.public])))
    await world.peer(1, MINE)
    relay, asker = world.daemons["relay"], world.daemon(A)
    strange: list[Any] = [None, membership(A, THEIRS).chain, membership(id_of("c")).chain, b"x", 7]
    for shown, content in itertools.product(strange, ({"open": B}, {"register": True}, {"check": []}, {"ping": True})):
        pipe, _ = await asker.open_stream("relay", RELAY, timeout_s=5.0)
        frames = FrameStream(pipe, "relay", Limits(), Traffic())
        frames.write(asking(content, shown))
        assert await frames.read(idle_s=30.0, frame_s=30.0) == REFUSED
    assert relay.opened == 0


@plays(run)
async def test_a_revoked_member_is_refused_by_the_peers_it_seeks(world: World) -> None:
    """A bootstrap knows of no revocations, so the peers themselves refuse."""
    await world.relay()
    banned = invitation()
    await world.peer(0, banned)
    await world.peer(1, MINE)
    assert world.hellos[1].revoke(revocation(banned))
    with pytest.raises(Unreachable):
        await echoed(world)
    assert world.heard == []
    await until(lambda: not world.relays[0]._joined)
