"""Signatures that any peer can check with the signer's id: of one peer, on exactly one statement of one kind."""

from __future__ import annotations

import base58
import pytest

from p2p_diloco.net.signing import PEER_ID, SIGNATURE_BYTES, SigningKey, signed_by

KEY, OTHER = SigningKey(b"k" * 32), SigningKey(b"o" * 32)
SPECIFIED = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
"""The Ed25519 private key among the test vectors of libp2p's peer-ids specification."""


def test_a_signature_holds_for_its_peer_kind_and_statement_alone() -> None:
    # A key has the form that libp2p specifies. The specification's example is read, and written with the same
    # bytes. The id begins as that of every Ed25519 key.
    key = SigningKey.read(SPECIFIED)
    assert key.content == SPECIFIED
    assert PEER_ID.fullmatch(key.peer_id)

    # A signature holds for its peer, kind and statement alone. It has 64 bytes, and the signer's id is all that is
    # needed to check it.
    signature = KEY.sign(b"vow", b"yes")
    assert len(signature) == SIGNATURE_BYTES
    assert signed_by(KEY.peer_id, signature, b"vow", b"yes")
    assert not signed_by(OTHER.peer_id, signature, b"vow", b"yes")
    assert not signed_by(KEY.peer_id, signature, b"bet", b"yes")
    assert not signed_by(KEY.peer_id, signature, b"vow", b"no")
    assert not signed_by(KEY.peer_id, OTHER.sign(b"vow", b"yes"), b"vow", b"yes")

    # An id in another form is another peer. An id with blanks around it, cut short or lengthened has signed
    # nothing, though it may decode to the same key; nor has one that names another length of its key, which its
    # form doesn't show.
    signature, decoded = KEY.sign(b"vow", b"yes"), base58.b58decode(KEY.peer_id)
    lengths = [base58.b58encode(decoded[:5] + bytes([n]) + decoded[6:]).decode() for n in (31, 33, 34)]
    assert all(map(PEER_ID.fullmatch, lengths))
    spelt = (f"{KEY.peer_id} ", f" {KEY.peer_id}", f"{KEY.peer_id}\n", KEY.peer_id[:-1], f"1{KEY.peer_id}")
    for peer in (*spelt, *lengths):
        assert not signed_by(peer, signature, b"vow", b"yes")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        b"\x08\x01\x12\x40",
        SPECIFIED[:-1],
        SPECIFIED + b"\0",
        SPECIFIED[:-1] + b"\0",  # another public key than the seed makes
        b"\x08\x00\x12\x40" + SPECIFIED[4:],  # another kind of key
    ],
)
def test_bytes_that_are_no_key_are_refused(content: bytes) -> None:
    """Whatever the file holds instead of an Ed25519 key, the error is a ValueError."""
    with pytest.raises(ValueError, match="no Ed25519 key"):
        SigningKey.read(content)
