"""The curves of losses that peers keep in the DHT: small, whole from the beginning, and checked when they are read."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.net.interface import CONTENT_BYTES_MAX
from p2p_diloco.node import curves
from p2p_diloco.node.curves import (
    ABSENT,
    BOARD,
    GREATEST,
    HIGHEST,
    POINTS_MAX,
    Point,
    keep,
    pack,
    read,
    thinned,
    unpack,
)
from p2p_diloco.node.inbox import Inbox
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited

number = st.floats(0, 1e15)
loss = st.none() | st.floats(allow_nan=False, allow_infinity=False)
points = st.lists(st.builds(Point, number, number, number, number, loss, loss), min_size=1, max_size=POINTS_MAX).map(
    lambda found: sorted(found, key=lambda point: point.time)
)


def at(time: float, height: float = 2.0) -> Point:
    return Point(time, time, 8 * time, time // 10, height, None)


def column(low: float, high: float, places: Sequence[int]) -> bytes:
    return struct.pack(f">2d{len(places)}H", low, high, *places)


@given(points)
def test_a_curve_fits_into_a_record_and_comes_back(curve: list[Point]) -> None:
    """Each value is off by no more than a half of a step of its column's 16 bits; what was not told stays untold."""
    record = pack(curve)
    assert len(record) <= CONTENT_BYTES_MAX
    found = unpack(record)
    for before, after in zip(zip(*curve, strict=True), zip(*found, strict=True), strict=True):
        known = [min(max(value, -HIGHEST), HIGHEST) for value in before if value is not None]
        bound = (max(known, default=0) - min(known, default=0)) * (0.5 / GREATEST + 1e-9)
        assert [value is None for value in before] == [value is None for value in after]
        for one, other in zip(known, (value for value in after if value is not None), strict=True):
            assert math.isclose(one, other, rel_tol=1e-12, abs_tol=bound)


places = st.lists(st.integers(0, ABSENT), min_size=2, max_size=2)


PLAIN = [column(1.0, 2.0, [0, GREATEST])] * 6


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ([], "their number"),
        (PLAIN[:5], "their number"),
        ([column(1.0, 2.0, [])] * 6, "their number"),
        ([column(1.0, 2.0, range(POINTS_MAX + 1))] * 6, "their number"),
        ([*PLAIN[:5], PLAIN[5] + b"x"], "their number"),
        ([*PLAIN[:4], column(2.0, 1.0, [0, 1]), PLAIN[5]], "a range is none"),
        ([*PLAIN[:4], column(math.nan, 1.0, [0, 1]), PLAIN[5]], "a range is none"),
        ([*PLAIN[:4], column(-1e308, 1e308, [0, 1]), PLAIN[5]], "a range is none"),
        ([*PLAIN[:4], column(0.0, math.inf, [0, 1]), PLAIN[5]], "a range is none"),
        ([column(1.0, 2.0, [GREATEST, 0]), *PLAIN[1:]], "runs backwards"),
        ([PLAIN[0], column(1.0, 2.0, [0, ABSENT]), *PLAIN[2:]], "no time or place"),
    ],
)
def test_what_is_wrong_with_a_record(columns: list[bytes], why: str) -> None:
    """The plain one is taken."""
    assert unpack(b"".join(PLAIN))[1] == Point(*[2.0] * 6)
    with pytest.raises(ValueError, match=why):
        unpack(b"".join(columns))


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300).map(sorted), st.integers(4, 100))
def test_a_thinned_curve_has_its_ends_and_few_points(times: list[float], most: int) -> None:
    found = thinned([at(time) for time in times], most)
    assert len(found) <= most
    assert (found[0].time, found[-1].time) == (times[0], times[-1])


@awaited
async def test_a_peers_curve_is_in_the_dht_and_a_forged_one_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first loss on. Points of the future are left out, and so is what is no curve."""
    monkeypatch.setattr(curves, "LOOK_EVERY_S", 0.01)
    network = MemoryNetwork()
    peer, liar = network.join("a", Inbox()), network.join("b", Inbox())
    told = iter([None, None, *(at(float(time), 3.0 - time / 100) for time in range(100))])
    keeping = asyncio.create_task(keep(peer, "r", lambda: next(told, None)))
    await liar.store(BOARD.key("r", "b"), "b", b"no curve", 60.0)
    while len((await read(liar, "r", 1e9)).get("a", ())) < 60:
        assert not keeping.done()
        await asyncio.sleep(0.01)
    found = await read(liar, "r", 50.0)
    keeping.cancel()
    assert found.keys() == {"a"}
    assert found["a"][0].time == 0.0
    assert 45.0 < found["a"][-1].time <= 50.0
    assert found["a"][-1].loss == pytest.approx(3.0 - found["a"][-1].time / 100, abs=1e-3)
