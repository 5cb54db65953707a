"""Two peers that contribute the same are told of, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from p2p_diloco.config import RunConfig
from p2p_diloco.node.alike import ROUNDS, SAMPLE, Alike
from p2p_diloco.node.run import Run
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.tensors.layout import Layout, specs_of
from p2p_diloco.tensors.mean import WEIGHT_MIN


def alike_in(numel: int = 8, named: Callable[[str], str] = str) -> Alike:
    """For a run of two slices of so many values."""
    model = torch.nn.Linear(2 * numel, 1, bias=False)
    run = Run("test", RunConfig(codec="fp32"), Layout.build(specs_of(model), slice_elements=numel))
    return Alike(named, run)


def given(**payloads: Any) -> list[tuple[str, float, str, memoryview]]:
    """Contributions with these payloads; a pair is (payload, weight)."""
    pairs = ((peer, one if isinstance(one, tuple) else (one, 1.0)) for peer, one in payloads.items())
    return [(peer, weight, hash_of(payload), memoryview(payload)) for peer, (payload, weight) in pairs]


def test_equal_contributions_cause_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    # Equal contributions cause one warning. At once, of a slice of any length. It names the two peers, the cause
    # and the mend.
    alike = alike_in(named=str.upper)
    alike.look(0, given(a=b"12", b=b"13", c=b"1"))
    assert caplog.messages == []
    for _ in range(2):
        alike.look(1, given(a=b"12", b=b"13", c=b"13"))
    (message,) = caplog.messages
    assert message.startswith("B AND C contribute the same bytes")
    assert "peer.seed" in message

    # Contributions without progress may be equal. A peer that made no step, or whose progress is zero, trains on
    # no other's data.
    caplog.clear()
    alike, values = alike_in(SAMPLE), torch.randn(SAMPLE).numpy().tobytes()
    for _ in range(2 * ROUNDS):
        alike.look(0, given(a=(values, WEIGHT_MIN), b=(values, WEIGHT_MIN)))
        alike.look(0, given(a=bytes(4 * SAMPLE), b=bytes(4 * SAMPLE)))
    assert caplog.messages == []

    # Few values in proportion are no sign. A model of some values may well learn the same from other data.
    caplog.clear()
    alike = alike_in(SAMPLE - 1)
    for _ in range(2 * ROUNDS):
        values = torch.randn(SAMPLE - 1)
        alike.look(0, given(a=values.numpy().tobytes(), b=(values * 1.001).numpy().tobytes()))
    assert caplog.messages == []


def test_machines_that_round_differently_are_found_by_the_direction(caplog: pytest.LogCaptureFixture) -> None:
    """Pseudo-gradients of the same data, of which some digits differ, point the same way round after round. Those of
    other data, and those of one lucky round, do not."""
    numel = 8 * SAMPLE + 5
    alike, source = alike_in(numel), torch.Generator().manual_seed(0)
    for n in range(ROUNDS + 1):
        assert caplog.messages == []
        common, own, other = (torch.randn(numel, generator=source) for _ in range(3))
        made = {"a": common + 0.02 * own, "b": common + own, "c": common + 0.02 * other}
        made["b"][:100] = made["a"][:100]  # what no data has touched, such as rows of an embedding
        if n == 0:
            made["c"] = other
        round_ = given(**{peer: values.numpy().tobytes() for peer, values in made.items()})
        alike.look(0, round_)
        alike.look(1, round_)  # one slice is enough
    (message,) = caplog.messages
    assert message.startswith(f"a and c contribute nearly the same in {ROUNDS} rounds")
