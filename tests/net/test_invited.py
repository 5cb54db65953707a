"""Where a peer's invitation and run key come from, and the list of invitations beside the key."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

import pytest

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.invitation_used import SHARED_NAME, on_this_machine, with_invitation
from p2p_diloco.net.invited import (
    FOUNDER,
    UNKNOWN,
    Issued,
    check_role,
    founders_key,
    founders_own,
    key_of,
    read_invitation,
    revocations_of,
    write_files,
)
from p2p_diloco.net.membership import Membership
from tests.net.members import id_of

FAR = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW" + "A" * 44
FAR_TOO = "/ip4/192.0.2.2/tcp/4001/p2p/12D3KooW" + "B" * 44
NEAR = FAR.replace("192.0.2.1", "127.0.0.1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def key(folder: Path) -> RunKey:
    """The key of the run "r", whose files are in the folder."""
    made = founders_key("r")
    write_files("r", made, [FAR])
    return made


def test_an_invitation_gives_addresses_and_a_name(key: RunKey, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    # An invitation names the run and its addresses. So that `--invite` is all that a peer needs: its file, or its
    # one line, as an environment variable holds it. Given addresses come first; another run than the invitation's
    # is an error, which names both.
    local = with_invitation(PeerConfig(invite="r.invite"))
    assert (local.run_id, local.initial_peers) == ("r", (FAR,))
    assert with_invitation(PeerConfig(invite="r.invite", initial_peers=(FAR_TOO,))).initial_peers == (FAR_TOO,)
    assert with_invitation(local) == local
    assert local.invite == str(folder / "r.invite")  # a command of `join` may go to another folder
    line = read_invitation(local).line()
    assert read_invitation(PeerConfig(invite=line)) == read_invitation(local)
    assert with_invitation(PeerConfig(invite=line)).run_id == "r"
    with pytest.raises(ConfigError, match=r"run_id=other is not the invitation's run, r; leave out run_id"):
        with_invitation(PeerConfig(invite="r.invite", run_id="other"))

    # A peer has the name of its own invitation. So that `kick` takes what `status` shows. A given name comes
    # first; a shared invitation names no peer. One that others can read, as it came by mail, is used with a
    # warning.
    caplog.clear()
    grant, seed = key.grant("worker", "alice", time.time() + 60)
    (folder / "alice.invite").write_text(Invitation("r", (FAR,), grant, seed, key.secret).pack())
    (folder / "alice.invite").chmod(0o600)
    assert with_invitation(PeerConfig(invite="alice.invite")).name == "alice"
    assert with_invitation(PeerConfig(invite="alice.invite", name="al")).name == "al"
    assert with_invitation(PeerConfig(invite="r.invite")).name is None
    assert not caplog.text
    (folder / "r.invite").chmod(0o644)
    with_invitation(PeerConfig(invite="r.invite"))  # by `join` and by its command
    assert not caplog.text
    read_invitation(PeerConfig(invite="r.invite"), warns=True)  # by the node
    assert "chmod 600" in caplog.text

    # An invitation in this folder is used. By its run's name, for a run that other machines can reach: so a
    # restarted founder needs no further flag.
    assert with_invitation(PeerConfig(run_id="r", initial_peers=(FAR_TOO,))).invite == str(folder / "r.invite")
    assert with_invitation(PeerConfig(run_id="r", initial_peers=(NEAR,))).invite is None
    assert with_invitation(PeerConfig(run_id="r", initial_peers=(FAR,), open=True)).invite is None
    assert with_invitation(PeerConfig(run_id="other", initial_peers=(FAR,))).invite is None


@pytest.mark.parametrize(("text", "why"), [("{}", "is no"), ("no", "is no"), ("", "is no"), (None, "can't be read")])
def test_a_file_that_is_no_invitation_is_named(folder: Path, text: str | None, why: str) -> None:
    """Also one that isn't there."""
    if text is not None:
        (folder / "x.invite").write_text(text)
    with pytest.raises(ConfigError, match=rf"invite=x\.invite {why}"):
        with_invitation(PeerConfig(invite="x.invite"))


