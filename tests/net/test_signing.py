"""Signatures that any peer can check: of one peer, on exactly one statement."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.signing import PROOF_LETTERS_MAX, SigningKey, signer


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hivemind.p2p import P2P

    path = tmp_path_factory.mktemp("identity") / "identity"
    P2P.generate_identity(str(path))
    return path


def test_a_proof_names_its_peer(identity: Path) -> None:
    """The peer id is the one that libp2p gives to the same key; the proof is short enough to be handed on."""
    from hivemind.p2p import PeerID

    key = SigningKey(identity)
    proof = key.sign(b"so be it")
    assert key.peer_id == str(PeerID.from_identity(identity.read_bytes()))
    assert signer(b"so be it", proof) == key.peer_id
    assert key.sign(b"so be it") == proof
    assert len(proof) <= PROOF_LETTERS_MAX


def test_a_proof_holds_for_its_statement_and_key_alone(identity: Path) -> None:
    """Another statement, or another key beside the signature, proves nothing."""
    from hivemind.p2p import P2P

    other = identity.with_name("other")
    P2P.generate_identity(str(other))
    mine, theirs = SigningKey(identity).sign(b"yes"), SigningKey(other).sign(b"yes")
    assert signer(b"no", mine) is None
    assert signer(b"yes", f"{theirs.partition('.')[0]}.{mine.partition('.')[2]}") is None
    assert signer(b"yes", theirs) == SigningKey(other).peer_id != SigningKey(identity).peer_id


@given(st.one_of(st.text(), st.binary().map(lambda raw: raw.hex()), st.just("." * (PROOF_LETTERS_MAX + 1))))
def test_garbage_proves_nothing(proof: str) -> None:
    """Whatever stands in place of a proof."""
    assert signer(b"yes", proof) is None


@pytest.mark.parametrize(
    "content", [None, b"", b"\x08\x00\x12", b"\x08\x00\x12\xff\xff", b"\x08\x01\x12\x03abc", b"text"]
)
def test_a_file_without_a_key_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    """Whether it doesn't exist, or holds something else."""
    path = tmp_path / "identity"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"identity_path=.*name the file"):
        SigningKey(path)
