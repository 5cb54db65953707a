"""`invite` and `revoke` up to the network: files, sentences and exit codes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from p2p_diloco.cli import carry_out
from p2p_diloco.cli import invite as module
from p2p_diloco.cli.dashboard import _controls
from p2p_diloco.cli.invite import seconds
from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.revise import founder_of
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.net import private_files
from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.invited import Issued, key_of, read_invitation, write_files
from p2p_diloco.net.signing import SigningKey
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.revise import Asker
from p2p_diloco.observe.snapshot import Snapshot, snapshot

FAR = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW" + "A" * 44
PEER = "12D3KooW" + "B" * 44


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A founder's folder, and the place where commands run."""
    monkeypatch.chdir(tmp_path)
    write_files("r", RunKey.create(), [FAR])
    return tmp_path


def call(*arguments: str) -> int:
    return carry_out(arguments)


def test_an_invitation_says_what_it_allows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Role, expiration and peer are in its signed grant; the file is private; the printed line joins with it."""
    assert call("invite", "--name", "alice", "--role", "observer", "--expires", "12h", "--peer", PEER) == 0
    made = read_invitation(PeerConfig(invite="alice.invite"))
    shared = read_invitation(PeerConfig(invite="r.invite"))
    assert (made.run_id, made.addresses, made.secret) == (shared.run_id, shared.addresses, shared.secret)
    assert (made.grant.name, made.grant.role, made.grant.peer) == ("alice", "observer", PEER)
    assert made.grant.run == shared.grant.run
    assert 0 < made.grant.expires - time.time() <= 12 * 3600
    assert (folder / "alice.invite").stat().st_mode & 0o777 == 0o600
    assert "p2p-diloco status --invite alice.invite" in capsys.readouterr().out
    assert made.grant.id in Issued.beside(folder / "r.key").ids_of("alice")


def test_a_line_is_the_whole_invitation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And no file is written."""
    assert call("invite", "--name", "bob", "--line") == 0
    assert read_invitation(PeerConfig(invite=capsys.readouterr().out.strip())).grant.name == "bob"
    assert not (folder / "bob.invite").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["invite"], 2, "--name"),
        (["invite", "--name", "a b"], 3, "name=a b is not a name that can be used"),
        (
            ["invite", "--name", "alice", "--role", "king"],
            3,
            "role=king is no role; choose worker, aggregator, observer",
        ),
        (["invite", "--name", "alice", "--expires", "soon"], 2, "--expires=soon is no length of time"),
        (["invite", "--name", "shared"], 2, "--name=shared is the name of a valid invitation"),
        (["invite", "--name", "r"], 3, "--out=r.invite exists and is not overwritten"),
        (["invite", "--name", "alice", "--key", "none.key"], 3, "key=none.key can't be read"),
        (["revoke", "carol"], 2, "NAME=carol is no invitation that this key has issued; give a name (shared)"),
        (["revoke", "shared", "--key", "none.key"], 3, "key=none.key can't be read"),
        (["revoke"], 2, "NAME"),
        (["kick", "carol"], 4, "can't be reached"),
        (["kick", "carol", "--key", "none.key"], 3, "key=none.key can't be read"),
        (["join", "--invite", "r.invite", "--open"], 3, "--open=on contradicts invite"),
        (["join", "--invite", "gone"], 3, "--invite=gone can't be read"),
        (["status", "--invite", "gone"], 3, "--invite=gone can't be read"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, sentence: str
) -> None:
    """With the key, the value and the mend; and no invitation is listed."""
    assert call(*arguments) == code
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert len(Issued.beside(folder / "r.key").entries) == 1


class Used(NamedTuple):
    """A grant, as far as `kick` reads it."""

    id: bytes
    name: str


