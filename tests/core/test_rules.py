"""All timeouts, derived from a few settings."""

from __future__ import annotations

import pytest

from p2p_diloco.core.revision import FOUNDED
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ModelVersion


def rules(interval: float, timeout: float) -> Rules:
    return Rules(run="run", fragments=((0, 1), (2,)), heartbeat_interval=interval, heartbeat_timeout=timeout)


def test_idle_takes_slow_steps_into_account() -> None:
    """A trainer with long steps may take three of them."""
    ladder = rules(1.0, 10.0)
    assert [ladder.idle_after(step) for step in (0.0, 3.0, 4.0)] == [10.0, 10.0, 12.0]


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
