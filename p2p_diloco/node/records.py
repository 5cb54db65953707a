"""What peers say of themselves in the DHT, for newcomers and observers. No decision hangs on it alone.

Law: a record is a msgpack map with exactly the keys of `PeerRecord`, at most `VALUE_BYTES_MAX` bytes, under
the subkey of its peer's id. What comes from others is read as data from strangers: left out where it isn't
one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgpack

from p2p_diloco.net.interface import VALUE_BYTES_MAX, Transport

BUCKETS = 4
"""Keys that the records of a run are spread over: all records of a key travel together."""

PEER_TTL_S = 30.0
PUBLISH_EVERY_S = 2.0
PUBLISH_AT_LEAST_EVERY_S = 10.0
LOOK_EVERY_S = 1.5
LOOK_EVERY_LATER_S = 10.0
YOUNG_S = 60.0
"""So long after its start a peer looks often for others, and for ever while it knows few."""
FEW = 8

AGG_MAX, EVENTS_MAX, EVENT_LETTERS_MAX, ADDRESSES_MAX = 16, 3, 80, 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """One peer's record."""

    v: int
    peer_id: str
    name: str
    host: str
    role: str
    state: str
    """joining, training, waiting, paused, idle, leaving or finished."""
    epoch: int
    """The lowest over its shards; -1 while it holds no state."""
    step: int
    sps: float
    """Inner steps a second; 0 until known."""
    loss: float | None
    samples: int
    sent: int
    """Bytes."""
    recv: int
    """Bytes."""
    wait_s: float
    bw: int
    """What its link carries, the slower direction, in bytes a second; 0 until known."""
    spent: list[int]
    """What became of its last round's time (`ledger.SHARES`), in thousandths; all 0 before one is over."""
    ways: dict[str, int]
    """To how many of the live peers the newest payload went "direct", to how many over "libp2p", and to how many
    "relayed" by a third peer; what is 0 is left out."""
    rev: list[float]
    """[the lowest revision over its shards, its outer_lr and outer_momentum, the highest that it has heard of]."""
    agg: list[int]
    """Shards that it aggregates now, at most AGG_MAX; `agg_n`: all of them."""
    agg_n: int
    round: list[int] | None
    """[fragment, contributions that came, contributions expected] of a round that it aggregates."""
    h: int
    """H of this peer: inner steps between two of its exchanges of the whole model; with dylu or pace="time" its own, as
    it last made them."""
    subs: list[int]
    """Its submissions: [counted, not counted]; empty in synchronous mode."""
    stale: list[int]
    """Of those that were counted, how many in each bin of `submissions.STALENESS_FROM`; empty bins at the end are left
    out."""
    fill: list[int]
    """The least and the most submissions in the Delayed Nesterov buffers of the shards that it aggregates; or empty."""
    addrs: list[str]
    life: int
    """What tells this start of the peer from any other; greater is later, as clocks go."""
    time: float
    """When it was written, in seconds since 1970."""
    events: list[list[Any]]
    """[time, text], oldest first."""

    def pack(self) -> bytes:
        """The record's bytes; what doesn't fit is left out: events first, then addresses, then shards."""
        content = {name: getattr(self, name) for name in self.__slots__}
        content["agg"] = self.agg[:AGG_MAX]
        content["events"] = [[when, text[:EVENT_LETTERS_MAX]] for when, text in self.events[-EVENTS_MAX:]]
        content["addrs"] = self.addrs[:ADDRESSES_MAX]
        while len(value := msgpack.packb(content)) > VALUE_BYTES_MAX:
            trimmed = next(key for key in ("events", "addrs", "agg") if content[key])
            content[trimmed] = content[trimmed][1:] if trimmed == "events" else content[trimmed][:-1]
        return bytes(value)


def key_of(run_id: str, peer_id: str) -> str:
    """The DHT key that a peer's record is kept under."""
    return bucket_key(run_id, blake2b(peer_id.encode(), digest_size=1).digest()[0] % BUCKETS)