def revocations(monkeypatch: pytest.MonkeyPatch, *peers: tuple[str, str, str]) -> list[bytes]:
    """The grants that commands revoke from now on, without a network, in a run of these peers: (name, id, the name of
    its invitation, or else of a grant that no list has)."""
    revoked: list[bytes] = []

    async def look(*_: object) -> Snapshot:
        return seen(*((name, peer) for name, peer, _ in peers))

    async def grants(_: str) -> dict[str, Used]:
        issued = Issued.beside(Path("r.key"))
        ids = {peer: [*issued.ids_of(by), by.encode()][0] for _, peer, by in peers}
        return {peer: Used(ids[peer], by) for _, peer, by in peers}

    @contextlib.asynccontextmanager
    async def observer(*_: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(grants=grants)

    async def revoke(dht: object, own: object, key: object, issued: object, ids: Sequence[bytes]) -> int:
        revoked.extend(ids)
        return len(revoked)

    monkeypatch.setattr("p2p_diloco.observe.snapshot.observer", observer)
    monkeypatch.setattr("p2p_diloco.observe.snapshot.look", look)
    monkeypatch.setattr(module, "check_initial_peers", lambda addresses: None)
    monkeypatch.setattr(module, "_revoke", revoke)
    return revoked


def test_a_peer_is_kicked_by_the_invitation_that_was_made_for_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The invitation bound to a peer id is revoked, and those that any peer may use are named."""
    revoked = revocations(monkeypatch)
    for name, peer in (("alice", PEER), ("bob", None)):
        assert call("invite", "--name", name, *(("--peer", peer) if peer else ())) == 0
    assert call("kick", PEER) == 0
    assert revoked == Issued.beside(folder / "r.key").ids_of("alice")
    assert "can come back with it: bob, shared; revoke that one," in " ".join(capsys.readouterr().err.split())


def seen(*peers: tuple[str, str]) -> Snapshot:
    """A run of these peers: (name, id)."""
    same = {"role": "worker", "state": "training", "time": time.time()}
    told = (PeerStatus(name=name, peer_id=id, **same) for name, id in peers)
    return snapshot("r", None, told, time.time())


ALICE, BOB = ("alice", "a-id", "founder"), ("bob", "b-id", "shared")


@pytest.mark.parametrize(
    ("peers", "sentence"),
    [
        ([ALICE, BOB], ""),
        ([ALICE, BOB, ("carol", "c-id", "carol")], ""),
        ([ALICE, BOB, ("dan", "d-id", "shared")], "(its grant's id: {shared}), as have dan (…d-id); put all of them"),
        ([ALICE, ("dan", "d-id", "shared")], "NAME=bob is no invitation that this key has issued"),
        ([("bob", "a-id", "founder"), BOB], ""),
        ([ALICE, BOB, ("bob", "c-id", "carol")], "NAME=bob means several peers; give an id: b-id, c-id"),
        ([("bob", "a-id", "founder")], "NAME=bob has founded the run with its key, so it needs no invitation"),
    ],
)
def test_a_peer_is_kicked_by_the_name_that_status_shows(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    peers: list[tuple[str, str, str]],
    sentence: str,
) -> None:
    """Bob has come with the founder's invitation for all, as its record proves. That is revoked if no other peer has
    come with it; else a sentence names those peers. The founder needs none."""
    assert call("invite", "--name", "carol", "--peer", PEER) == 0
    revoked = revocations(monkeypatch, *peers)
    shared = Issued.beside(folder / "r.key").ids_of("shared")
    assert call("kick", "bob") == (2 if sentence else 0)
    assert revoked == ([] if sentence else shared)
    said = capsys.readouterr()
    assert sentence.format(shared=shared[0].hex()) in " ".join(said.err.split())
    assert ("the members of r put out bob (…b-id) within seconds" in said.out) == (not sentence)


def test_a_peer_that_has_the_name_of_an_invitation_is_put_out_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invitation has Bob's name, but he has come with the one for all: both are revoked, or he could come back. If
    Carol has come with Bob's invitation, it is not certain who is meant."""
    assert call("invite", "--name", "bob") == 0
    issued = Issued.beside(folder / "r.key")
    revoked = revocations(monkeypatch, ALICE, BOB)
    assert call("kick", "bob") == 0
    assert revoked == [*issued.ids_of("bob"), *issued.ids_of("shared")]
    assert "put out bob (…b-id) within" in capsys.readouterr().out
    revoked = revocations(monkeypatch, ALICE, BOB, ("carol", "c-id", "bob"))
    assert call("kick", "bob") == 2
    assert not revoked
    assert "NAME=bob means several peers; give an id: b-id, c-id" in " ".join(capsys.readouterr().err.split())


def test_whom_the_list_does_not_name_is_kicked_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where only a copy of the key is left, the founder's list is empty, or has later invitations alone: no other one
    is revoked in the place of the peer's own."""
    (folder / "r.issued").unlink()
    assert call("invite", "--name", "later") == 0
    revoked = revocations(monkeypatch, ("bob", "b-id", "lost"))
    assert call("kick", "bob") == 0
    assert call("revoke", "later", "--initial-peers", FAR) == 0
    assert revoked == [b"lost", *Issued.beside(folder / "r.key").ids_of("later")]
    assert "revoked later: the members of r put out nobody who is there now" in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], ["--", "true"]])
