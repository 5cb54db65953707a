"""Which peers found a private run, what a peer without an invitation is told, and how revocations reach the members."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import Refused
from p2p_diloco.net.membership import Membership, SealedRecords
from p2p_diloco.node import board, privacy, run_record
from p2p_diloco.node.shared import Setup
from tests.net.members import ADDRESS, KEY, OTHER_KEY, id_of, invitation, membership
from tests.net.memory import DeafInbox, MemoryNetwork, MemoryTransport
from tests.net.patience import awaited, until
from tests.node.conftest import specs

NEAR = ADDRESS.replace("192.0.2.1", "127.0.0.1")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "FOUNDERS_MEET_S", 0.05)
    monkeypatch.setattr(board, "LOOK_EVERY_S", 0.01)


def join(network: MemoryNetwork, name: str) -> MemoryTransport:
    return network.join(name, DeafInbox())


def setup(model: bool = True, **local: Any) -> Setup:
    return Setup(RunConfig(), PeerConfig(run_id="r", **local), specs(4) if model else None)


@pytest.mark.parametrize(
    ("local", "private"),
    [
        ({"initial_peers": [ADDRESS], "found": True}, True),
        ({"initial_peers": [ADDRESS]}, False),
        ({"host_maddrs": ["/ip4/0.0.0.0/tcp/0"]}, True),
        ({"announce_maddrs": ["/ip4/192.0.2.1/tcp/1"]}, True),
        ({"initial_peers": [ADDRESS], "found": True, "open": True}, False),
        ({"initial_peers": [ADDRESS], "found": True, "role": "aggregator", "model": False}, False),
        ({}, False),
        (
            {"initial_peers": [ADDRESS.replace("192.0.2.1", "127.0.0.1")], "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]},
            False,
        ),
    ],
)
@awaited
async def test_a_run_that_other_machines_can_reach_is_private(local: dict[str, Any], private: bool) -> None:
    """Unless it shall be open. A run on loopback alone is open. A peer that trains nothing, or is not told to found the
    run, founds none."""
    assert await privacy.founds_privately(setup(**local), join(MemoryNetwork(), "a")) is private


@awaited
async def test_a_run_of_that_name_is_not_founded_again() -> None:
    """Not if it is open; and if it is private, the peer is told to ask for an invitation."""
    network = MemoryNetwork()
    await run_record.BOARD.store(join(network, "open"), "r", b"the record of an open run")
    newcomer = join(network, "newcomer")
    assert not await privacy.founds_privately(setup(initial_peers=[ADDRESS]), newcomer)
    await privacy.claim(join(network, "founder"), "r", KEY.public)
    with pytest.raises(Refused, match=r"run_id=r is the name of a private run; ask for an invitation.*--invite r"):
        await privacy.founds_privately(setup(initial_peers=[ADDRESS]), newcomer)


@awaited
async def test_of_two_founders_at_once_one_is_told_to_ask_for_an_invitation() -> None:
    """The one with the lowest public key goes on."""
    network = MemoryNetwork()
    keys = sorted([KEY, OTHER_KEY], key=lambda key: key.public)
    claims = [privacy.claim(join(network, str(place)), "r", key.public) for place, key in enumerate(keys)]
    first, second = await asyncio.gather(*claims, return_exceptions=True)
    assert first is None
    assert isinstance(second, Refused)
    assert "ask that peer's user for an invitation" in second.sentence


@awaited
async def test_a_notice_is_kept_while_members_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows the public key and nothing else."""
    monkeypatch.setattr(privacy, "NOTICE_EVERY_S", 0.01)
    network = MemoryNetwork()
    keeping = asyncio.create_task(privacy.keep_notice(join(network, "a"), "r", KEY.public))
    await until(lambda: bool(network.records.get("r/private")))
    keeping.cancel()
    [(name, (value, expires))] = network.records["r/private"].items()
    assert name[1] == "", "no peer owns it, so it shows no peer's id"
    assert KEY.public in value
    assert len(value) < 64
    assert expires > time.time() + privacy.NOTICES.ttl_s - 1


def member(network: MemoryNetwork, name: str, role: str = "worker") -> tuple[Membership, SealedRecords]:
    mine = membership(id_of(name), invitation(role, name))
    return mine, SealedRecords(join(network, id_of(name)), mine)


@awaited
async def test_a_revocation_reaches_all_members_and_ends_the_revoked_one() -> None:
    """The others refuse its certificate from then on."""
    network = MemoryNetwork()
    (alice, a), (bob, b), (_, c) = (member(network, name) for name in ("alice", "bob", "carol"))
    watching = [asyncio.create_task(privacy.watch_revocations(dht, "r", who)) for dht, who in ((a, alice), (b, bob))]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in watching)
    await privacy.REVOCATIONS.store(c, "r", KEY.sign_revocations(1, [bob.own.id]))
    with pytest.raises(Refused, match="invite=bob was revoked; ask for a new invitation"):
        await asyncio.wait_for(watching[1], 5)
    await until(lambda: alice.banned == {bob.own.id})
    assert not watching[0].done()
    watching[0].cancel()


@awaited
async def test_an_observer_takes_revocations_and_stores_none(caplog: pytest.LogCaptureFixture) -> None:
    """Its invitation allows only to read, so it doesn't try; nothing is warned of."""
    network = MemoryNetwork()
    (eve, watching), (_, carol) = member(network, "eve", "observer"), member(network, "carol")
    await privacy.REVOCATIONS.store(carol, "r", KEY.sign_revocations(1, [b"12345678"]))
    task = asyncio.create_task(privacy.watch_revocations(watching, "r", eve))
    await until(lambda: eve.banned == {b"12345678"})
    await asyncio.sleep(0.05)  # some looks later
    task.cancel()
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


@awaited
async def test_a_peer_ends_when_its_invitation_expires() -> None:
    """It says why; the others would only turn it away."""
    alice = membership(id_of("alice"), invitation(life_s=2.0))
    dht = join(MemoryNetwork(), id_of("alice"))
    with pytest.raises(Refused, match="invite=alice has expired; ask for a new invitation"):
        await privacy.watch_revocations(SealedRecords(dht, alice), "r", alice)


@awaited
async def test_members_keep_a_revocation_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that comes when all copies were lost finds it; a forged one is ignored."""
    monkeypatch.setattr(board, "KEEP_EVERY_S", 60.0)
    network = MemoryNetwork()
    (alice, a), (bob, b) = (member(network, name) for name in ("alice", "bob"))
    alice.revoke(KEY.sign_revocations(1, [b"12345678"]))
    watching = asyncio.create_task(privacy.watch_revocations(a, "r", alice))
    await until(lambda: bool(network.records))
    network.records.clear()
    await privacy.REVOCATIONS.store(b, "r", OTHER_KEY.sign_revocations(9, [alice.own.id]))
    while not bob.banned:
        await privacy.read_revocations(b, "r", bob)
        await asyncio.sleep(0.01)
    assert bob.banned == {b"12345678"}
    assert not watching.done()
    watching.cancel()
