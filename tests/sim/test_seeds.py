"""Whole runs under random faults: every seed is a world, and every world is checked against every invariant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.check import KINDS

WORLDS = dict.fromkeys(KINDS, 10) | {"joining": 3, "crowded": 2}
"""Worlds of each kind: these two kinds take ten times as long as the others."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_seed_holds(kinds: dict[str, Callable[[int], None]], kind: str) -> None:
    """(a) to (s) hold in each of these worlds; docs/testing.md describes how to replay one."""
    broken = []
    for seed in range(WORLDS[kind]):
        try:
            kinds[kind](seed)
        except Exception as error:
            broken.append(f"{kind} seed {seed}: {error!r}")
    assert broken == []


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *(("bereaved", seed) for seed in (185, 1225, 1317, 5107, 201703, 732053)),
        *(("healed", seed) for seed in (1814, 5640, 8018, 80378, 160068, 602280)),
        *(("patient", seed) for seed in (90, 2253, 5251, 733131)),
        *(("joining", seed) for seed in (1, 18, 59, 180, 1014, 2494, 160304, 200849, 702349, 705544)),
        *(("hesitant", seed) for seed in (247, 887, 3439, 201187, 400047, 500166, 500184)),
        ("overlapped", 83136),
        *(("async", seed) for seed in (0, 2, 11, 31, 164, 1618, 40962, 72410, 72549, 76170)),
        *(("async", seed) for seed in (140206, 150221, 160284, 180160, 201742, 500297, 504591, 505753, 512373, 601107)),
        *(("async", seed) for seed in (602082, 610242, 613362, 1020100)),
        ("private", 441),
        *(
            ("hostile", seed)
            for seed in (
                *(111, 127, 208, 231, 692, 2064, 5045, 20046),
                *(30103, 30259, 41626, 41963, 42468, 43108, 44225),
            )
        ),
        *(
            ("torn", seed)
            for seed in (
                *(3, 9, 14, 21, 2613, 8095, 9483, 40618, 40705, 41136, 62722, 82525),
                *(150565, 401244, 600121, 600385, 1235365),
            )
        ),
    ],
)
def test_worlds_that_broke_once(kinds: dict[str, Callable[[int], None]], kind: str, seed: int) -> None:
    """In each of these worlds the protocol once failed: a peer waited for ever, a final state was not merged, an
    aggregator made a commit without the right to, old work passed as fresh, a newcomer starved, or a peer told of a
    fork that was none; a peer with damaged tensors went on with them while a state was on its way, kept others waiting,
    or counted each commit on them as proof that it computes unlike the others; a peer that had claimed a term did not
    learn in time that others were ahead. In the private one and in two asynchronous ones the invariant was wrong, about
    a peer whose freeze ended with the faults, and about versions whose holders had all died. In the hostile ones a peer
    was told wrong commits in other peers' names, and a commit in its own name, which it answered to itself for ever; an
    honest peer stayed passed over after the hostile one was gone; a hostile one that was passed over held up each round
    with its promise; a repair dropped a newer state that was then accepted; one that had left made the last other peer
    take itself for unlike it; the answer to a draft that a wrong commit had ended passed as that to the next draft;
    honest peers conceded the term to each other in turns; a hostile one drove a shard ahead alone; a claimant's older
    refusal undid a promise; an aggregator with an old state did not wait for peers that had gone on; a submission that
    was too stale never reached the peer that would have refused it, or was taken as refused at the end of the run; a
    submission followed its shard's aggregators, always one behind; all peers refused a commit that only one held."""
    kinds[kind](seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_hundred_worlds_hold(worlds: Callable[[float], tuple[int, str]]) -> None:
    """The same for 300 more worlds of all kinds, played by the command in parallel to the other tests; `make chaos`:
    10,000."""
    status, told = worlds(550)
    print(told)
    assert status == 0, told
    assert told.startswith("300 worlds")
    assert "every invariant held" in told
