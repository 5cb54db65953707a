"""Which records of the DHT are believed, and that those of strangers take bounded memory, and displace none."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import msgpack
import pytest

from p2p_diloco.net.hivemind_library import DHTID, DHTRecord
from p2p_diloco.net.interface import KEY_BYTES_MAX, TTL_S_MAX, VALUE_BYTES_MAX
from p2p_diloco.net.records import CappedStorage, NoCache, SignedRecords, newest_records
from p2p_diloco.net.signing import SigningKey

KEY, OTHER_KEY = SigningKey(b"k" * 32), SigningKey(b"o" * 32)
ME = KEY.peer_id
SOON = time.time() + 86400  # from when the tests are collected, which may be an hour before they run
VALUE = msgpack.packb(b"1")


def record(name: object, value: bytes = VALUE, until: float = SOON, key: SigningKey = KEY) -> Any:
    """A record as the peer with this key stores it."""
    bare = DHTRecord(b"key", msgpack.packb(name), value, until)
    return dataclasses.replace(bare, value=SignedRecords(key).sign_value(bare))


def valid(given: Any) -> bool:
    """Whether a peer with another key believes the record."""
    return SignedRecords(OTHER_KEY).validate(given)


def owned(name: bytes) -> bytes:
    return SignedRecords(KEY).owned(name)


def test_records_are_believed_up_to_their_limits() -> None:
    """Plain ones, owned ones, and both with the longest name, value and life. What is read is what was stored."""
    longest = msgpack.packb(os.urandom(VALUE_BYTES_MAX))
    for name in (b"free", b"n" * KEY_BYTES_MAX, b""):
        for value in (VALUE, longest):
            for subkey in (name, owned(name)):
                given = record(subkey, value, until=time.time() + TTL_S_MAX)
                assert valid(given)
                assert SignedRecords(OTHER_KEY).strip_value(given) == value
    assert len(record(owned(b"n"), VALUE).value) == len(VALUE) + 64


def test_only_its_owner_can_change_a_record() -> None:
    """Another peer's signature, or the owner's of another record, is not believed; nor is none."""
    mine = record(owned(b"x"))
    assert valid(mine)
    assert not valid(record(owned(b"x"), key=OTHER_KEY))
    assert not valid(dataclasses.replace(mine, value=mine.value[:-64]))
    assert not valid(dataclasses.replace(mine, value=VALUE + OTHER_KEY.sign(b"DHT record", VALUE)))
    longer = b"\xc5" + len(owned(b"x")).to_bytes(2, "big") + owned(b"x")  # as a stranger may pack it, and Hivemind anew
    assert longer != mine.subkey
    assert valid(dataclasses.replace(mine, subkey=longer))
    for change in (
        {"key": b"another"},
        {"subkey": record(owned(b"y")).subkey},
        {"value": msgpack.packb(b"2") + mine.value[-64:]},
        {"expiration_time": SOON + 1},
    ):
        assert not valid(dataclasses.replace(mine, **change)), change


def test_invalid_records_are_not_believed() -> None:
    """Oversized, long-lived and undecodable ones, and those without a name."""
    too_long = msgpack.packb(bytes(VALUE_BYTES_MAX + 1))
    no_value = [record(b"free", value) for value in (too_long, b"\xc1 no msgpack", msgpack.packb(["a", "list"]))]
    other = record(owned(b"x"), too_long), record(b"free" * 500), record(b"free", until=time.time() + TTL_S_MAX + 60)
    assert not any(map(valid, (*no_value, *other)))
    mine = record(b"free")
    for name in (msgpack.packb(None), b"", b"\xc1", msgpack.packb("text"), msgpack.packb(7)):
        assert not valid(dataclasses.replace(mine, subkey=name))


def test_of_records_with_one_name_the_last_of_the_right_owner_is_read() -> None:
    """A record under a peer's id counts only if that peer owns it, whatever it expires; elsewhere the last one wins."""
    theirs = SignedRecords(OTHER_KEY).owned
    found = {
        owned(ME.encode()): (b"mine", SOON),
        theirs(ME.encode()): (b"forged", SOON + 9),
        ME.encode(): (b"forged", SOON + 9),
        owned(f"{ME}/part".encode()): (b"part", SOON),
        theirs(f"{ME}/part".encode()): (b"forged", SOON + 9),
        theirs(b"free"): (b"theirs", SOON + 1),
        b"free": (b"free", SOON),
        owned(b"gone"): (b"gone", time.time() - 1),
        b"\xff": (b"no text", SOON),
    }
    assert {name: value for name, (value, _) in newest_records(found).items()} == {
        ME: b"mine",
        f"{ME}/part": b"part",
        "free": b"theirs",
    }


# -- what strangers store


def names(stored: Any, number: int) -> set[Any]:
    found = stored.get(DHTID(number))
    return set() if found is None else set(found.value.data)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("RECORDS_PER_KEY_MAX", 64), ("RECORDS_MAX", 512), ("GHOSTS_MAX", 16)):
        monkeypatch.setattr(f"p2p_diloco.net.records.{name}", limit)


def test_what_strangers_store_takes_bounded_memory_and_displaces_no_record() -> None:
    # Junk under a key leaves its short-lived records. Those that expire last make room, however many come.
    stored, now = CappedStorage(), time.time()
    mine = {b"peer%d" % index for index in range(20)}
    for name in mine:
        assert stored.store(DHTID(1), b"value", now + 30, subkey=name)
    for index in range(1000):
        stored.store(DHTID(1), b"junk", now + 3600, subkey=b"junk%d" % index)
        assert len(names(stored, 1)) <= 64
    assert mine <= names(stored, 1)
    assert stored.store(DHTID(1), b"renewed", now + 60, subkey=b"peer0")
    assert stored.get(DHTID(1)).value.get(b"peer0").value == b"renewed"

    # Junk under many keys is bounded. The count of all records stays bounded, and short-lived ones stay; the keys
    # without records go.
    stored, now = CappedStorage(), time.time()
    for number in range(5000):
        stored.store(DHTID(number), b"value", now + (3600 if number else 30), subkey=b"name")
    assert len(stored.data) <= 512
    assert names(stored, 0) == {b"name"}

    # Storing the same again and again takes no memory. Hivemind's heap would keep an entry for each.
    stored, now = CappedStorage(), time.time()
    for index in range(5000):
        stored.store(DHTID(1), b"value", now + 30 + index / 1000, subkey=b"mine")
    under = stored.get(DHTID(1)).value
    assert len(under.expiration_heap) <= 2 + 16 + 1
    assert len(stored.expiration_heap) <= 2 + 16 + 1
    assert under.get(b"mine").expiration_time == now + 30 + 4.999

    # Only records with a name are stored and no cache hides them. A value without a name would replace all
    # records under its key; a cached one would be found in their place.
    stored, cache, later = CappedStorage(), NoCache(), time.time() + 60
    assert not stored.store(DHTID(1), b"value", later)
    assert not cache.store(DHTID(1), b"value", later, subkey=b"name")
    assert not cache.store_subkey(DHTID(1), b"name", b"value", later)
    assert (len(stored), len(cache)) == (0, 0)
