"""Bytes that are nearly right: seeds, damaged as a stranger would damage them.

Law: the random numbers are an argument, so a case can be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgpack

BYTES_MAX = 1 << 16
"""The longest case."""
PIECES = (
    b"", b"\x91" * 900 + b"\x01", b"\x81\xa0" * 500 + b"\x01", b"[" * 900 + b"]" * 900,
    b"\x00", b"\xff" * 8, b"\x91" * 3000, b"[" * 3000, b"{" * 3000, b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01",
    b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6), b"\xcb\x7f\xef" + b"\xff" * 6,
    b"\xcb\x7f\xf0" + bytes(6), b"\xc0", b"\x80", b"\x90", b"\xa0", b"1e999", b"-1", b"NaN", b"9" * 400, b"null",
    b"true", b'"\\ud800"', b"\xed\xa0\x80", b"\x1b]0;x\x07", b"../../x",
)  # fmt: skip
"""What is put into a case: msgpack's and JSON's extremes, deep nesting, huge promised lengths, letters of terminals."""


def mutated(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, damaged once or a few times."""
    case = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        rng.choice(_WAYS)(rng, case, seeds)
    return bytes(case[:BYTES_MAX])


def _flip(rng: Random, case: bytearray, seeds: Sequence[bytes]) -> None:
    if case:
        case[rng.randrange(len(case))] ^= 1 << rng.randrange(8)


def _replace(rng: Random, case: bytearray, seeds: Sequence[bytes]) -> None:
    if case:
        case[rng.randrange(len(case))] = rng.randrange(256)


def _truncate(rng: Random, case: bytearray, seeds: Sequence[bytes]) -> None:
    del case[rng.randrange(len(case) + 1) :]


def _remove(rng: Random, case: bytearray, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(case) + 1)
    del case[at : at + rng.choice((1, 1, 4, 32, 512))]


def _repeat(rng: Random, case: bytearray, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(case) + 1)
    case[at:at] = case[at : at + rng.choice((1, 8, 64, 512))] * rng.choice((1, 2, 40))
    del case[BYTES_MAX:]


def _insert(rng: Random, case: bytearray, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(case) + 1)
    case[at : at + rng.choice((0, 0, 1, 4, 9))] = rng.choice(PIECES)


def _splice(rng: Random, case: bytearray, seeds: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    case[rng.randrange(len(case) + 1) :] = other[rng.randrange(len(other) + 1) :]


def _change_a_value(rng: Random, case: bytearray, seeds: Sequence[bytes]) -> None:
    """If the case is msgpack, put another value somewhere into it: well-formed bytes get further than others."""
    try:
        value = msgpack.unpackb(case, strict_map_key=False)
        case[:] = msgpack.packb(_changed(rng, value))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        _flip(rng, case, seeds)


def _changed(rng: Random, value: object) -> object:
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: _changed(rng, value[key])}
    return rng.choice(VALUES)


def _nested(depth: int) -> list[object]:
    """As deep as msgpack reads, and deeper than Python prints."""
    return [_nested(depth - 1)] if depth else []


VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, -1e308,
    5e-324, float("nan"), float("inf"), "", "x" * 5000, "\x1b[2J", "\ud7ff", b"", bytes(5000), [], [[]],
    [0] * 3000, {}, {"": 0}, [None], _nested(900), msgpack.Timestamp(0), msgpack.ExtType(5, b"x"),
)  # fmt: skip
_WAYS: tuple[Callable[[Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip, _replace, _truncate, _remove, _repeat, _insert, _insert, _splice, *[_change_a_value] * 4,
)  # fmt: skip