def bucket_key(run_id: str, bucket: int) -> str:
    """The DHT key of a bucket of records."""
    return f"{run_id}/peers/{bucket}"


async def read_peers(transport: Transport, run_id: str) -> dict[str, dict[str, Any]]:
    """The records of a run's peers, by peer id, as maps of whatever their writers put in (peer_id is right).

    What the DHT doesn't answer for is left out.
    """
    found = await asyncio.gather(
        *(transport.fetch(bucket_key(run_id, bucket)) for bucket in range(BUCKETS)), return_exceptions=True
    )
    peers: dict[str, dict[str, Any]] = {}
    for records in found:
        if isinstance(records, Exception):
            log.debug("some records of peers can't be read: %r", records)
            continue
        if isinstance(records, BaseException):
            raise records
        for peer_id, (value, _) in records.items():
            try:
                content = msgpack.unpackb(value)
            except (ValueError, msgpack.UnpackException):
                continue
            if isinstance(content, dict) and content.get("peer_id") == peer_id:
                peers[peer_id] = content
    return peers


async def who_takes_part(transport: Transport, run_id: str) -> dict[str, float]:
    """Whose records say that they take part in rounds, and when these were written, in seconds since 1970."""
    times = {}
    for peer, record in (await read_peers(transport, run_id)).items():
        match record:
            case {"state": "training" | "waiting" | "paused" | "idle", "time": float(when)}:
                times[peer] = when
    return times


def addresses_in(record: dict[str, Any]) -> list[str]:
    """The addresses in a record that may be anything."""
    addresses = record.get("addrs")
    return [a for a in addresses if isinstance(a, str)] if isinstance(addresses, list) else []


async def publish(transport: Transport, run_id: str, describe: Callable[[], PeerRecord]) -> None:
    """Keep this peer's record up to date until cancelled."""
    published: PeerRecord | None = None
    while True:
        record = describe()
        if published is None or record.time - published.time >= PUBLISH_AT_LEAST_EVERY_S or _changed(record, published):
            try:
                taken = await transport.store(key_of(run_id, record.peer_id), record.peer_id, record.pack(), PEER_TTL_S)
            except Exception:  # a run is not to end over what observers see
                log.warning("this peer's record can't be stored", exc_info=True)
            else:
                log.debug("this peer's record was %s", "stored" if taken else "not taken")
            published = record
        await asyncio.sleep(PUBLISH_EVERY_S)


def _changed(record: PeerRecord, published: PeerRecord) -> bool:
    """Whether two records differ in more than their time."""
    return dataclasses.replace(record, time=published.time) != published


async def look_around(
    transport: Transport,
    run_id: str,
    discovered: Callable[[str, str], None],
    known: Callable[[], int],
    seen: Callable[[list[str]], None] = lambda addresses: None,
    own: Callable[[dict[str, Any]], None] = lambda record: None,
) -> None:
    """Report whoever has a record, by id and name, at every look until cancelled: it may have been forgotten since the
    last one. Addresses that are new are introduced to the transport first.

    `known` tells how many live peers this one knows; `seen` hears of addresses that are new, `own` of the record under
    this peer's own id, and may raise.
    """
    clock = asyncio.get_running_loop().time
    young_until = clock() + YOUNG_S
    addresses_of: dict[str, list[str]] = {}
    while True:
        for peer_id, record in (await read_peers(transport, run_id)).items():
            addresses = addresses_in(record)
            if peer_id == transport.peer_id:
                own(record)
                continue
            if addresses_of.get(peer_id) != addresses:
                seen(addresses)
                try:
                    await transport.introduce(peer_id, addresses)
                except Exception:  # one peer's odd record hides no other
                    log.warning("the addresses of %s can't be used", peer_id, exc_info=True)
            addresses_of[peer_id] = addresses
            discovered(peer_id, str(record.get("name", ""))[:64])
        often = clock() < young_until or known() < FEW
        await asyncio.sleep(LOOK_EVERY_S if often else LOOK_EVERY_LATER_S)


def now() -> float:
    """Seconds since 1970, for records."""
    return time.time()
