"""Records in the DHT that no peer owns: each is named by its content, so every peer can keep it alive.

Law: a record says [protocol, fields of a dataclass]. What isn't named by its content, or can't be read, is left out.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeVar

import msgpack

from p2p_diloco.net.interface import Transport
from p2p_diloco.node.plain import from_plain, to_plain
from p2p_diloco.node.wire import PROTOCOL

TRIED_MAX = 16
"""Records of one look whose signatures are checked, from the highest down: strangers may leave some."""

T = TypeVar("T")


def name_of(value: bytes) -> str:
    """The subkey under which a record is kept: the hash of its content."""
    return blake2b(value, digest_size=16).hexdigest()


def pack(said: object) -> bytes:
    """A dataclass as a record."""
    return bytes(msgpack.packb([PROTOCOL, to_plain(said)]))


async def store(transport: Transport, key: str, value: bytes, ttl_s: float) -> bool:
    """Leave a record, or keep it there. False if it wasn't taken."""
    return await transport.store(key, name_of(value), value, ttl_s, owned=False)


async def fetch(transport: Transport, key: str) -> dict[str, bytes]:
    """The records under a key, by name.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found = await transport.fetch(key)
    return {name: value for name, (value, _) in found.items() if name == name_of(value)}


async def read(transport: Transport, key: str, kind: type[T]) -> list[T]:
    """What `pack` made of dataclasses of this kind and `store` left under a key.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found: list[T] = []
    for value in (await fetch(transport, key)).values():
        try:
            protocol, said = msgpack.unpackb(value)
            if protocol == PROTOCOL:
                found.append(from_plain(kind, said))
        except (ValueError, TypeError, msgpack.UnpackException):
            continue
    return found
