"""Boards: the records of a run in the DHT. A board holds those of one kind: it stores them, keeps them alive, reads the
newest valid ones, and watches for newer ones.

Law: records come from strangers. Any bytes give a value of the requested type or a ValueError. A record that no peer
owns is named by its content, so any peer can keep it alive; one of another name, or that can't be read, is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from random import sample
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from p2p_diloco.errors import P2PDilocoError, printable
from p2p_diloco.net.interface import Records, Unreachable
from p2p_diloco.node.wire import PROTOCOL

if TYPE_CHECKING:
    from p2p_diloco.node.forms import Forms

LOOK_EVERY_S, KEEP_EVERY_S = 3.0, 60.0
"""How often a peer looks for newer records, and renews the newest one."""
TRIED_MAX = 64
"""The most records whose signatures are checked at one look, which takes 10 ms at most: strangers may store many. Each
look tries a new random choice of them, so false ones can't hide a right one for long."""

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Board:
    """The records of one kind. `ttl_s`: how long the DHT keeps one that nobody renews. `owned`: each peer has one,
    under its own id. `buckets`: the number of keys over which they are spread; all records of a key travel together."""

    kind: str
    ttl_s: float
    owned: bool = False
    buckets: int = 1

    def key(self, run_id: str, peer: str = "") -> str:
        """The DHT key of a peer's record, or of all records if there is one bucket."""
        return self._key(run_id, blake2b(peer.encode(), digest_size=1).digest()[0] % self.buckets)

    def _key(self, run_id: str, bucket: int) -> str:
        return f"{run_id}/{self.kind}" if self.buckets == 1 else f"{run_id}/{self.kind}/{bucket}"

    async def store(self, dht: Records, run_id: str, value: bytes) -> bool:
        """Store a record, or renew it. Returns False if it wasn't stored."""
        if self.owned:
            return await dht.store(self.key(run_id, dht.peer_id), dht.peer_id, value, self.ttl_s)
        return await dht.store(self.key(run_id), name_of(value), value, self.ttl_s, owned=False)

    async def keep(
        self,
        dht: Records,
        run_id: str,
        value: Callable[[], bytes],
        every_s: float,
        stored: Callable[[], None] = lambda: None,
    ) -> None:
        """Store what `value` returns, again and again, until cancelled; `stored` is called once it is stored. If no
        peer owns the record, every peer that has it does so, and it lives as long as any of them."""
        was_stored = False
        while True:
            try:
                taken, why = await self.store(dht, run_id, value()), None
            except Exception as error:  # the next try may succeed
                taken, why = False, error
            if not taken:
                log.warning("a record (%s) can't be stored in the DHT; trying again", self.kind, exc_info=why)
            elif not was_stored:
                was_stored = True
                stored()
            await asyncio.sleep(every_s)

    async def fetch(self, dht: Records, run_id: str) -> dict[str, bytes]:
        """Fetch the records; returns them by name, which is the peer's id if they are owned. Buckets that don't come
        are left out.

        Raises:
            Unreachable: none of them comes.
        """
        fetching = (dht.fetch(self._key(run_id, bucket)) for bucket in range(self.buckets))
        found = await asyncio.gather(*fetching, return_exceptions=True)
        failed = [records for records in found if isinstance(records, BaseException)]
        if failed:
            log.debug("some records (%s) can't be read: %r", self.kind, failed)
            if len(failed) == len(found) or not all(isinstance(error, Exception) for error in failed):
                raise failed[0]
        pairs = (pair for records in found if not isinstance(records, BaseException) for pair in records.items())
        return {name: value for name, (value, _) in pairs if self.owned or name == name_of(value)}

    async def read(
        self,
        dht: Records,
        run_id: str,
        kind: type[T],
        valid: Callable[[T], bool],
        order: Callable[[T], Any] = lambda record: 0,
    ) -> list[T]:
        """Read the valid records, which are dataclasses of the type `kind`; returns them, the highest first. `valid`:
        checks a signature. If there are more than `TRIED_MAX`, those are checked that come first in this `order`.

        Raises:
            Unreachable: the DHT doesn't answer.
        """
        return newest((await self.fetch(dht, run_id)).values(), kind, valid, order)

    async def watch(
        self, dht: Records, run_id: str, take: Callable[[Collection[bytes]], None], mine: Callable[[], bytes | None]
    ) -> None:
        """Until cancelled, give what is there to `take` now and then. Keep `mine()` stored: at once if it isn't there.
        Raises what `take` raises of the errors that a user sees."""
        clock, keep_at = asyncio.get_running_loop().time, 0.0
        while True:
            try:
                there = (await self.fetch(dht, run_id)).values()
                take(there)
                if (value := mine()) is not None and (value not in there or clock() >= keep_at):
                    keep_at = clock() + KEEP_EVERY_S
                    await self.store(dht, run_id, value)
            except Unreachable as error:
                log.debug("the DHT gave no answer (%s): %s", self.kind, error)
            except P2PDilocoError:
                raise
            except Exception:  # the other peers look too
                log.warning("records (%s) can't be read or renewed", self.kind, exc_info=True)
            await asyncio.sleep(LOOK_EVERY_S)


