"""Signed statements: their bytes, their Ed25519 signatures by a peer's identity or another key, and keys derived from a
secret.

Law: works on keys and bytes only: uses no file, no socket and no Hivemind. A tuple has exactly one packed form. A
signature for one kind of statement is not valid for any other kind. A peer's id contains its public key, so a signature
needs nothing but the id to be checked, and any peer can pass it on. (Ed25519 keys, and ids, as libp2p's peer-ids
specification has them.)
"""

from __future__ import annotations

import os
import re
from base64 import b64decode, b64encode
from functools import lru_cache

import base58
import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

PEER_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
"""The form of a peer id."""
SIGNATURE_BYTES = 64

# How libp2p's protobuf of a key begins: type Ed25519, then the length. Seed and public key follow in a private key's. A
# peer id is the identity multihash of a public key's protobuf, in base58.
_PRIVATE = b"\x08\x01\x12\x40"
_ID = b"\x00\x24\x08\x01\x12\x20"

# cached, because making a key object takes half as long as signing, and a quarter as long as checking
private_key = lru_cache(maxsize=8)(Ed25519PrivateKey.from_private_bytes)
public_key = lru_cache(maxsize=256)(Ed25519PublicKey.from_public_bytes)


class SigningKey:
    """The private key of a peer, made from its seed of 32 bytes."""

    def __init__(self, seed: bytes) -> None:
        public = public_of(seed)
        self._seed = seed
        self.content = _PRIVATE + seed + public
        """The content of the peer's identity file, which libp2p's daemon reads, too."""
        self.peer_id = peer_id_of(public)

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

    def pem(self, password: bytes) -> bytes:
        """The key as a PEM text, encrypted under a password."""
        encrypted = BestAvailableEncryption(password)
        return private_key(self._seed).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encrypted)


def peer_id_of(public: bytes) -> str:
    """The id of the peer with this public key."""
    return base58.b58encode(_ID + public).decode()


def key_in(peer_id: str) -> bytes:
    """The public key in a peer id. Raises ValueError: it is no id of an Ed25519 key."""
    decoded = base58.b58decode(peer_id) if PEER_ID.fullmatch(peer_id) else b""
    if not decoded.startswith(_ID) or len(decoded) != len(_ID) + 32:
        raise ValueError(f"{peer_id} is no id of a peer")
    return decoded[len(_ID) :]


@lru_cache(maxsize=256)  # other peers repeat what they pass on: a revision comes with every probe
def signed_by(peer_id: str, signature: bytes, kind: bytes, statement: bytes) -> bool:
    """Whether the peer with this id signed this statement of this kind."""
    try:
        return signed(key_in(peer_id), signature, kind, statement)
    except ValueError:
        return False


def sign(seed: bytes, kind: bytes, statement: bytes) -> bytes:
    """Sign a statement of this kind with the key that this seed of 32 bytes makes: 64 bytes."""
    return private_key(seed).sign(_to_sign(kind, statement))


def signed(public: bytes, signature: bytes, kind: bytes, statement: bytes) -> bool:
    """Whether the holder of this public key signed this statement of this kind."""
    try:
        public_key(public).verify(signature, _to_sign(kind, statement))
    except (InvalidSignature, ValueError):
        return False
    return True


def public_of(seed: bytes) -> bytes:
    """The public key, 32 bytes, of the private key that this seed makes."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def derived(secret: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes for one purpose (HKDF, RFC 5869). The key reveals neither the secret nor the keys for other
    purposes."""
    return HKDF(hashes.SHA256(), length=32, salt=None, info=b"p2p_diloco " + purpose).derive(secret)


def pack(*fields: object) -> bytes:
    """Pack a tuple of plain values."""
    packed: bytes = msgpack.packb(fields)
    return packed


def unpack(packed: bytes, count: int) -> list[object]:
    """The `count` fields of a packed tuple.

    Raises:
        ValueError: the bytes are not exactly as `pack` makes them, or have another number of fields.
    """
    try:
        fields = msgpack.unpackb(packed)
        same = isinstance(fields, list) and len(fields) == count and pack(*fields) == packed
    except Exception as error:  # the parser raises exceptions of many kinds
        raise ValueError(f"the bytes can't be read ({error})") from None
    if not same:
        raise ValueError("the bytes have another form")
    return list(fields)


def octets(value: object, length: int | None = None) -> bytes:
    """The value, which must be bytes, of this length if one is given. Raises ValueError."""
    if not isinstance(value, bytes) or length not in (None, len(value)):
        raise ValueError("a field has another type or length")
    return value


def as_text(value: bytes) -> str:
    """Bytes as base64."""
    return b64encode(value).decode()


def from_text(text: object, length: int | None = None) -> bytes:
    """The bytes of a base64 text, of this length if one is given. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("a field is no text")
    return octets(b64decode(text, validate=True), length)


def _to_sign(kind: bytes, statement: bytes) -> bytes:
    return b"p2p_diloco " + kind + b"\0" + statement
