"""Advice is the least that suffices, and warns of what is known to train badly."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.planning.advice import advise, greatest_sync_every, held_back, smallest_streaming, smallest_sync_every
from p2p_diloco.planning.exchange import Machine
from p2p_diloco.planning.forecast import Forecast

M = 10**6


def friends(
    *, params: int = 1000 * M, mbit: tuple[float, ...] = (50,) * 4, steps_s: tuple[float, ...] = (), **run: Any
) -> Forecast:
    """Four friends, 50 Mbit/s up, 60 ms, a second for a step."""
    times = steps_s or (1.0,) * len(mbit)
    machines = [Machine(each * 1e6 / 8, 0.06, step_s) for each, step_s in zip(mbit, times, strict=True)]
    return Forecast(params, machines, RunConfig(**run), 1000)


@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("wanted", [0.5, 0.9, 0.99])
def test_the_advised_h_suffices_and_one_shorter_does_not(fragments: int, wanted: float) -> None:
    found = friends(num_fragments=fragments, sync_every=500)
    needed = smallest_sync_every(found, wanted)
    assert needed % fragments == 0
    assert found.changed(sync_every=needed).utilisation >= wanted
    assert found.changed(sync_every=needed - fragments).utilisation < wanted


def test_the_advised_fragments_suffice_and_fewer_do_not() -> None:
    """With overlaps of at most a quarter of H, which stays."""
    found, wanted = friends(sync_every=600), 0.95
    advised = smallest_streaming(found, wanted)
    set_so = found.changed(num_fragments=advised.num_fragments, overlap_steps=advised.overlap_steps)
    assert advised.sync_every == 600
    assert advised.overlap_steps <= 600 // 4
    assert set_so.utilisation == pytest.approx(advised.utilisation)
    assert advised.utilisation >= wanted
    assert set_so.changed(overlap_steps=advised.overlap_steps - 1).utilisation < wanted
    for fewer in (n for n in range(1, advised.num_fragments) if 600 % n == 0):
        longest = min(600 // fewer, 150)
        assert found.changed(num_fragments=fewer, overlap_steps=longest).utilisation < wanted


def test_where_no_overlap_suffices_a_longer_h_is_advised() -> None:
    """The smallest with which four fragments suffice, one of which is always under way."""
    found, wanted = friends(sync_every=10), 0.95
    advised = smallest_streaming(found, wanted)
    assert (advised.num_fragments, advised.overlap_steps <= advised.sync_every // 4) == (4, True)
    assert advised.utilisation >= wanted
    shorter = found.changed(
        sync_every=advised.sync_every - 4, num_fragments=4, overlap_steps=advised.sync_every // 4 - 1
    )
    assert shorter.utilisation < wanted


def test_fewer_bytes_need_a_shorter_h() -> None:
    """bf16, int8, int4, int4 both ways: each needs a shorter H than the one before."""
    needed = [choice.sync_every for choice in advise(friends(), 0.95, None).codecs]
    assert needed == sorted(needed, reverse=True)
    assert len(set(needed)) == 4


@pytest.mark.parametrize(
    ("given", "peer", "by_link"),
    [({"mbit": (50, 2, 50, 50), "sync_every": 500}, 1, True),
     ({"steps_s": (1, 1, 1, 9), "sync_every": 20_000}, 3, False),
     ({"mbit": (50, 5, 50, 50), "steps_s": (1, 1.5, 1, 1), "sync_every": 100}, 1, True)],
)  # fmt: skip
def test_the_peer_that_holds_the_others_back_is_named_with_the_reason(
    given: dict[str, Any], peer: int, by_link: bool
) -> None:
    found = held_back(friends(**given))
    assert found is not None
    assert (found.peer, found.by_link) == (peer, by_link)
    assert held_back(friends()) is None


@pytest.mark.parametrize(("steps_s", "pace"), [((1, 1, 1, 1), "steps"), ((1, 1, 2, 1), "time")])
def test_peers_of_unlike_speed_are_advised_to_go_by_time(steps_s: tuple[float, ...], pace: str) -> None:
    assert advise(friends(steps_s=steps_s), 0.95, None).pace == pace


def test_few_rounds_and_momentum_are_warned_of() -> None:
    """10 rounds are few; 40 are few for a momentum of 0.9 only; 60 are enough."""
    found = friends(sync_every=500, outer_momentum=0.9)
    told = {rounds: advise(found, 0.95, rounds * found.units).warnings for rounds in (10, 40, 60)}
    assert [len(each) for each in told.values()] == [2, 1, 0]
    assert "outer_momentum=0.9" in told[40][0]
    for suits in ({"outer_momentum": 0.0}, {}):  # rates that rise suit a run of any length
        assert advise(friends(**suits), 0.95, 40 * found.units).warnings == ()


@pytest.mark.parametrize(("momentum", "rounds"), [(0.9, 50), (0.5, 20), (0.0, 20)])
def test_the_greatest_h_leaves_enough_rounds_for_the_tokens(momentum: float, rounds: int) -> None:
    """20 rounds, and 5 / (1 − momentum)."""
    found = friends(outer_momentum=momentum)
    tokens = 1_000_000 * found.units / found.run.sync_every
    most = greatest_sync_every(found, tokens)
    assert most == 1_000_000 // rounds
    assert advise(found.changed(sync_every=most), 0.95, tokens).warnings == ()
    assert advise(found.changed(sync_every=most + 100), 0.95, tokens).warnings != ()
    assert advise(found, 0.95, None).sync_every_most is None
