"""A private run: who founds it, how members find it, train in it and leave, and how revocations reach them. Nothing of
theirs is readable in the DHT."""

from __future__ import annotations

import asyncio
import gzip
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import GaveUpWaiting, Refused
from p2p_diloco.net.membership import Membership, SealedRecords
from p2p_diloco.node import board, observing, privacy, records, run_record
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.run import Run
from p2p_diloco.node.run_record import RunRecord, signature_of
from p2p_diloco.node.shared import Setup
from p2p_diloco.node.swarm import invited_through
from p2p_diloco.tensors.layout import Layout
from tests.net.members import ADDRESS, KEY, OTHER_KEY, id_of, invitation, membership
from tests.net.memory import DeafInbox, MemoryNetwork, MemoryTransport
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, entered, exchange, specs, stop

GRANTS: dict[str, bytes] = {}
"""By which grant each peer was admitted."""


class PrivatePeer(MemoryPeer):
    """A node with an invitation; `founds`: it has the run key, too."""

    def __init__(self, network: MemoryNetwork, name: str, *, founds: bool = False, **options: Any) -> None:
        peer = id_of(name)
        super().__init__(network, peer, dict(QUICK), **options)
        self.invited = invitation()
        self.access = Access(membership(peer, self.invited), KEY if founds else None)
        GRANTS[peer] = self.access.member.own.id
        self.inbox.grant_of = lambda peer: GRANTS.get(peer, peer)
        plain = self.transport
        names = ("peer_id", "store", "fetch", "sign", "signed_by")
        dht = SimpleNamespace(**{name: getattr(plain, name) for name in names})
        sealed = SealedRecords(dht, self.access.member)
        plain.store, plain.fetch = sealed.store, sealed.fetch  # type: ignore[method-assign]


@awaited
async def test_members_train_together_and_the_dht_shows_nothing() -> None:
    """The founder has the run key, the others don't; no key, name or value of the run can be read."""
    network = MemoryNetwork()
    a, b = PrivatePeer(network, "a", founds=True), PrivatePeer(network, "b")
    await a.enter(theta=1.0)
    await b.enter(theta=99.0)
    assert b.memory.theta.tolist() == a.memory.theta.tolist()
    for _ in range(2):
        await asyncio.gather(a.exchange(1.0), b.exchange(3.0))
    digests = [(await peer.ask("ask", "told"))["versions"] for peer in (a, b)]
    assert digests[0] == digests[1]
    assert len(network.records) >= 2
    for key, stored in network.records.items():
        assert not key.startswith("r/")
        for (_, _), (value, _) in stored.items():
            assert b"sync_every" not in value
            assert b"training" not in value


@awaited
async def test_a_history_has_no_secrets(tmp_path: Path) -> None:
    """Neither the files of a private run's peers nor what is compressed in them have the members' secret, the seed of
    a grant, the run key, the run's token, or an address."""
    network, config = MemoryNetwork(), {"history_path": tmp_path}
    peers = [PrivatePeer(network, "a", founds=True, **config), PrivatePeer(network, "b", **config)]
    for peer in peers:
        await peer.enter()
    for _ in range(3):
        await exchange(*peers)
    secrets = [peers[0].node._run.token, KEY._seed, *(s for p in peers for s in (p.invited.seed, p.invited.secret))]
    secrets.append(membership(id_of("a")).token_salt)
    await stop(*peers)
    first, second = (path.read_bytes() for path in tmp_path.glob("r/*"))
    for content in (first, second, gzip.decompress(first), gzip.decompress(second)):
        assert not any(form in content for secret in secrets for form in (secret, secret.hex().encode()))
        assert b"/memory/" not in content
    assert b"Slice" in gzip.decompress(first)


@awaited
async def test_a_peer_without_the_run_key_founds_nothing() -> None:
    """It waits for a worker that has the key, and says so."""
    peer = PrivatePeer(MemoryNetwork(), "b", wait_timeout=0.5)
    await peer.start()
    with pytest.raises(GaveUpWaiting):
        await peer.hear("run")
    assert any("a worker that has the run key" in str(message.get("text")) for message in peer.said)