def newest(
    values: Collection[bytes],
    kind: type[T],
    valid: Callable[[T], bool],
    order: Callable[[T], Any] = lambda record: 0,
) -> list[T]:
    """As `Board.read`, of these records."""
    found = list[T]()
    for value in sample(list(values), len(values)):
        with contextlib.suppress(ValueError):
            found.append(unpack(kind, value))
    tried = sorted(found, key=order)[:TRIED_MAX]
    return sorted(filter(valid, tried), reverse=True)  # type: ignore[type-var]


def name_of(value: bytes) -> str:
    """The name of a record that no peer owns: the hash of its content."""
    return blake2b(value, digest_size=16).hexdigest()


# -- what is in a record

TEXT_MAX = 256
"""The most letters of a stranger's text that are kept; an address over a relay has about 150."""
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Measure = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""No loss, speed or time is larger; sums and means of such numbers are finite."""

packed = msgspec.msgpack.Encoder().encode


def clean(text: str) -> str:
    """Replace the control characters in a text by spaces, and cut the text to `TEXT_MAX` letters."""
    return printable(text[:TEXT_MAX])


@cache
def _forms() -> Forms:
    from p2p_diloco.node.forms import Forms  # here, because a trainer uses `status`, and no record

    return Forms(lambda hint, field: hint)


def read(kind: type[T], value: bytes) -> T:
    """Decode a value of this type from msgpack. Raises ValueError for anything else."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def pack(said: object) -> bytes:
    """Encode a dataclass as a record: the protocol, and the list of its fields, because a record has no room for their
    names."""
    _forms().of(type(said))
    return packed([PROTOCOL, _forms().write(said)])


@cache
def _fields_of(kind: type[Any]) -> dict[str, Any]:
    return {name: _forms().of(hint, name) for name, hint in get_type_hints(kind, include_extras=True).items()}


def unpack(kind: type[T], value: bytes) -> T:
    """Decode a record that `pack` made of a dataclass of this type. A field that is missing or has another type gets
    its default. Raises ValueError if it has none, and for anything else."""
    protocol, content = read(tuple[int, list[Any]], value)
    if protocol != PROTOCOL:
        raise ValueError(f"it is of protocol {protocol}, but this peer uses protocol {PROTOCOL}")
    found = {}
    for (name, type_of), one in zip(_fields_of(kind).items(), content, strict=False):  # type: ignore[arg-type]
        with contextlib.suppress(msgspec.ValidationError):
            found[name] = _forms().read(msgspec.convert(one, type_of), clean)
    try:
        return kind(**found)
    except TypeError as error:  # a field without a default
        raise ValueError(str(error)) from None
