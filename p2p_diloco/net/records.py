"""The DHT records that this peer reads, or stores for others: which are valid, which of several with the same name is
used, and how many are kept, whatever strangers send.

Law: uses no socket. All records under one key fit into one message of the DHT. If there is no room, the records that
expire last are dropped: the records of honest peers live for seconds or minutes and are stored again and again, while
junk must live long to take room for long.
"""

from __future__ import annotations

import heapq
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import msgpack

from p2p_diloco.net.hivemind_library import DHTLocalStorage, DHTProtocol, DHTRecord, DictionaryDHTValue
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


RECORDS_PER_KEY_MAX = 1024
"""The most records under one key. Each has at most 2.5 KB with its name, its signature and its owner, so together they
have at most 2.5 MB; one message carries 4 MiB."""
RECORDS_MAX = 16 * 1024
"""The most records under all keys together: at most 40 MB, and usually far less."""
MADE_ROOM_PART = 8
"""Room is made for RECORDS_MAX / MADE_ROOM_PART records at a time. So a flood of records causes a sort of all of them
only now and then."""
GHOSTS_MAX = 1024
"""Each time a record is stored again, Hivemind leaves an old entry in its heap. Once there are about this many old
entries, the heap is made anew."""


class CappedStorage(DHTLocalStorage):  # type: ignore[misc]  # Hivemind has no types
    """Hivemind's storage with limits. Values without a subkey aren't stored (see `SignedRecords`)."""

    def __init__(self) -> None:
        super().__init__()
        self._since_counted = 0

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is None and not isinstance(value, DictionaryDHTValue):
            return False
        stored = bool(super().store(key, value, expiration_time, subkey))
        _forget_ghosts(self)
        return stored

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        stored = bool(super().store_subkey(key, subkey, value, expiration_time))
        if (found := self.data.get(key)) is not None:
            _forget_ghosts(found.value)
            if len(found.value.data) > RECORDS_PER_KEY_MAX:
                _make_room([found.value], RECORDS_PER_KEY_MAX // MADE_ROOM_PART)
        self._since_counted += stored
        if self._since_counted > RECORDS_MAX // MADE_ROOM_PART:
            self._count()
        return stored

    def _count(self) -> None:
        """Count all records, and make room for those that will come before the next count."""
        self._since_counted = 0
        dictionaries = [under.value for _, under in self.items()]
        count = sum(len(dictionary.data) for dictionary in dictionaries)
        if (excess := count - RECORDS_MAX + 2 * RECORDS_MAX // MADE_ROOM_PART) > 0:
            _make_room(dictionaries, excess)
            for key in [key for key, under in self.data.items() if not under.value.data]:
                del self[key]


class NoCache(DHTLocalStorage):  # type: ignore[misc]
    """Takes the place of Hivemind's cache, and stores nothing. Any peer may write into that cache, and what is in it
    hides the stored records."""

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return False

    def store_subkey(self, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        return False


def _make_room(dictionaries: list[Any], count: int) -> None:
    """Drop `count` of the records in these dictionaries: those that expire last."""
    until = sorted(record.expiration_time for dictionary in dictionaries for record in dictionary.data.values())[-count]
    for dictionary in dictionaries:
        for name in [name for name, record in dictionary.data.items() if record.expiration_time >= until][:count]:
            del dictionary[name]
            count -= 1


def _forget_ghosts(storage: Any) -> None:
    """Remove the heap's entries for records that were replaced or dropped, once there are many."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + GHOSTS_MAX:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
