"""The values that a node derives from a run's settings and layout."""

from __future__ import annotations

import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.node.run import FETCH_BYTES, FETCH_MIN, SAMPLES_PER_STEP, STEPS_OVER, Run, layout_of
from p2p_diloco.node.swarm import LIMITS
from p2p_diloco.tensors.layout import Layout, ParamSpec

STATE_WIDTH = 8
"""Bytes of an element's state with SGD: θ and momentum."""


def run_of(numel: int, **values: object) -> Run:
    config = RunConfig(**values)
    layout = Layout.build((ParamSpec("p", (numel,), "float32"),), 1, slice_elements=config.slice_elements)
    return Run("r", config, layout)


@pytest.mark.parametrize("numel", [100_000, 1_000_000, 10_000_000, 100_000_000])
def test_a_newcomer_asks_for_as_many_slices_as_make_the_same_bytes(numel: int) -> None:
    """Short slices don't take a round trip each; of long ones, two are requested from a donor."""
    run = run_of(numel)
    longest = max(place.numel for place in run.layout.slices)
    window = run.rules.fetch_window
    assert window >= FETCH_MIN
    if window > FETCH_MIN:
        assert window * STATE_WIDTH * longest <= FETCH_BYTES < (window + 1) * STATE_WIDTH * longest


@pytest.mark.parametrize("numel", [1, 10**6, 10**9, 10**10])
def test_chosen_slices_can_be_sent(numel: int) -> None:
    """The choice never makes a state or a list of slices that no message carries."""
    run_of(numel).check(LIMITS)


@pytest.mark.parametrize("weighting", ["steps", "samples", "uniform"])
def test_a_contribution_may_have_several_times_the_work_between_two_exchanges(weighting: str) -> None:
    """More is refused: one contribution must not outweigh all others, nor fill the count of samples."""
    rules = run_of(10, sync_every=50, weighting=weighting).rules
    samples = STEPS_OVER * 100 * SAMPLES_PER_STEP
    weight = samples if weighting == "samples" else STEPS_OVER * 100
    assert rules.fits(weight, samples)
    assert not rules.fits(weight + 1, samples)
    assert not rules.fits(weight, samples + 1)


def test_slices_of_buffers_are_small_lossless_and_without_an_outer_state() -> None:
    """Whatever the codec, the outer optimizer and the limit of parameters are."""
    config = RunConfig(codec="int4", reply_codec="bf16", outer_optimizer="Adam", num_fragments=2, sync_every=2)
    params = tuple(ParamSpec(f"{n}.weight", (64,), "float32") for n in range(2))
    buffers = (ParamSpec("0.var", (8,), "float32"), ParamSpec("1.seen", (), "int64"))
    run = Run("r", config, layout_of(config, params, buffers))
    assert [run.codecs(place.index) for place in run.layout.slices] == [("int4", "bf16")] * 2 + [("fp32", "fp32")] * 2
    assert [bool(run.state_lengths(place)) for place in run.layout.slices] == [True, True, False, False]
    assert run.rules.fragments == ((0, 2), (1, 3))
    alone = Run("r", config, layout_of(config, params))
    assert run.round_nbytes == alone.round_nbytes + (8 + 1) * 4 * 2 // 2
    local = RunConfig(**{**config.to_wire(), "buffers": "local"})
    assert layout_of(local, params, buffers) == alone.layout
    assert local.fingerprint() != config.fingerprint()
