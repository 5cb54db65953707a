"""Which records of the DHT are believed."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import msgpack

from p2p_diloco.net.hivemind_library import DHTRecord
from p2p_diloco.net.interface import KEY_BYTES_MAX, TTL_S_MAX, VALUE_BYTES_MAX
from p2p_diloco.net.records import SignedRecords, newest_records
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
    for change in (
        {"key": b"another"},
        {"subkey": record(owned(b"y")).subkey},
        {"value": msgpack.packb(b"2") + mine.value[-64:]},
        {"expiration_time": SOON + 1},
    ):
        assert not valid(dataclasses.replace(mine, **change)), change


def test_a_name_may_be_packed_anew_on_its_way() -> None:
    """Hivemind unpacks and packs names when it passes records on, so a stranger's odd packing can't spoil a record."""
    mine = record(owned(b"x"))
    longer = b"\xc5" + len(owned(b"x")).to_bytes(2, "big") + owned(b"x")
    assert longer != mine.subkey
    assert valid(dataclasses.replace(mine, subkey=longer))


def test_invalid_records_are_not_believed() -> None:
    """Oversized, long-lived and undecodable ones, and those without a name."""
    assert not valid(record(b"free", msgpack.packb(bytes(VALUE_BYTES_MAX + 1))))
    assert not valid(record(owned(b"x"), msgpack.packb(bytes(VALUE_BYTES_MAX + 1))))
    assert not valid(record(b"free" * 500))
    assert not valid(record(b"free", until=time.time() + TTL_S_MAX + 60))
    assert not valid(record(b"free", b"\xc1 no msgpack"))
    assert not valid(record(b"free", msgpack.packb(["a", "list"])))
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
