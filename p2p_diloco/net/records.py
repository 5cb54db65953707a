"""The rules for DHT records: which records may be stored or read, and which of several records with the same name is
used.

Law: judges bytes, and uses no socket.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping

import msgpack

from p2p_diloco.net.hivemind_library import DHTProtocol, DHTRecord
from p2p_diloco.net.interface import CLOCK_DIFFERENCE_S_MAX, KEY_BYTES_MAX, TTL_S_MAX, VALUE_BYTES_MAX
from p2p_diloco.net.signing import PEER_ID, SIGNATURE_BYTES, SigningKey, octets, pack, signed_by

log = logging.getLogger(__name__)

_KIND = b"DHT record"
_PACKED_BYTES = 3  # what msgpack adds to bytes
_OWNED = re.compile(rb"(?P<name>.*)\[owner:(?P<peer>%b)\]" % PEER_ID.pattern.encode(), re.DOTALL)
_OWNER_BYTES = len("[owner:12D3KooW]") + 44


class SignedRecords:
    """Checks each record that this peer reads, or stores for other peers. A valid record is small, short-lived and
    well-formed; if its name says that a peer owns it, its value ends with that peer's signature.

    Values without a subkey are refused: they have no owner, and one with a late expiration would displace all records
    under its key. Values that don't decode are refused too, because Hivemind's own reader would hang on them.

    Hivemind calls `validate`, `sign_value` and `strip_value`, as it does with validators of its own.
    """

    def __init__(self, key: SigningKey) -> None:
        self._key = key

    def owned(self, name: bytes) -> bytes:
        """The subkey of a record with this name that this peer owns: the name, and a marker with this peer's id."""
        return b"%b[owner:%b]" % (name, self._key.peer_id.encode())

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is valid. Only valid records are read, or stored for other peers."""
        try:
            return self._within_limits(record) and self._signed(record) and self._decodes(record)
        except Exception as error:  # the parsers raise exceptions of many kinds for a stranger's bytes
            log.debug("ignored a DHT record that can't be parsed: %r", error)
            return False

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value of a record that this peer stores, with this peer's signature if this peer owns the record."""
        if _owner(record) != self._key.peer_id:
            return bytes(record.value)
        return bytes(record.value) + self._key.sign(_KIND, _statement(record, record.value))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value of a valid record without its signature."""
        return bytes(record.value if _owner(record) is None else record.value[:-SIGNATURE_BYTES])

    def _within_limits(self, record: DHTRecord) -> bool:
        return (
            record.subkey not in (DHTProtocol.IS_REGULAR_VALUE, DHTProtocol.IS_DICTIONARY)
            and len(record.subkey) <= KEY_BYTES_MAX + _OWNER_BYTES + _PACKED_BYTES
            and len(record.value) <= VALUE_BYTES_MAX + SIGNATURE_BYTES + _PACKED_BYTES
            and record.expiration_time <= time.time() + TTL_S_MAX + CLOCK_DIFFERENCE_S_MAX
        )

    def _signed(self, record: DHTRecord) -> bool:
        if (owner := _owner(record)) is None:
            return True
        value = self.strip_value(record)
        return signed_by(owner, bytes(record.value[len(value) :]), _KIND, _statement(record, value))

    def _decodes(self, record: DHTRecord) -> bool:
        return len(octets(msgpack.unpackb(self.strip_value(record)))) <= VALUE_BYTES_MAX


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
        except ValueError:
            continue
        named = name.partition("/")[0]
        foreign = PEER_ID.fullmatch(named) is not None and (owned is None or named != owned["peer"].decode())
        if until > now and not foreign and until > newest.get(name, (b"", now))[1]:
            newest[name] = (value, until)
    return newest


def _statement(record: DHTRecord, value: bytes) -> bytes:
    """What the owner of a record signs: its place, its value and its life. The name is unpacked, because Hivemind packs
    it anew when it passes the record on."""
    return pack(record.key, _name(record), value, float(record.expiration_time))


def _owner(record: DHTRecord) -> str | None:
    """The peer that owns a record; None: no peer owns it."""
    owned = _OWNED.fullmatch(_name(record))
    return owned["peer"].decode() if owned else None


def _name(record: DHTRecord) -> bytes:
    """The name of a record. Raises an exception if the record has none, or one that isn't bytes."""
    return octets(msgpack.unpackb(record.subkey))
