"""A private run: members find it, train in it and leave; nothing of theirs is readable in the DHT."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.errors import GaveUpWaiting, Refused
from p2p_diloco.net.membership import SealedRecords
from p2p_diloco.node import observing, privacy, records, run_record
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.run import Run
from p2p_diloco.node.run_record import RunRecord, signature_of
from p2p_diloco.node.swarm import invited_through
from p2p_diloco.tensors.layout import Layout
from tests.net.members import KEY, OTHER_KEY, id_of, invitation, membership
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited
from tests.node.conftest import QUICK, MemoryPeer, entered, specs, stop

GRANTS: dict[str, bytes] = {}
"""By which grant each peer was admitted."""


class PrivatePeer(MemoryPeer):
    """A node with an invitation; `founds`: it has the run key, too."""

    def __init__(self, network: MemoryNetwork, name: str, *, founds: bool = False, **options: Any) -> None:
        peer = id_of(name)
        super().__init__(network, peer, dict(QUICK), **options)
        self.access = Access(membership(peer), KEY if founds else None)
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
async def test_a_peer_without_the_run_key_founds_nothing() -> None:
    """It waits for a worker that has the key, and says so."""
    peer = PrivatePeer(MemoryNetwork(), "b", wait_timeout=0.5)
    await peer.start()
    with pytest.raises(GaveUpWaiting):
        await peer.hear("run")
    assert any("a worker that has the run key" in str(message.get("text")) for message in peer.said)


@awaited
async def test_a_member_cannot_replace_the_runs_record() -> None:
    """A record that the run key did not sign is left out, even if its name is lower."""
    network = MemoryNetwork()
    mallory = PrivatePeer(network, "mallory")
    layout = Layout.build(specs(4), 1, "contiguous", None)
    for outer_lr in (0.1, 0.2, 0.3, 0.4, 0.5):  # five names: one of them is probably the lowest
        run = Run("r", RunConfig(**{**QUICK, "outer_lr": outer_lr}), layout)
        await run_record.BOARD.store(mallory.transport, "r", RunRecord.founding(run, id_of("mallory"), 0.0).pack())
    a, b = PrivatePeer(network, "a", founds=True), PrivatePeer(network, "b")
    await a.enter()
    await b.enter()
    assert [peer.run["config"]["outer_lr"] for peer in (a, b)] == [QUICK["outer_lr"]] * 2


@pytest.mark.parametrize("junk", [b"\xc1" * 900, msgpack.packb([1, 2])])
@awaited
async def test_junk_of_a_member_does_not_keep_the_run_from_being_founded(
    junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A member, or one that was revoked, can store bytes beside the run's record, also while no peer is up. Without the
    run key's signature they are left out, with a line in the log."""

    network = MemoryNetwork()
    mallory = PrivatePeer(network, "mallory")
    assert await run_record.BOARD.store(mallory.transport, "r", junk)
    founder, joiner = PrivatePeer(network, "a", founds=True), PrivatePeer(network, "b")
    await founder.enter()
    await joiner.enter()
    await stop(founder, joiner)
    assert "a record of the run r is left out: the run key did not sign it" in caplog.text


def test_a_signed_record_holds_for_its_run_and_content_only() -> None:
    """The signature covers the run's name and every byte of the record."""
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


def test_the_token_is_a_secret_of_the_members() -> None:
    """A stranger that knows name, settings and model can't compute it; an open run's token is as before."""
    layout = Layout.build(specs(4), 1, "contiguous", None)
    salted = Run("r", RunConfig(), layout, membership(id_of("a")).token_salt)
    assert salted.token == Run("r", RunConfig(), layout, membership(id_of("b")).token_salt).token
    assert salted.token != Run("r", RunConfig(), layout).token


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


def test_an_invitation_names_addresses_that_other_machines_may_reach() -> None:
    """Only a machine without a network names those that no other machine reaches."""
    here, near, bootstrap = "/ip4/127.0.0.1/tcp/1/p2p/a", "/ip4/10.0.0.5/tcp/1/p2p/a", "/ip4/10.0.0.9/tcp/1/p2p/b"
    assert invited_through([bootstrap], [here, near]) == [bootstrap, near]
    assert invited_through([], [here, near]) == [near]
    assert invited_through([], [here]) == [here]
