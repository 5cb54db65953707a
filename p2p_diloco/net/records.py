"""The rules for DHT records: which records may be stored or read, and which of several records with the same name is
used.

Law: bytes in, a verdict out; no socket.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from functools import lru_cache

import msgpack
from cryptography.hazmat.primitives import serialization

from p2p_diloco.net.hivemind_library import DHTProtocol, DHTRecord, RSAPrivateKey, RSASignatureValidator
from p2p_diloco.net.interface import CLOCK_DIFFERENCE_S_MAX, KEY_BYTES_MAX, TTL_S_MAX, VALUE_BYTES_MAX
from p2p_diloco.net.signing import SigningKey, peer_id_of

log = logging.getLogger(__name__)

_SIGNATURE_BYTES = 400  # of a 2048-bit RSA key in base64, with its marker
_OWNER_BYTES = 420  # the public key in OpenSSH's form, with its marker
_OWNED = re.compile(rb"(?P<name>.*?)\[owner:(?P<key>.+?)\]", re.DOTALL)
_PEER_ID = re.compile(r"Qm[1-9A-HJ-NP-Za-km-z]{44}|12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")


class SignedRecords(RSASignatureValidator):  # type: ignore[misc]  # Hivemind has no types
    """Checks each record that this peer reads, or stores for other peers. A valid record is small, short-lived and
    well-formed; if it has an owner, it has the owner's signature.

    Values without a subkey are refused: they have no owner, and one with a late expiration would displace all records
    under its key. Values that don't decode are refused too, because Hivemind's own reader would hang on them.
    """

    @classmethod
    def of(cls, key: SigningKey) -> SignedRecords:
        """Make a validator that signs this peer's own records with this key."""
        theirs = RSAPrivateKey.__new__(RSAPrivateKey)
        theirs.__setstate__({"_private_key": key.der})
        return cls(theirs)

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is valid. Only valid records are read, or stored for other peers."""
        try:
            return self._within_limits(record) and bool(super().validate(record)) and self._decodes(record)
        except Exception as error:  # the parsers raise exceptions of many kinds for a stranger's bytes
            log.debug("ignored a DHT record that can't be parsed: %r", error)
            return False

    def _within_limits(self, record: DHTRecord) -> bool:
        return (
            record.subkey not in (DHTProtocol.IS_REGULAR_VALUE, DHTProtocol.IS_DICTIONARY)
            and len(record.subkey) <= KEY_BYTES_MAX + _OWNER_BYTES
            and len(record.value) <= VALUE_BYTES_MAX + _SIGNATURE_BYTES
            and record.expiration_time <= time.time() + TTL_S_MAX + CLOCK_DIFFERENCE_S_MAX
        )

    def _decodes(self, record: DHTRecord) -> bool:
        name, value = msgpack.unpackb(record.subkey), msgpack.unpackb(self.strip_value(record))
        return isinstance(name, bytes) and isinstance(value, bytes) and len(value) <= VALUE_BYTES_MAX


def newest_records(found: Mapping[bytes, tuple[bytes, float]]) -> dict[str, tuple[bytes, float]]:
    """Select the live records among those found under one key; returns name -> (value, expiration in seconds since
    1970). Of several records with the same name, only the one that expires last is returned.

    A record whose name is a peer id, or starts with one and a slash, counts only if that peer owns it.

    Args:
        found: subkey, with the owner's marker if it has one -> (value, expiration).
    """
    newest: dict[str, tuple[bytes, float]] = {}
    now = time.time()
    for subkey, (value, until) in found.items():
        owned = _OWNED.fullmatch(subkey)
        try:
            name = (owned["name"] if owned else subkey).decode()
            owner = _peer_of_key(owned["key"]) if owned else ""
        except ValueError:
            continue
        named = name.partition("/")[0]
        foreign = _PEER_ID.fullmatch(named) is not None and named != owner
        if until > now and not foreign and until > newest.get(name, (b"", now))[1]:
            newest[name] = (value, until)
    return newest


@lru_cache(maxsize=1024)
def _peer_of_key(key: bytes) -> str:
    """The id of the peer that has this public key (in OpenSSH's form)."""
    der, public = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return peer_id_of(serialization.load_ssh_public_key(key).public_bytes(der, public))
