"""Damaged bytes lead to promised exceptions, soon and in little memory; `make fuzz` plays longer."""

from __future__ import annotations

import os
from random import Random

import pytest

from tests.fuzz import campaign
from tests.fuzz.campaign import Outcome, feed
from tests.fuzz.mutations import BYTES_MAX, mutated
from tests.fuzz.targets import Target

SECONDS = 5.0


@pytest.mark.slow
def test_readers_promise_what_they_raise() -> None:
    """Each reader is fed its seeds, and as many damaged ones as there is time for."""
    outcomes = campaign.play(SECONDS, seed=int.from_bytes(os.urandom(4), "big"))
    assert {name: outcome.faults for name, outcome in outcomes.items() if outcome.faults} == {}
    assert min(outcome.cases for outcome in outcomes.values()) > 1


@pytest.mark.slow
@pytest.mark.real
def test_a_member_of_the_dht_serves_on() -> None:
    assert campaign.play_dht(SECONDS, seed=int.from_bytes(os.urandom(4), "big")).faults == []


def test_a_case_can_be_made_again() -> None:
    seeds = [b"one", b"\x93\x01\x02\x03"]
    assert [mutated(Random(n), seeds) for n in range(99)] == [mutated(Random(n), seeds) for n in range(99)]
    assert max(len(mutated(Random(n), [bytes(BYTES_MAX)])) for n in range(99)) <= BYTES_MAX


def test_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is not promised, a refused seed, and memory."""

    def reads(case: bytes) -> None:
        if case != b"seed":
            raise KeyError(case)
        raise ValueError

    outcome = Outcome()
    feed(Target("bad", [b"seed"], reads, (ValueError,)), 1, float("inf"), outcome)
    assert "its own seed is refused" in outcome.faults[0]
    assert len([fault for fault in outcome.faults if "KeyError" in fault]) == campaign.FAULTS_SHOWN - 1
    monkeypatch.setattr(campaign, "GROWTH_MB", -1.0)
    outcome = Outcome()
    feed(Target("large", [b"seed"], bytes), 1, float("inf"), outcome)
    assert "MB more" in outcome.faults[0]
