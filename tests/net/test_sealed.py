"""The records of a private run in a DHT that strangers use, too."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import pytest

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.interface import CONTENT_BYTES_MAX, VALUE_BYTES_MAX
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.membership import COPIES, SEAL_BYTES, Membership, SealedRecords
from tests.net.members import id_of
from tests.net.memory import DeafInbox, MemoryNetwork, MemoryTransport
from tests.net.patience import awaited

KEY = RunKey(b"k" * 32)
NOW = time.time()
ALICE, BOB, OTHER, MALLORY, LATE, EVE = map(id_of, ("alice", "bob", "other", "mallory", "late", "eve"))
VICTIM = id_of("victim")


class Swarm:
    """A DHT with members of one run, and strangers."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.memberships: dict[str, Membership] = {}

    def stranger(self, name: str = "eve") -> MemoryTransport:
        return self.network.join(name, DeafInbox())

    def member(
        self, name: str, key: RunKey = KEY, role: str = "worker", clock: Callable[[], float] = time.time
    ) -> SealedRecords:
        granted, seed = key.grant(role, "a-grant", NOW + 3600)
        invitation = Invitation("main", (), granted, seed, key.secret)
        self.memberships[name] = Membership(invitation, name, NOW)
        return SealedRecords(self.stranger(name), self.memberships[name], clock)

    def stored(self) -> list[tuple[str, str, bytes]]:
        """Everything that the DHT holds: key, subkey, value."""
        records = self.network.records.items()
        return [(key, subkey, value) for key, found in records for (subkey, _), (value, _) in found.items()]


@awaited
async def test_what_strangers_store_is_left_out() -> None:
    """Even under the members' keys, under a member's name, with a later expiration, or copied from elsewhere."""
    swarm = Swarm()
    alice, bob, eve = swarm.member(ALICE), swarm.member(BOB), swarm.stranger()
    await alice.store("main/config", "hash", b"true", 30.0, owned=False)
    await alice.store("main/peers/0", ALICE, b"true", 30.0)
    stored = swarm.stored()
    for key, subkey, value in stored:
        for owned in (True, False):
            await eve.store(key, subkey, b"junk", 3000.0, owned=owned)
            await eve.store(key, "hash", value, 3000.0, owned=owned)
            await eve.store(key, "eve/~hash", value, 3000.0, owned=owned)
            await eve.store(key, "eve", value, 3000.0, owned=owned)
            for other, *_ in stored:
                await eve.store(other, subkey, value, 3000.0, owned=owned)
    assert [value for value, _ in (await bob.fetch("main/config")).values()] == [b"true"]
    assert {name: value for name, (value, _) in (await bob.fetch("main/peers/0")).items()} == {ALICE: b"true"}


@awaited
async def test_a_record_without_owner_is_kept_by_a_few_members() -> None:
    """However many renew it: so a large run doesn't fill the record's key."""
    swarm = Swarm()
    members = [swarm.member(id_of(f"peer{number}")) for number in range(2 * COPIES)]
    for member in members:
        assert await member.store("main/config", "hash", b"value", 30.0, owned=False)
    assert len(swarm.stored()) == COPIES
    assert set(await members[0].fetch("main/config")) == {"hash"}


@awaited
async def test_a_record_is_stored_again_before_its_copies_expire() -> None:
    """Copies with less than half of their time left don't count."""
    swarm = Swarm()
    for number in range(COPIES):
        await swarm.member(id_of(f"peer{number}")).store("main/config", "hash", b"value", 14.0, owned=False)
    await swarm.member(LATE).store("main/config", "hash", b"value", 30.0, owned=False)
    assert len(swarm.stored()) == COPIES + 1


@awaited
async def test_a_value_has_room_for_its_seal() -> None:
    """The longest content and its seal fit into one record; more is refused."""
    swarm = Swarm()
    alice = swarm.member(ALICE)
    longest = os.urandom(VALUE_BYTES_MAX - SEAL_BYTES - len(swarm.memberships[ALICE].chain))
    assert len(longest) > CONTENT_BYTES_MAX
    assert await alice.store("key", ALICE, longest, 30.0)
    assert (await alice.fetch("key"))[ALICE][0] == longest
    with pytest.raises(ValueError, match="no room for its certificate and its seal"):
        await alice.store("key", ALICE, longest + b"x", 30.0)


@awaited
async def test_no_member_stores_a_copy_of_a_peers_own_record() -> None:
    """Such a copy would say in that peer's name whatever the member likes, for instance that it has left."""
    swarm = Swarm()
    victim, bob, mallory = swarm.member(VICTIM), swarm.member(BOB), swarm.member(MALLORY)
    await victim.store("main/peers/0", VICTIM, b"true", 30.0)
    for subkey in (VICTIM, f"{VICTIM}/data"):
        await mallory.store("main/peers/0", subkey, b"false", 3000.0, owned=False)
        await mallory.store("main/peers/0", subkey, b"false", 3000.0)
    assert {name: value for name, (value, _) in (await bob.fetch("main/peers/0")).items()} == {VICTIM: b"true"}


@pytest.mark.parametrize("owned", [True, False])
@awaited
async def test_records_of_a_revoked_member_are_left_out(owned: bool) -> None:
    """It still has the members' secret. Its copies don't count as kept, either."""
    swarm = Swarm()
    alice, mallory = swarm.member(ALICE), swarm.member(MALLORY)
    key, subkey = "main/peers/0", MALLORY if owned else "hash"
    await mallory.store(key, subkey, b"value", 30.0, owned=owned)
    assert set(await alice.fetch(key)) == {subkey}
    swarm.memberships[ALICE].revoke(KEY.sign_revocations(1, [swarm.memberships[MALLORY].own.id]))
    assert not await alice.fetch(key)


@awaited
async def test_records_of_a_member_whose_grant_has_expired_are_left_out() -> None:
    swarm = Swarm()
    now = NOW
    alice, mallory = swarm.member(ALICE, clock=lambda: now), swarm.member(MALLORY)
    await mallory.store("key", MALLORY, b"value", 30.0)
    assert set(await alice.fetch("key")) == {MALLORY}
    now = NOW + 3601
    assert not await alice.fetch("key")


@awaited
async def test_an_observer_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its invitation allows only to read. What it stores by a client of its own is left out."""
    swarm = Swarm()
    alice, eve = swarm.member(ALICE), swarm.member(EVE, role="observer")
    with pytest.raises(ConfigError, match="invite=a-grant allows to read the run, and to change nothing"):
        await eve.store("key", EVE, b"value", 30.0)
    mine = swarm.memberships[EVE]
    monkeypatch.setattr(mine, "own", dataclasses.replace(mine.own, role="worker"))
    for owned, subkey in ((True, EVE), (False, "hash")):
        assert await eve.store("key", subkey, b"value", 30.0, owned=owned)
    assert not await alice.fetch("key")
