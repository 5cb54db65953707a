"""The DHT records that this peer stores for others: as many as fit, whatever strangers send.

Law: decides only which records are kept, and for how long; `records` says which are valid. All records under one key
fit into one message of the DHT. If there is no room, the records that expire last are dropped: the records of honest
peers live for seconds or minutes and are stored again and again, while junk must live long to take room for long.
"""

from __future__ import annotations

import heapq
from typing import Any

from p2p_diloco.net.hivemind_library import DHTLocalStorage, DictionaryDHTValue

RECORDS_PER_KEY_MAX = 1024
"""The most records under one key. Each has at most 1.9 KB with its name, its signature and its owner, so together they
have at most 2 MB; one message carries 4 MiB."""
RECORDS_MAX = 16 * 1024
"""The most records under all keys together: at most 31 MB, and usually far less."""
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
