"""Which peers are members of a private run, and its records in a DHT that strangers use. Bytes of strangers lead to
a refusal, never to another error."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.certificates import BANNED_MAX, RunKey, Stranger, chain_of
from p2p_diloco.net.interface import CONTENT_BYTES_MAX, VALUE_BYTES_MAX
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.membership import COPIES, SEAL_BYTES, Membership, SealedRecords
from p2p_diloco.net.signing import key_in, pack
from tests.net.members import DAY_S, KEY, OTHER_KEY, id_of, invitation, membership
from tests.net.memory import DeafInbox, MemoryNetwork, MemoryTransport
from tests.net.patience import awaited

ALICE, BOB, EVE, MALLORY = map(id_of, ("alice", "bob", "eve", "mallory"))
GIVEN = invitation()
ME, OTHER, FOREIGN = membership(ALICE), membership(BOB, GIVEN), membership(ALICE, invitation(key=OTHER_KEY))


def test_what_members_show_hides_what_they_share() -> None:
    # A certificate contains no secret. Neither the grant's seed nor the run's secret travels.
    assert GIVEN.seed not in OTHER.chain
    assert GIVEN.secret not in OTHER.chain

    # Hidden keys and the salt belong to the run. All members compute the same, members of another run something
    # else, and no key shows what it hides.
    assert ME.hidden("main/peers/0") == OTHER.hidden("main/peers/0") != ME.hidden("main/peers/1")
    assert ME.hidden("main/peers/0") != FOREIGN.hidden("main/peers/0")
    assert "main" not in ME.hidden("main/peers/0")
    assert ME.token_salt == OTHER.token_salt != FOREIGN.token_salt


def test_a_grant_for_one_peer_admits_no_other() -> None:
    """Not even with the grant's own key; the peer learns it before it dials another."""
    bound = invitation(peer=ALICE)
    assert ME.admit(ALICE, membership(ALICE, bound).chain, time.time()).peer == ALICE
    with pytest.raises(Stranger):
        ME.admit(EVE, chain_of(bound.grant, bound.seed, key_in(EVE)), time.time())
    with pytest.raises(ConfigError, match=r"invite=alice is for another peer.*identity-path"):
        membership(EVE, bound)
    with pytest.raises(ConfigError, match="has expired; ask for a new invitation"):
        membership(ALICE, invitation(life_s=-1.0))


