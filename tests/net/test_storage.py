"""What strangers store in the DHT takes bounded memory, and does not displace the records of a run."""

from __future__ import annotations

import time
from typing import Any

import pytest

from p2p_diloco.net.hivemind_library import DHTID
from p2p_diloco.net.records import CappedStorage, NoCache


def names(stored: Any, number: int) -> set[Any]:
    found = stored.get(DHTID(number))
    return set() if found is None else set(found.value.data)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("RECORDS_PER_KEY_MAX", 64), ("RECORDS_MAX", 512), ("GHOSTS_MAX", 16)):
        monkeypatch.setattr(f"p2p_diloco.net.records.{name}", limit)


def test_junk_under_a_key_leaves_its_short_lived_records() -> None:
    """Those that expire last make room, however many come."""
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


def test_junk_under_many_keys_is_bounded() -> None:
    """The count of all records stays bounded, and short-lived ones stay; the keys without records go."""
    stored, now = CappedStorage(), time.time()
    stored.store(DHTID(0), b"value", now + 30, subkey=b"mine")
    for number in range(1, 5000):
        stored.store(DHTID(number), b"junk", now + 3600, subkey=b"junk")
    assert len(stored.data) <= 512
    assert names(stored, 0) == {b"mine"}


def test_storing_the_same_again_and_again_takes_no_memory() -> None:
    """Hivemind's heap would keep an entry for each."""
    stored, now = CappedStorage(), time.time()
    for index in range(5000):
        stored.store(DHTID(1), b"value", now + 30 + index / 1000, subkey=b"mine")
    under = stored.get(DHTID(1)).value
    assert len(under.expiration_heap) <= 2 + 16 + 1
    assert len(stored.expiration_heap) <= 2 + 16 + 1
    assert under.get(b"mine").expiration_time == now + 30 + 4.999


def test_records_expire_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after room was made, and after the heap was made anew."""
    stored, now = CappedStorage(), time.time()
    for index in range(200):
        stored.store(DHTID(1), b"value", now + 10 + index, subkey=b"%d" % index)
    kept = names(stored, 1)
    assert b"0" in kept
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now + 20)
    assert b"0" not in dict(stored.get(DHTID(1)).value.items())
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", lambda: now + 1000)
    assert stored.get(DHTID(1)) is None


def test_only_records_with_a_name_are_stored_and_no_cache_hides_them() -> None:
    """A value without a name would replace all records under its key; a cached one would be found in their place."""
    stored, cache, later = CappedStorage(), NoCache(), time.time() + 60
    assert not stored.store(DHTID(1), b"value", later)
    assert not cache.store(DHTID(1), b"value", later, subkey=b"name")
    assert not cache.store_subkey(DHTID(1), b"name", b"value", later)
    assert (len(stored), len(cache)) == (0, 0)
