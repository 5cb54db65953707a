"""What strangers may send this peer over the DHT, and what their requests may cost: which records are valid, which of
several with the same name is used, how many are kept, and how many requests are answered.

Law: uses no socket. All records under one key fit into one message of the DHT. If there is no room, the records that
expire last are dropped: the records of honest peers live for seconds or minutes and are stored again and again, while
junk must live long to take room for long. Honest requests are answered as Hivemind answers them: this package asks for
one key at a time.
"""

from __future__ import annotations

import heapq
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

import msgpack

from p2p_diloco.net.hivemind_library import DHTLocalStorage, DHTProtocol, DHTRecord, DictionaryDHTValue, dht_pb2
from p2p_diloco.net.interface import CLOCK_DIFFERENCE_S_MAX, KEY_BYTES_MAX, TTL_S_MAX, VALUE_BYTES_MAX
from p2p_diloco.net.shares import ASKERS_MAX, Budget
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


KEYS_MAX = 4
"""The most keys that one request may ask for."""
STORED_KEYS_MAX, STORED_BYTES_MAX = 256, 2**20
"""The most keys and bytes of one request to store records. Hivemind hands over to a new member what that one is to
keep; if that is more, the new member gets it from those that store it anew."""
FOUND_BYTES_MAX = 3 * 2**20
"""The most bytes of one answer; a message carries 4 MiB."""
BYTES_PER_S, BURST_BYTES = 4 * 2**20, 16 * 2**20
"""What one member may get: so many bytes a second, and so many at once."""
CPU_S_PER_S, BURST_CPU_S = 0.1, 0.5
"""What the requests of one member may cost this peer: so much processor time a second, and so much at once."""
IDS_MAX, IDS_S = 4, 60.0
"""How often a member may have another id of the DHT in so many seconds. It has one for each of its starts."""

Handler = Callable[[Any, Any, Any], Awaitable[Any]]


class Ids:
    """Which id of the DHT each member has. One that invented many, all nearer to some keys than any other member's,
    would be the only one that is asked for these keys; and each new id has this peer hand over what it stores."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[str, tuple[bytes, list[float]]] = {}  # by member: its id, and when it got each of its last ones

    def has(self, sender: str, node_id: bytes) -> bool:
        """Whether a member has this id, or may have it from now on."""
        last, changed = self._of.get(sender, (b"", []))
        if node_id == last:
            return True
        lately = [when for when in changed if self._clock() - when < IDS_S]
        if len(lately) >= IDS_MAX:
            return False
        if len(self._of) >= ASKERS_MAX:
            self._of.clear()
        self._of[sender] = node_id, [*lately, self._clock()]
        return True

    def admits(self, victim: Any, request: Any, context: Any) -> bool:
        """Whether the sender of a request to a member, `victim`, may have the id that it names. From then on it is in
        the routing table under this id alone."""
        if not (node_id := request.peer.node_id):
            return True
        if not self.has(str(context.remote_id), node_id):
            return False
        before = victim.routing_table.get(peer_id=context.remote_id)
        if before is not None and before.to_bytes() != node_id:
            del victim.routing_table[before]
        return True


def pinged(ping: Handler, ids: Ids) -> Handler:
    """Hivemind's handler of pings. A sender that may not have its id is answered, and not met."""

    @wraps(ping)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        return await ping(self, request if ids.admits(self, request, context) else dht_pb2.PingRequest(), context)

    return answer


def cheap(handler: Handler, budget: Budget, ids: Ids) -> Handler:
    """One of Hivemind's handlers that wait for nothing, with a limit of each sender's processor time. A request beyond
    it, or of a sender that may not have its id, is answered with an error."""

    @wraps(handler)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        sender = str(context.remote_id)
        if budget.left(sender, time.monotonic()) <= 0:
            raise ValueError("the sender's requests have cost too much lately")
        if not ids.admits(self, request, context):
            raise ValueError("the sender has had too many ids lately")
        began = time.thread_time()
        try:
            return await handler(self, request, context)
        finally:
            budget.spend(sender, time.thread_time() - began, time.monotonic())

    return answer


def bounded(find: Handler, budget: Budget) -> Handler:
    """Hivemind's handler of requests for keys, with limits. A key that is named again and again is looked up once. A
    request beyond a limit is answered with an error."""

    @wraps(find)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        keys, sender = list(dict.fromkeys(request.keys)), str(context.remote_id)
        if len(keys) > KEYS_MAX:
            raise ValueError(f"the request names {len(keys)} keys, at most {KEYS_MAX} are allowed")
        if budget.left(sender, time.monotonic()) <= 0:
            raise ValueError("the sender has asked for too much lately")
        answered = await find(self, dht_pb2.FindRequest(keys=keys, peer=request.peer), context)
        budget.spend(sender, nbytes := answered.ByteSize(), time.monotonic())
        if nbytes > FOUND_BYTES_MAX:
            raise ValueError(f"the records under these keys have {nbytes} bytes, at most {FOUND_BYTES_MAX} are sent")
        return answered

    return answer


def few(store: Handler) -> Handler:
    """Hivemind's handler of requests to store records, with a limit of each: it checks all before it does anything
    else."""

    @wraps(store)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        if len(request.keys) > STORED_KEYS_MAX or request.ByteSize() > STORED_BYTES_MAX:
            raise ValueError(f"at most {STORED_KEYS_MAX} keys and {STORED_BYTES_MAX} bytes are stored at once")
        return await store(self, request, context)

    return answer


def bound_requests() -> None:
    """Set the limits for all members of the DHT in this process. Hivemind registers its handlers by the name of their
    class, so no subclass could take the class's place."""
    if not hasattr(DHTProtocol.rpc_find, "__wrapped__"):
        cpu, ids = Budget(BURST_CPU_S, CPU_S_PER_S), Ids()
        found = bounded(DHTProtocol.rpc_find, Budget(BURST_BYTES, BYTES_PER_S))
        DHTProtocol.rpc_find = cheap(found, cpu, ids)
        DHTProtocol.rpc_store = cheap(few(DHTProtocol.rpc_store), cpu, ids)
        DHTProtocol.rpc_ping = pinged(DHTProtocol.rpc_ping, ids)
