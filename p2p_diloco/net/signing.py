"""Signs statements with a peer's identity. The proof that a peer has made a statement can be passed on, and any peer
can check it.

Law: keys and bytes; no socket, no DHT, no Hivemind. A proof is text: the public key and the signature, each in base64.
A peer's id is a hash of its public key, so a proof needs no further authority. (libp2p's peer-ids specification; keys
as `P2P.generate_identity` makes them, 2048-bit RSA.)
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from functools import lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import base58
import varint
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey

from p2p_diloco.errors import ConfigError

PROOF_LETTERS_MAX = 1000
"""A longer proof isn't checked. With a 2048-bit key a proof has 737."""

_PADDING, _HASH = padding.PKCS1v15(), hashes.SHA256()  # deterministic: the same statement gives the same proof
_RSA_PRIVATE = b"\x08\x00\x12"  # libp2p's protobuf: the kind of key, then the length of its bytes, then these


class SigningKey:
    """The private key of a peer, from its identity file."""

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        """Read the key from the identity file at `path`, or from `content` if that is given. The file may be in use by
        a running peer.

        Raises:
            ConfigError: the file can't be read, or holds no such key.
        """
        try:
            content = path.read_bytes() if content is None else content
        except OSError as error:
            mend = "name the file that the peer was started with"
            wrong = f"can't be read ({error.strerror})"
            raise ConfigError(wrong, key="identity_path", value=path, mend=mend) from None
        try:
            self.der = _data_of(content)
            key = serialization.load_der_private_key(self.der, password=None)
        except Exception:  # the parsers raise exceptions of many kinds
            key = None
        if not isinstance(key, RSAPrivateKey):
            mend = "name the file that --identity-path made"
            raise ConfigError("holds no RSA key of a peer", key="identity_path", value=path, mend=mend)
        self._key = key
        self._public = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.peer_id = peer_id_of(self._public)

    def sign(self, statement: bytes) -> str:
        """Sign a statement with this key; returns the proof, as text, that this peer has made the statement."""
        signature = self._key.sign(statement, _PADDING, _HASH)
        return f"{b64encode(self._public).decode()}.{b64encode(signature).decode()}"


@lru_cache(maxsize=64)
def signer(statement: bytes, proof: str) -> str | None:
    """Check the proof of a statement; returns the id of the peer that made it, or None if the proof is invalid."""
    if len(proof) > PROOF_LETTERS_MAX:
        return None
    public, _, signature = proof.partition(".")
    try:
        encoded = b64decode(public, validate=True)
        key = serialization.load_der_public_key(encoded)
        if not isinstance(key, RSAPublicKey):
            return None
        key.verify(b64decode(signature, validate=True), statement, _PADDING, _HASH)
    except Exception:  # a wrong signature, or any exception of a parser for a stranger's bytes
        return None
    return peer_id_of(encoded)


def _data_of(content: bytes) -> bytes:
    """Take the key's DER bytes out of libp2p's protobuf. With any other content this raises an error, or returns bytes
    that are no key."""
    if not content.startswith(_RSA_PRIVATE):
        raise ValueError("no RSA key")
    rest = BytesIO(content[len(_RSA_PRIVATE) :])
    return rest.read(varint.decode_stream(rest))


def peer_id_of(public: bytes) -> str:
    """Compute the id of the peer with this public key (DER). The id is the multihash of libp2p's protobuf of the key,
    in base58."""
    digest = sha256(_RSA_PRIVATE + varint.encode(len(public)) + public).digest()
    return base58.b58encode(b"\x12\x20" + digest).decode()