def test_join_refuses_an_invitation_that_lets_nobody_train(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Before anything is started. The owner of the run key may join with any."""
    key = RunKey.load(folder / "r.key")
    for name, role, expires in (("late", "worker", 1.6e9), ("reader", "observer", 2.0**33)):
        grant, seed = key.grant(role, name, expires)
        private_files.write_new(folder / name, Invitation("r", (FAR,), grant, seed, key.secret).pack(), key="")
    (folder / "r.key").rename("kept")
    assert call("join", "--invite", "late", *command) == 3
    assert "--invite=late has expired; ask for a new invitation" in capsys.readouterr().err
    assert call("join", "--invite", "reader", *command) == 3
    assert "--invite=reader allows to watch the run, not to join it" in " ".join(capsys.readouterr().err.split())
    (folder / "kept").rename("r.key")
    used = "--invite", "late", "--host-maddrs", "/ip4/203.0.113.7/tcp/0"
    for called in (["join", *used, *command], ["data", "r.invite", *used]):
        assert call(*called) == 3
        assert "--host-maddrs=/ip4/203.0.113.7/tcp/0 is no address" in " ".join(capsys.readouterr().err.split())


def test_the_key_is_the_only_one_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With two, or none, it must be named; an open run has none. A peer's identity in the folder is none."""
    (folder / "identity.key").write_bytes(b"\x08\x00\x12 an identity")
    assert call("invite", "--name", "early") == 0
    RunKey.create().save(folder / "s.key")
    assert call("invite", "--name", "alice") == 2
    assert "--key is needed: this folder has 2 run keys" in capsys.readouterr().err
    assert call("invite", "--name", "alice", "--key", "r.key") == 0
    for key in folder.glob("*.key"):
        key.unlink()
    assert call("kick", "carol") == 2
    assert "an open run has none, and lets every peer in" in " ".join(capsys.readouterr().err.split())


def test_the_invitation_beside_a_key_must_be_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a grant of one run would carry another run's addresses. Any member's does: so the key alone is enough
    to invite again."""
    assert call("invite", "--name", "bob") == 0
    (folder / "r.invite").unlink()
    assert call("invite", "--name", "carol") == 3
    assert "put the founder's there, or any member's under this name" in " ".join(capsys.readouterr().err.split())
    (folder / "bob.invite").rename(folder / "r.invite")
    assert call("invite", "--name", "carol") == 0
    (folder / "r.key").unlink()
    RunKey.create().save(folder / "r.key")
    assert call("invite", "--name", "alice") == 3
    assert "is the invitation to another run" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "7", "d", "0d", "-1d", "1.5h", "7 d", "999999d", "7w"])
def test_another_text_is_no_time(text: str) -> None:
    """The error shows an example."""
    with pytest.raises(UsageError, match="write it like 7d"):
        seconds(text)


def test_the_run_key_beside_the_invitation_changes_the_run(folder: Path) -> None:
    """The founder needs no identity file; a member without the key can change nothing. An identity file comes first."""
    invitation = read_invitation(PeerConfig(invite="r.invite"))

    def asker_of(peer: PeerConfig) -> Asker | None:
        return founder_of(invitation, peer.identity_path, key_of(peer, invitation))[0]

    asker = asker_of(PeerConfig(invite="r.invite"))
    assert asker is not None
    assert isinstance(asker.key, RunKey)
    assert (asker.run, asker.key.public, asker.peer_id) == (invitation.grant.run, asker.run, None)
    (folder / "alice.identity").write_bytes((own := SigningKey.create()).content)
    given = PeerConfig(invite="r.invite", identity_path="alice.identity")
    assert (named := asker_of(given)) is not None
    assert named.peer_id == own.peer_id
    (folder / "r.key").unlink()
    assert asker_of(PeerConfig(invite="r.invite")) is None


def test_the_page_offers_what_the_given_keys_allow(folder: Path) -> None:
    """The founder's identity file: to change and end the run; the run's key: also to put peers out. Without: none."""
    (folder / "alice.identity").write_bytes(SigningKey.create().content)
    private, change = PeerConfig(invite="r.invite"), ("set", "save", "stop")
    assert _controls(private, None, None).offered == ()
    assert _controls(private, Path("alice.identity"), None).offered == change
    assert _controls(private, None, Path("r.key")).offered == (*change, "kick")
    assert _controls(PeerConfig(), None, Path("r.key")).offered == ("kick",)


def test_commands_find_the_invitation_in_their_folder(folder: Path) -> None:
    """The only one, or that which the founder wrote; with several others they find none."""
    assert settings_of({}, None)[1].run_id == "r"
    assert call("invite", "--name", "alice") == 0
    assert settings_of({}, None)[1].initial_peers == (FAR,)
    (folder / "r.invite").rename(folder / "s.invite")
    with pytest.raises(UsageError, match=r"names no address of a peer.*--invite"):
        settings_of({}, None)
    (folder / "s.invite").unlink()
    assert settings_of({}, None)[1].name == "alice"
