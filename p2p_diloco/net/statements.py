"""Signed statements: their bytes, their Ed25519 signatures, and keys derived from a secret.

Law: works on keys and bytes only. A tuple has exactly one packed form. A signature for one kind of statement is not
valid for any other kind.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from functools import lru_cache

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_SECONDS_MAX = 2**53
# cached, because making a key object takes half as long as signing, and a quarter as long as checking
_private_key = lru_cache(maxsize=8)(Ed25519PrivateKey.from_private_bytes)
_public_key = lru_cache(maxsize=256)(Ed25519PublicKey.from_public_bytes)


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


def moment(value: object) -> int:
    """The value, which must be a time in whole seconds since 1970. Raises ValueError."""
    if type(value) is not int or not 0 <= value < _SECONDS_MAX:
        raise ValueError("a field is no time")
    return value


def sign(seed: bytes, kind: bytes, statement: bytes) -> bytes:
    """Sign a statement of this kind with the key that this seed of 32 bytes makes: 64 bytes."""
    return _private_key(seed).sign(_to_sign(kind, statement))


def signed(public: bytes, signature: bytes, kind: bytes, statement: bytes) -> bool:
    """Whether the holder of this public key signed this statement of this kind."""
    try:
        _public_key(public).verify(signature, _to_sign(kind, statement))
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
