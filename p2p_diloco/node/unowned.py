"""Stores and reads DHT records that no peer owns. Each record is named by its content, so any peer can keep it alive.

Law: a record is [protocol, fields of a dataclass]. A record that isn't named by its content, or can't be read, is left
out.
"""

from __future__ import annotations

import asyncio
import logging
from hashlib import blake2b
from typing import TypeVar

from p2p_diloco.net.interface import Records
from p2p_diloco.node import board
from p2p_diloco.node.wire import PROTOCOL

log = logging.getLogger(__name__)

T = TypeVar("T")


def name_of(value: bytes) -> str:
    """The subkey of a record: the hash of its content."""
    return blake2b(value, digest_size=16).hexdigest()


def pack(said: object) -> bytes:
    """Encode a dataclass as a record."""
    return board.packed([PROTOCOL, said])


async def store(dht: Records, key: str, value: bytes, ttl_s: float) -> bool:
    """Store a record in the DHT, or renew it. Returns False if it wasn't stored."""
    return await dht.store(key, name_of(value), value, ttl_s, owned=False)


async def keep(dht: Records, key: str, value: bytes, ttl_s: float, every_s: float) -> None:
    """Renew a record until cancelled. Every peer that has it does so, and the record lives as long as any of them."""
    while True:
        try:
            await store(dht, key, value, ttl_s)
        except Exception:  # the other peers renew it too
            log.warning("the record %s can't be stored in the DHT; trying again", key, exc_info=True)
        await asyncio.sleep(every_s)


async def fetch(dht: Records, key: str) -> dict[str, bytes]:
    """Fetch the records under a key from the DHT; returns them by name.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found = await dht.fetch(key)
    return {name: value for name, (value, _) in found.items() if name == name_of(value)}


async def read(dht: Records, key: str, kind: type[T]) -> list[T]:
    """Fetch the records under a key from the DHT; returns the dataclasses of the type `kind` that they hold.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found: list[T] = []
    for value in (await fetch(dht, key)).values():
        try:
            protocol, said = board.read(tuple[int, kind], value)  # type: ignore[valid-type]
        except ValueError:
            continue
        if protocol == PROTOCOL:
            found.append(said)
    return found