def test_the_founders_files_are_private_and_never_written_again(key: RunKey, folder: Path) -> None:
    """Mode 0600; a second founding keeps the key."""
    for name in ("r.key", "r.invite", "r.issued"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert founders_key("r").public == key.public
    before = (folder / "r.invite").read_bytes()
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        write_files("r", key, [FAR_TOO])
    assert (folder / "r.invite").read_bytes() == before


def test_the_key_lies_beside_the_invitation(
    key: RunKey, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Members without the key get None; another run's key of that name is not used."""
    invitation = read_invitation(PeerConfig(invite="r.invite"))
    found = key_of(PeerConfig(invite="r.invite"), invitation)
    assert found is not None
    assert found.public == key.public
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert key_of(PeerConfig(invite="../r.invite"), invitation) is not None
    assert key_of(PeerConfig(invite=invitation.line()), invitation) is None
    RunKey.create().save(elsewhere / "r.key")
    assert key_of(PeerConfig(invite=invitation.line()), invitation) is None
    assert "another run of this name" in caplog.text


def test_a_revoked_shared_invitation_leaves_the_founder_in(key: RunKey) -> None:
    """The founder's process has a grant of its own, which no file lists."""
    now = time.time()
    founder = Membership(founders_own("r", key), id_of("founder"), now)
    other = Membership(read_invitation(PeerConfig(invite="r.invite")), id_of("other"), now)
    assert (founder.own.name, other.own.name) == (FOUNDER, SHARED_NAME)
    packed = key.sign_revocations(1, [other.own.id])
    for member in (founder, other):
        member.revoke(packed)
    assert not founder.revoked
    assert other.revoked


@pytest.mark.parametrize(
    ("settings", "here"),
    [
        ({}, True),
        ({"initial_peers": (NEAR,)}, True),
        ({"initial_peers": (NEAR, FAR)}, False),
        ({"host_maddrs": ("/ip4/0.0.0.0/tcp/0",)}, False),
        ({"host_maddrs": ("/ip6/::1/tcp/0",)}, True),
        ({"announce_maddrs": ("/ip4/192.0.2.1/tcp/1",)}, False),
    ],
)
def test_a_run_is_on_this_machine_if_all_its_addresses_are(settings: dict[str, tuple[str, ...]], here: bool) -> None:
    """Addresses to dial, to listen on and to announce."""
    assert on_this_machine(PeerConfig(**settings)) is here  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "wanted", "sentence"),
    [
        ("worker", "worker", ""),
        ("worker", "aggregator", ""),
        ("aggregator", "aggregator", ""),
        ("aggregator", "worker", "invite=x allows only to aggregate; start this peer with role=aggregator"),
        ("observer", "worker", "invite=x allows to watch the run, not to join it; watch with"),
        ("observer", "aggregator", "invite=x allows to watch the run, not to join it"),
    ],
)
def test_an_invitation_allows_its_role(role: str, wanted: Literal["worker", "aggregator"], sentence: str) -> None:
    """A worker may do with less; the error says what is allowed."""
    key = RunKey.create()
    granted, seed = key.grant(role, "x", time.time() + 60)
    invitation = Invitation("r", (), granted, seed, key.secret)
    if not sentence:
        check_role(PeerConfig(role=wanted), invitation)
        return
    with pytest.raises(ConfigError) as caught:
        check_role(PeerConfig(role=wanted), invitation)
    assert caught.value.sentence.startswith(sentence)


def test_the_list_of_invitations_keeps_what_was_revoked(key: RunKey, folder: Path) -> None:
    # The list of invitations keeps what was revoked. By name or by id, in this file or not; expired grants are
    # left out of the list that members get.
    now = time.time()
    issued = Issued.beside(folder / "r.key")
    alice, bob, late = (key.grant("worker", name, now + 60)[0] for name in ("alice", "bob", "late"))
    for grant in (alice, bob, late):
        issued.add(grant)
    assert issued.valid("alice", now)
    assert not issued.valid("alice", now + 61)
    assert not issued.valid("carol", now)
    assert issued.revocations(key, (), now) is None
    issued.revoke([alice.id, b"12345678"], 7)
    issued.revoke([alice.id, late.id], 8)
    issued.save()
    again = Issued.beside(folder / "r.key")
    assert again.entries == issued.entries
    assert not again.valid("alice", now)
    assert again.ids_of("bob") == [bob.id]
    assert again.ids_of(UNKNOWN) == [b"12345678"]
    made = again.revocations(key, [b"earlier!"], now)
    assert made is not None
    member = Membership(founders_own("r", key), id_of("me"), now)
    assert member.revoke(made[1])
    assert (made[0], member.banned) == (8, {alice.id, late.id, b"12345678", b"earlier!"})
    assert again.revocations(key, (), now + 61) == (8, key.sign_revocations(8, [b"12345678"]))

    # A restarted founder knows what was revoked. From the file beside its key, though the DHT may have forgotten
    # it.
    (folder / "r.issued").unlink()
    local = PeerConfig(invite="r.invite")
    assert revocations_of(local, "r", key) is None
    issued = Issued.beside(folder / "r.key")
    issued.revoke([b"12345678"], 3)
    issued.save()
    assert revocations_of(local, "r", key) == key.sign_revocations(3, [b"12345678"])

    # Another file is no list. The error says how to go on without it. Of a later version's list the fields that
    # this one doesn't know are left out.
    for text in ("{", "[1]", '[{"id": "x"}]', "{}x", "7"):
        (folder / "r.issued").write_text(text)
        with pytest.raises(ConfigError, match="is no list of invitations; move it away"):
            Issued.beside(folder / "r.key")
    entry = {"id": "00" * 8, "name": "alice", "role": "worker", "expires": 5, "colour": "blue"}
    (folder / "r.issued").write_text(json.dumps([entry]))
    assert Issued.beside(folder / "r.key").entries[0].name == "alice"
