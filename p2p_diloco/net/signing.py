"""Signs statements with a peer's identity, and checks such signatures.

Law: works on keys and bytes only: uses no file, no socket and no Hivemind. A peer's id contains its public key, so a
signature needs nothing but the id to be checked, and any peer can pass it on. (Ed25519 keys, and ids, as libp2p's
peer-ids specification has them.)
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

import base58

from p2p_diloco.net.statements import public_of, sign, signed

PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
"""The form of a peer id."""
SIGNATURE_BYTES = 64

# How libp2p's protobuf of a key begins: type Ed25519, then the length. Seed and public key follow in a private key's. A
# peer id is the identity multihash of a public key's protobuf, in base58.
_PRIVATE = b"\x08\x01\x12\x40"
_ID = b"\x00\x24\x08\x01\x12\x20"


class SigningKey:
    """The private key of a peer, made from its seed of 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        public = public_of(seed)
        self._seed = seed
        self.content = _PRIVATE + seed + public
        """The content of the peer's identity file, which libp2p's daemon reads, too."""
        self.peer_id = base58.b58encode(_ID + public).decode()

    @classmethod
    def create(cls) -> SigningKey:
        return cls(os.urandom(32))

    @classmethod
    def read(cls, content: bytes) -> SigningKey:
        """Read the content of an identity file.

        Raises:
            ValueError: it holds no Ed25519 key.
        """
        seed = content[len(_PRIVATE) :][:32]
        if len(seed) < 32 or (key := cls(seed)).content != content:
            raise ValueError("no Ed25519 key")
        return key

    def sign(self, kind: bytes, statement: bytes) -> bytes:
        """Sign a statement of this kind: `SIGNATURE_BYTES` bytes."""
        return sign(self._seed, kind, statement)


@lru_cache(maxsize=256)  # other peers repeat what they pass on: a revision comes with every probe
def signed_by(peer_id: str, signature: bytes, kind: bytes, statement: bytes) -> bool:
    """Whether the peer with this id signed this statement of this kind."""
    if PEER_ID.fullmatch(peer_id) is None:
        return False
    decoded = base58.b58decode(peer_id)
    return decoded.startswith(_ID) and signed(decoded[len(_ID) :], signature, kind, statement)
