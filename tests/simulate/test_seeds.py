"""Whole runs under random faults: every seed a world, every world held against every invariant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CHUNK = 10


def seeds(kind: str, first: int, stop: int) -> list[object]:
    """Chunks of seeds; the second half of them is played with what is slow."""
    half = (first + stop) // 2
    return [
        pytest.param(kind, number, marks=[pytest.mark.slow] if number >= half else [])
        for number in range(first, stop, CHUNK)
    ]


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        *seeds("healed", 0, 60),
        *seeds("patient", 200, 240),
        *seeds("bereaved", 0, 40),
        *seeds("hesitant", 0, 30),
        *seeds("overlapped", 0, 30),
        *seeds("joining", 0, 20),
        pytest.param("crowded", 0, marks=pytest.mark.slow),
        *seeds("async", 0, 30),
        *seeds("torn", 0, 30),
    ],
)
def test_every_seed_holds(kinds: dict[str, Callable[[int], None]], kind: str, first: int) -> None:
    """(a) to (m) hold in each of these worlds; docs/testing.md says how to replay one."""
    broken = []
    for seed in range(first, first + CHUNK):
        try:
            kinds[kind](seed)
        except Exception as error:
            broken.append(f"{kind} seed {seed}: {error!r}")
    assert broken == []


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *(("bereaved", seed) for seed in (185, 1225, 1317, 5107)),
        ("healed", 1814),
        *(("patient", seed) for seed in (90, 2253, 5251)),
        *(("joining", seed) for seed in (1, 18, 59, 180, 2494)),
        *(("hesitant", seed) for seed in (247, 887, 3439)),
        *(("async", seed) for seed in (0, 2, 11, 31, 164, 1618, 40962)),
        *(("torn", seed) for seed in (3, 9, 14, 21, 2613, 9483, 40618, 40705, 41136)),
    ],
)
def test_worlds_that_broke_once(kinds: dict[str, Callable[[int], None]], kind: str, seed: int) -> None:
    """In each the protocol once had somebody wait for ever, or left a final state unmerged, or an aggregator commit
    without a right to, or old work pass as fresh, or a newcomer starve."""
    kinds[kind](seed)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_rest_of_a_thousand_worlds_hold(worlds: Callable[[float], tuple[int, str]]) -> None:
    """The same for 800 more, of all kinds, on all cores, as the command plays them."""
    status, told = worlds(950)
    print(told)
    assert status == 0, told
    assert told.startswith("800 worlds")
    assert "every invariant held" in told
