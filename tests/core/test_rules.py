"""All timeouts, derived from a few settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2p_diloco.core.revision import FOUNDED
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion


def rules(interval: float, timeout: float) -> Rules:
    return Rules(run="run", fragments=((0, 1), (2,)), heartbeat_interval=interval, heartbeat_timeout=timeout)


@pytest.mark.parametrize(("interval", "timeout"), [(1.0, 10.0), (0.25, 3.0)])
def test_every_wait_is_derived_from_two_numbers(interval: float, timeout: float) -> None:
    """Frequent actions follow the heartbeat interval; decisions about peers follow the heartbeat timeout."""
    ladder = rules(interval, timeout)
    assert ladder.probe_every == interval
    assert ladder.settle == 2 * interval
    assert ladder.frozen_after == 2 * interval
    assert ladder.dead_after == ladder.answers_within == timeout
    assert ladder.dials_within == timeout / 2
    assert ladder.fetch_again == 3 * timeout
    assert ladder.mended_within == 6 * timeout
    assert ladder.forgotten_after == 60 * timeout
    assert ladder.say_again == 6 * timeout


def test_idle_takes_slow_steps_into_account() -> None:
    """A trainer with long steps may take three of them."""
    ladder = rules(1.0, 10.0)
    assert [ladder.idle_after(step) for step in (0.0, 3.0, 4.0)] == [10.0, 10.0, 12.0]


def test_slices_are_those_of_all_fragments() -> None:
    assert rules(1.0, 10.0).slices == 3


def test_by_default_no_round_waits_for_ever() -> None:
    """round_timeout is finite, one peer is enough, and a run has no end by default."""
    plain = Rules(run="run", fragments=((0,),))
    assert (plain.round_timeout, plain.min_peers, plain.start_peers, plain.carry_rounds) == (600.0, 1, 1, 2)
    assert (plain.stop_after_epochs, plain.stop_after_samples) == (None, None)
    assert (plain.heartbeat_interval, plain.heartbeat_timeout, plain.history) == (1.0, 10.0, 256)


@pytest.mark.parametrize(
    ("ends", "epochs", "samples", "ended"),
    [
        ({}, 10**9, 10**9, False),
        ({"stop_after_epochs": 4}, 7, 10**9, False),
        ({"stop_after_epochs": 4}, 8, 0, True),
        ({"stop_after_samples": 40}, 10**9, 79, False),
        ({"stop_after_samples": 40}, 0, 80, True),
        ({"stop_after_epochs": 4, "stop_after_samples": 40}, 8, 0, True),
    ],
)
def test_a_run_has_ended_once_its_fragments_together_have_come_to_either_end(
    ends: dict[str, int], epochs: int, samples: int, ended: bool
) -> None:
    """A model's version sums its two fragments."""
    two = Rules(run="run", fragments=((0, 1), (2,)), **ends)
    assert two.ended(ModelVersion(0, samples, epochs, ""), FOUNDED) is ended


def test_a_contribution_fits_up_to_the_rules_limits() -> None:
    limits = Rules(run="run", fragments=((0,),), weight_max=4.0, samples_max=9)
    fits = [(0.5, 0), (4.0, 9), (0.0, 1), (-1.0, 1), (4.5, 1), (1.0, 10), (1.0, -1)]
    assert [limits.fits(weight, samples) for weight, samples in fits] == [True, True, *[False] * 5]


def test_live_peers_are_waited_for_longer_than_their_work_may_take() -> None:
    """A commit may take a whole round, a promise only a message. An answer may wait in a queue."""
    ladder = rules(1.0, 10.0)
    assert (ladder.commits_within, ladder.confirms_within) == (630.0, 620.0)
    assert (ladder.promises_within, ladder.answered_within) == (40.0, 60.0)


def test_an_aggregator_is_waited_for_longer_than_it_may_wait_itself() -> None:
    """Else its contributors pass it over while it waits for another peer's promise or confirmation."""
    for ladder in (rules(1.0, 10.0), replace(rules(1.0, 10.0), round_timeout=1.0)):
        assert max(ladder.confirms_within, ladder.promises_within) + ladder.probe_every < ladder.commits_within
