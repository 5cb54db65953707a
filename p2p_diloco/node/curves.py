"""The loss of each peer since it entered the run, for whoever looks at the run later: one DHT record, with at most
`POINTS_MAX` points.

Law: bounded, whatever the length of the run. Curves of other peers are claims: a record that isn't exactly one is left
out, and nothing is decided by a curve.

A record has one column for each field of `Point`: its least and its greatest value (two doubles), then each point's
value as a number of 16 bits, from 0 for the least to `GREATEST`; `ABSENT` stands for None.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from p2p_diloco.net.interface import Records, Unreachable
from p2p_diloco.node.board import Board

POINTS_MAX = 64
"""The most points of a record; 64 take 864 bytes."""
KEPT = 8 * POINTS_MAX
"""The most points that a peer keeps of its own curve, to choose from."""
LOOK_EVERY_S = 5.0
"""Seconds between two points at first."""
LOOKS_A_RECORD = 4
"""The record is stored once in so many looks: 864 bytes in 20 s."""
BOARD = Board("curves", ttl_s=60.0, owned=True, buckets=4)
GREATEST, ABSENT = 0xFFFE, 0xFFFF
HIGHEST = 1e300
"""Greater values, as losses of a training that diverges may be, are told as this: twice of it is finite."""
_RANGE = struct.Struct(">2d")

log = logging.getLogger(__name__)


class Point(NamedTuple):
    """A peer at one moment, as in its status."""

    time: float
    """Seconds since 1970, by that peer's clock."""
    step: float
    samples: float
    epoch: float
    loss: float | None
    held_out_loss: float | None


Timed = TypeVar("Timed", bound=Sequence[float | None])
"""A point whose first value is its time."""


def thinned(points: Sequence[Timed], most: int) -> list[Timed]:
    """At most `most` points, the first and the newest among them, evenly spread over the time. Which ones changes only
    when the time has doubled, so a curve that is thinned again and again keeps its old points. `most`: at least 4."""
    if len(points) <= most:
        return list(points)
    times = [point[0] or 0.0 for point in points]
    width = 2.0 ** math.ceil(math.log2(max((times[-1] - times[0]) / (most - 3), 1e-9)))
    apart = [math.floor(later / width) != math.floor(earlier / width) for earlier, later in itertools.pairwise(times)]
    return [points[0], *itertools.compress(points[1:-1], apart), points[-1]]


def pack(points: Sequence[Point]) -> bytes:
    """Encode a curve of at most `POINTS_MAX` points."""
    parts = []
    for told in zip(*points, strict=True):
        column = [None if value is None else min(max(value, -HIGHEST), HIGHEST) for value in told]
        known = [value for value in column if value is not None]
        low, high = min(known, default=0.0), max(known, default=0.0)
        span = high - low or 1.0
        places = (ABSENT if value is None else round((value - low) / span * GREATEST) for value in column)
        parts.append(_RANGE.pack(low, high) + struct.pack(f">{len(column)}H", *places))
    return b"".join(parts)


def unpack(record: bytes) -> list[Point]:
    """Decode a curve, its points in the order of their times. Raises ValueError for anything that `pack` doesn't make
    of a peer's values."""
    columns = len(Point._fields)
    length, rest = divmod(len(record), columns)
    count = (length - _RANGE.size) // 2
    if rest or length % 2 or not 1 <= count <= POINTS_MAX:
        raise ValueError("these bytes are no curve: their number is wrong")
    points = [Point(*row) for row in zip(*(_column(record, length * at, count) for at in range(columns)), strict=True)]
    if any(value is None for point in points for value in point[:4]):
        raise ValueError("these bytes are no curve: a point has no time or place")
    if any(later.time < earlier.time for earlier, later in itertools.pairwise(points)):
        raise ValueError("these bytes are no curve: the time runs backwards")
    return points


def _column(record: bytes, at: int, count: int) -> list[float | None]:
    low, high = _RANGE.unpack_from(record, at)
    if not (low <= high and math.isfinite(high - low)):
        raise ValueError("these bytes are no curve: a range is none")
    places = struct.unpack_from(f">{count}H", record, at + _RANGE.size)
    return [None if place == ABSENT else low + (high - low) * (place / GREATEST) for place in places]


async def keep(dht: Records, run_id: str, point: Callable[[], Point | None]) -> None:
    """Keep this peer's curve in the DHT up to date, until cancelled. `point`: where the peer is now; None: it has no
    loss yet."""
    curve, due = list[Point](), 0
    for turn in itertools.count():
        if (now := point()) is not None:
            curve = thinned([*curve, now], KEPT)
        if curve and turn >= due:
            record, due = pack(thinned(curve, POINTS_MAX)), turn + LOOKS_A_RECORD
            try:
                await BOARD.store(dht, run_id, record)
            except Exception:  # the run needs no curve
                log.debug("this peer's curve can't be stored in the DHT; trying again", exc_info=True)
        await asyncio.sleep(LOOK_EVERY_S)


async def read(dht: Records, run_id: str, until: float) -> dict[str, list[Point]]:
    """Read the curves of a run's peers from the DHT, up to the time `until`; returns them by peer id."""
    curves: dict[str, list[Point]] = {}
    try:
        found = await BOARD.fetch(dht, run_id)
    except Unreachable:
        return curves
    for peer_id, record in found.items():
        try:
            curves[peer_id] = [point for point in unpack(record) if point.time <= until]
        except ValueError as error:
            log.debug("the curve of %s is left out: %s", peer_id, error)
    return curves
