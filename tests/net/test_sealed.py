"""The records of a private run in a DHT that strangers use, too."""

from __future__ import annotations

import os

import pytest

from p2p_diloco.net.interface import VALUE_BYTES_MAX
from p2p_diloco.net.membership import SEAL_BYTES, Invitation, Membership, RunKey
from p2p_diloco.net.sealed import COPIES, SealedRecords
from tests.net.memory import DeafInbox, MemoryNetwork, MemoryTransport
from tests.net.patience import awaited

KEY = RunKey(b"k" * 32)
NOW = 1_000.0


class Swarm:
    """A DHT with members of one run, and strangers."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def stranger(self, name: str = "eve") -> MemoryTransport:
        return self.network.join(name, DeafInbox())

    def member(self, name: str, key: RunKey = KEY) -> SealedRecords:
        granted, seed = key.grant("worker", name, NOW + 9)
        invitation = Invitation("main", (), granted, seed, key.secret)
        return SealedRecords(self.stranger(name), Membership(invitation, name, NOW))

    def stored(self) -> list[tuple[str, str, bytes]]:
        """Everything that the DHT holds: key, subkey, value."""
        records = self.network.records.items()
        return [(key, subkey, value) for key, found in records for (subkey, _), (value, _) in found.items()]


@pytest.mark.parametrize("owned", [True, False])
@awaited
async def test_members_read_what_a_member_stored(owned: bool) -> None:
    """Under the same key and name, as in an open run; members of another run find nothing."""
    swarm = Swarm()
    alice, bob, other = swarm.member("alice"), swarm.member("bob"), swarm.member("other", RunKey(b"o" * 32))
    subkey = "alice" if owned else "hash"
    assert await alice.store("main/peers/0", subkey, b"value", 30.0, owned=owned)
    assert {name: value for name, (value, _) in (await bob.fetch("main/peers/0")).items()} == {subkey: b"value"}
    assert not await other.fetch("main/peers/0")


@awaited
async def test_the_dht_shows_neither_keys_nor_values() -> None:
    """A stranger that stores the records for others reads neither the run's name nor any content."""
    swarm = Swarm()
    alice = swarm.member("alice")
    await alice.store("main/config", "hash", b"settings", 30.0, owned=False)
    await alice.store("main/peers/0", "alice", b"address", 30.0)
    for key, _, value in swarm.stored():
        assert "main" not in key
        assert b"settings" not in value
        assert b"address" not in value


@awaited
async def test_what_strangers_store_is_left_out() -> None:
    """Even under the members' keys, under a member's name, with a later expiration, or copied from elsewhere."""
    swarm = Swarm()
    alice, bob, eve = swarm.member("alice"), swarm.member("bob"), swarm.stranger()
    await alice.store("main/config", "hash", b"true", 30.0, owned=False)
    await alice.store("main/peers/0", "alice", b"true", 30.0)
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
    assert {name: value for name, (value, _) in (await bob.fetch("main/peers/0")).items()} == {"alice": b"true"}


@awaited
async def test_a_record_without_owner_is_kept_by_a_few_members() -> None:
    """However many renew it: so a large run doesn't fill the record's key."""
    swarm = Swarm()
    members = [swarm.member(f"peer{number}") for number in range(2 * COPIES)]
    for member in members:
        assert await member.store("main/config", "hash", b"value", 30.0, owned=False)
    assert len(swarm.stored()) == COPIES
    assert set(await members[0].fetch("main/config")) == {"hash"}


@awaited
async def test_a_record_is_stored_again_before_its_copies_expire() -> None:
    """Copies with less than half of their time left don't count."""
    swarm = Swarm()
    for number in range(COPIES):
        await swarm.member(f"peer{number}").store("main/config", "hash", b"value", 14.0, owned=False)
    await swarm.member("late").store("main/config", "hash", b"value", 30.0, owned=False)
    assert len(swarm.stored()) == COPIES + 1


@awaited
async def test_a_value_has_room_for_its_seal() -> None:
    """The longest content and its seal fit into one record; more is refused."""
    swarm = Swarm()
    alice = swarm.member("alice")
    longest = os.urandom(VALUE_BYTES_MAX - SEAL_BYTES)
    assert await alice.store("key", "alice", longest, 30.0)
    assert (await alice.fetch("key"))["alice"][0] == longest
    with pytest.raises(ValueError, match="no room for its seal"):
        await alice.store("key", "alice", longest + b"x", 30.0)


def test_members_sign_as_before() -> None:
    """Signatures are the peer's own."""
    alice = Swarm().member("alice")
    assert alice.signed_by("alice", alice.sign(b"kind", b"yes"), b"kind", b"yes")
    assert not alice.signed_by("bob", alice.sign(b"kind", b"yes"), b"kind", b"yes")