def test_revocations_come_from_the_run_key_alone() -> None:
    # Only a newer list of this run counts. An older or equal number, another run's list, or another key's
    # signature changes nothing.
    me = membership(ALICE)
    newest = KEY.sign_revocations(5, [b"12345678"])
    assert me.revoke(newest)
    statement = pack(KEY.public, 9, b"")
    forged = pack(statement, OTHER_KEY.sign(b"revocations", statement))
    wrong_kind = pack(statement, KEY.sign(b"grant", statement))
    of_another = pack(OTHER_KEY.public, 9, b"")
    misnamed = pack(of_another, KEY.sign(b"revocations", of_another))
    for other in (newest, KEY.sign_revocations(4, []), OTHER_KEY.sign_revocations(9, []), forged, wrong_kind, misnamed):
        assert not me.revoke(other)
    assert (me.banned, me.revocations) == (frozenset([b"12345678"]), newest)

    # Every flipped bit of revocations is refused. So no stranger can revoke or restore a member.
    packed = KEY.sign_revocations(3, [b"12345678"])
    for at in range(8 * len(packed)):
        changed = bytearray(packed)
        changed[at // 8] ^= 1 << at % 8
        assert not ME.revoke(bytes(changed))

    # The longest list of revocations fits into one record. Sealed; a longer list is refused with a mend.
    ids = [os.urandom(8) for _ in range(BANNED_MAX)]
    assert len(KEY.sign_revocations(2**40, ids)) + SEAL_BYTES <= 1024
    with pytest.raises(ConfigError, match="expired"):
        KEY.sign_revocations(1, [*ids, b"12345678"])


@given(st.binary(max_size=300), st.binary(max_size=40))
def test_a_sealed_value_opens_for_members_under_its_name_only(value: bytes, name: bytes) -> None:
    """Under another name, or for another run, it doesn't open; its length grows by the seal only."""
    sealed = ME.seal(name, value)
    assert len(sealed) == len(value) + SEAL_BYTES
    assert OTHER.open(name, sealed) == value
    assert OTHER.open(name + b"x", sealed) is None
    assert FOREIGN.open(name, sealed) is None
    assert OTHER.open(name, sealed[:-1]) is None
    assert ME.seal(name, value) != sealed  # a stranger can't tell whether a record has changed


@pytest.mark.parametrize("key", ["run_id", "addresses", "grant", "seed", "secret"])
def test_a_changed_invitation_is_refused(key: str) -> None:
    """Each field is checked; a missing one, too. The error says who can read one of another version."""
    content = json.loads(GIVEN.pack())
    without = {other: value for other, value in content.items() if other != key}
    for changed in (without, *({**content, key: value} for value in (None, 1, "", "AAA=", ["x"], {}))):
        with pytest.raises(ConfigError, match="is damaged or was changed; ask for the file again"):
            Invitation.unpack(json.dumps(changed))
    with pytest.raises(ConfigError, match="invite=3 is of another version; ask the run's founder"):
        Invitation.unpack(json.dumps({**content, "version": 3}))


def test_a_run_key_is_kept_in_a_file_of_its_owner(tmp_path: Path) -> None:
    """Mode 0600; the same key comes back; an existing file is kept."""
    path, key = tmp_path / "main.key", RunKey.create()
    key.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert (RunKey.load(path).public, RunKey.load(path).secret) == (key.public, key.secret)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        RunKey.create().save(path)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="can't be written"):
        key.save(tmp_path / "missing" / "main.key")
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=r"other users.*chmod 600"):
            RunKey.load(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", "no", '{"kind": "p2p_diloco run key", "version": 1, "seed": "AAAA"}'])
def test_another_file_is_no_run_key(tmp_path: Path, text: str) -> None:
    """Nor is a missing file, or one that is no text."""
    path = tmp_path / "main.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"holds no run key; name the \.key file"):
        RunKey.load(path)
    with pytest.raises(ConfigError, match="can't be read"):
        RunKey.load(tmp_path / "missing")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no text file"):
        RunKey.load(path)


# -- the records of a private run in a DHT that strangers use, too


class Swarm:
    """A DHT with members of one run, and strangers."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.memberships: dict[str, Membership] = {}

    def stranger(self, name: str = "eve") -> MemoryTransport:
        return self.network.join(name, DeafInbox())

    def member(self, name: str, role: str = "worker", clock: Callable[[], float] = time.time) -> SealedRecords:
        self.memberships[name] = membership(name, invitation(role))
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
    granted = {peer: grant.id for peer, grant in (await bob.grants("main/peers/0")).items()}
    assert granted == {ALICE: swarm.memberships[ALICE].own.id}


@awaited
async def test_a_record_without_owner_is_kept_by_a_few_members() -> None:
    # A record without owner is kept by a few members. However many renew it: so a large run doesn't fill the
    # record's key.
    swarm = Swarm()
    members = [swarm.member(id_of(f"peer{number}")) for number in range(2 * COPIES)]
    for member in members:
        assert await member.store("main/config", "hash", b"value", 30.0, owned=False)
    assert len(swarm.stored()) == COPIES
    assert set(await members[0].fetch("main/config")) == {"hash"}

    # A record is stored again before its copies expire. Copies with less than half of their time left don't
    # count.
    swarm = Swarm()
    for number in range(COPIES):
        await swarm.member(id_of(f"peer{number}")).store("main/config", "hash", b"value", 14.0, owned=False)
    await swarm.member(EVE).store("main/config", "hash", b"value", 30.0, owned=False)
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
    victim, bob, mallory = swarm.member(ALICE), swarm.member(BOB), swarm.member(MALLORY)
    await victim.store("main/peers/0", ALICE, b"true", 30.0)
    for subkey in (ALICE, f"{ALICE}/data"):
        await mallory.store("main/peers/0", subkey, b"false", 3000.0, owned=False)
        await mallory.store("main/peers/0", subkey, b"false", 3000.0)
    assert {name: value for name, (value, _) in (await bob.fetch("main/peers/0")).items()} == {ALICE: b"true"}


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
    swarm, now = Swarm(), time.time()
    alice, mallory = swarm.member(ALICE, clock=lambda: now), swarm.member(MALLORY)
    await mallory.store("key", MALLORY, b"value", 30.0)
    assert set(await alice.fetch("key")) == {MALLORY}
    now += DAY_S + 1
    assert not await alice.fetch("key")


@awaited
async def test_an_observer_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its invitation allows only to read. What it stores by a client of its own is left out."""
    swarm = Swarm()
    alice, eve = swarm.member(ALICE), swarm.member(EVE, role="observer")
    with pytest.raises(ConfigError, match="invite=alice allows to read the run, and to change nothing"):
        await eve.store("key", EVE, b"value", 30.0)
    mine = swarm.memberships[EVE]
    monkeypatch.setattr(mine, "own", dataclasses.replace(mine.own, role="worker"))
    for owned, subkey in ((True, EVE), (False, "hash")):
        assert await eve.store("key", subkey, b"value", 30.0, owned=owned)
    assert not await alice.fetch("key")
