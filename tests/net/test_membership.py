"""Which peers are members of a private run, and the seal of its records. Bytes of strangers lead to a refusal, never
to another error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.certificates import BANNED_MAX, RunKey, Stranger, chain_of
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.membership import SEAL_BYTES, Membership
from p2p_diloco.net.signing import key_in, pack
from tests.net.members import id_of

NOW = 1_800_000_000.0
DAY = 86_400
ALICE, BOB, EVE = map(id_of, ("alice", "bob", "eve"))
ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{ALICE}"
KEY = RunKey(b"k" * 32)


def invitation(
    key: RunKey = KEY, role: str = "worker", expires: float = NOW + DAY, peer: str | None = None
) -> Invitation:
    made, seed = key.grant(role, "alice", expires, peer)
    return Invitation("main", (ADDRESS,), made, seed, key.secret)


def membership(invited: Invitation | None = None, peer: str = ALICE) -> Membership:
    return Membership(invited or invitation(), peer, NOW)


GIVEN = invitation()
ME, OTHER = membership(), membership(GIVEN, BOB)


def test_a_certificate_contains_no_secret() -> None:
    """Neither the grant's seed nor the run's secret travels."""
    assert GIVEN.seed not in OTHER.chain
    assert GIVEN.secret not in OTHER.chain


def test_a_grant_for_one_peer_admits_no_other() -> None:
    """Not even with the grant's own key; the peer learns it before it dials another."""
    bound = invitation(peer=ALICE)
    assert ME.admit(ALICE, membership(bound, ALICE).chain, NOW).peer == ALICE
    with pytest.raises(Stranger):
        ME.admit(EVE, chain_of(bound.grant, bound.seed, key_in(EVE)), NOW)
    with pytest.raises(ConfigError, match=r"invite=alice is for another peer.*identity-path"):
        membership(bound, EVE)


def test_an_expired_invitation_makes_no_member() -> None:
    """The peer learns it before it dials another."""
    with pytest.raises(ConfigError, match="has expired; ask for a new invitation"):
        membership(invitation(expires=NOW))


def test_only_a_newer_list_of_this_run_counts() -> None:
    """An older or equal number, another run's list, or another key's signature changes nothing."""
    me = membership()
    newest = KEY.sign_revocations(5, [b"12345678"])
    assert me.revoke(newest)
    foreign = RunKey(b"o" * 32)
    statement = pack(KEY.public, 9, b"")
    forged = pack(statement, foreign.sign(b"revocations", statement))
    wrong_kind = pack(statement, KEY.sign(b"grant", statement))
    of_another = pack(foreign.public, 9, b"")
    misnamed = pack(of_another, KEY.sign(b"revocations", of_another))
    for other in (newest, KEY.sign_revocations(4, []), foreign.sign_revocations(9, []), forged, wrong_kind, misnamed):
        assert not me.revoke(other)
    assert (me.banned, me.revocations) == (frozenset([b"12345678"]), newest)


def test_every_flipped_bit_of_revocations_is_refused() -> None:
    """So no stranger can revoke or restore a member."""
    packed = KEY.sign_revocations(3, [b"12345678"])
    for at in range(8 * len(packed)):
        changed = bytearray(packed)
        changed[at // 8] ^= 1 << at % 8
        assert not ME.revoke(bytes(changed))


def test_the_longest_list_of_revocations_fits_into_one_record() -> None:
    """Sealed; a longer list is refused with a mend."""
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
    assert membership(invitation(RunKey(b"o" * 32))).open(name, sealed) is None
    assert OTHER.open(name, sealed[:-1]) is None


def test_equal_values_are_sealed_into_different_bytes() -> None:
    """A stranger can't tell whether a record has changed."""
    assert ME.seal(b"n", b"value") != ME.seal(b"n", b"value")


def test_hidden_keys_and_the_salt_belong_to_the_run() -> None:
    """All members compute the same, members of another run something else, and no key shows what it hides."""
    foreign = membership(invitation(RunKey(b"o" * 32)))
    assert ME.hidden("main/peers/0") == OTHER.hidden("main/peers/0") != ME.hidden("main/peers/1")
    assert ME.hidden("main/peers/0") != foreign.hidden("main/peers/0")
    assert "main" not in ME.hidden("main/peers/0")
    assert ME.token_salt == OTHER.token_salt != foreign.token_salt


@pytest.mark.parametrize("key", ["run_id", "addresses", "grant", "seed", "secret"])
@pytest.mark.parametrize("value", [None, 1, "", "AAA=", ["x"], {}])
def test_a_changed_invitation_is_refused(key: str, value: object) -> None:
    """Each field is checked; a missing one, too."""
    content = json.loads(GIVEN.pack())
    with pytest.raises(ConfigError, match="is damaged or was changed"):
        Invitation.unpack(json.dumps({**content, key: value}))
    del content[key]
    with pytest.raises(ConfigError, match="is damaged or was changed"):
        Invitation.unpack(json.dumps(content))


def test_an_invitation_of_another_version_is_named_so() -> None:
    """The error says what can read it."""
    content = {**json.loads(GIVEN.pack()), "version": 3}
    with pytest.raises(ConfigError, match="invite=3 is of another version; ask the run's founder"):
        Invitation.unpack(json.dumps(content))


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


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_run_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """The error says the command that mends it."""
    path = tmp_path / "main.key"
    RunKey.create().save(path)
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