@awaited
async def test_a_member_cannot_replace_the_runs_record(caplog: pytest.LogCaptureFixture) -> None:
    """A record that the run key did not sign is left out, even if its name is lower, and so is junk, with a line in the
    log. A member, or one that was revoked, can store them beside the run's record, also while no peer is up."""
    network = MemoryNetwork()
    mallory = PrivatePeer(network, "mallory")
    layout = Layout.build(specs(4), 1, "contiguous", None)
    stored = [b"\xc1" * 900, msgpack.packb([1, 2])]
    for outer_lr in (0.1, 0.2, 0.3, 0.4, 0.5):  # five names: one of them is probably the lowest
        run = Run("r", RunConfig(**{**QUICK, "outer_lr": outer_lr}), layout)
        stored.append(RunRecord.founding(run, id_of("mallory"), 0.0).pack())
    for value in stored:
        assert await run_record.BOARD.store(mallory.transport, "r", value)
    a, b = PrivatePeer(network, "a", founds=True), PrivatePeer(network, "b")
    await a.enter()
    await b.enter()
    assert [peer.told_run["config"]["outer_lr"] for peer in (a, b)] == [QUICK["outer_lr"]] * 2
    await stop(a, b)
    assert "a record of the run r is left out: the run key did not sign it" in caplog.text


def test_what_members_alone_know_and_sign() -> None:
    # A signed record holds for its run and content only. The signature covers the run's name and every byte of
    # the record.
    layout = Layout.build(specs(4), 1, "contiguous", None)
    record = RunRecord.founding(Run("r", RunConfig(), layout), "a", 1.0)
    access = Access(membership(id_of("a")), KEY)
    value = access.signed("r", record)
    assert RunRecord.unpack(value) == record
    assert access.founded_by_the_key("r", value)
    assert not access.founded_by_the_key("other", value)
    assert not access.founded_by_the_key("r", record.pack())
    changed = RunRecord.founding(Run("r", RunConfig(), layout), "a", 2.0).pack()
    forged = msgpack.packb([signature_of(changed)[0], signature_of(value)[1]])
    assert not access.founded_by_the_key("r", forged)
    assert not Access(membership(id_of("a"), invitation(key=OTHER_KEY))).founded_by_the_key("r", value)
    assert signature_of(record.pack())[1] == b""

    # The token is a secret of the members. A stranger that knows name, settings and model can't compute it; an
    # open run's token is as before.
    layout = Layout.build(specs(4), 1, "contiguous", None)
    salted = Run("r", RunConfig(), layout, membership(id_of("a")).token_salt)
    assert salted.token == Run("r", RunConfig(), layout, membership(id_of("b")).token_salt).token
    assert salted.token != Run("r", RunConfig(), layout).token

    # An invitation names addresses that other machines may reach. Only a machine without a network names those
    # that no other machine reaches.
    here, near, bootstrap = "/ip4/127.0.0.1/tcp/1/p2p/a", "/ip4/10.0.0.5/tcp/1/p2p/a", "/ip4/10.0.0.9/tcp/1/p2p/b"
    assert invited_through([bootstrap], [here, near]) == [bootstrap, near]
    assert invited_through([], [here, near]) == [near]
    assert invited_through([], [here]) == [here]


@awaited
async def test_a_revoked_invitation_ends_a_reader_at_once() -> None:
    """The list of revocations in the DHT is read before anything is waited for, whether or not a peer is there."""
    network = MemoryNetwork()
    a = PrivatePeer(network, "a", founds=True)
    reader = PrivatePeer(network, "reader")
    access = reader.access
    assert access is not None
    await privacy.refuse_if_out(reader.transport, "r", access.member)
    revoked = KEY.sign_revocations(1, [access.member.own.id])
    assert await privacy.REVOCATIONS.store(a.transport, "r", revoked)
    with pytest.raises(Refused, match="invite=alice was revoked"):
        await privacy.refuse_if_out(reader.transport, "r", access.member)


@awaited
async def test_a_reader_does_not_wait_for_a_run_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with one sentence, soon; a run that a peer takes part in is read."""
    monkeypatch.setattr(observing, "PEERS_S", 0.1)
    monkeypatch.setattr(records, "PUBLISH_EVERY_S", 0.1)
    network = MemoryNetwork()
    reader = network.join("reader", Inbox())
    with pytest.raises(GaveUpWaiting, match=r"no peer of the run r is there; start one, .*--checkpoint"):
        await observing._refuse_without_peers(reader, "r")
    await entered("a", network=network)
    monkeypatch.setattr(observing, "PEERS_S", 30.0)
    await observing._refuse_without_peers(reader, "r")


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
