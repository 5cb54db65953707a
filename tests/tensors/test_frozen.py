"""The fingerprint of a model's frozen values: equal for equal bases, different for different ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2p_diloco.tensors.frozen import fingerprint


class Adapted(nn.Module):
    """A frozen base with a buffer and a trainable adapter."""

    def __init__(self, seed: int = 0, adapter: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(40, 50).requires_grad_(False)
        self.norm = nn.BatchNorm1d(50)
        self.adapter = nn.Parameter(torch.full((3,), adapter))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


def test_equal_bases_have_equal_fingerprints() -> None:
    """What a run exchanges, the base's dtype and compilation make no difference."""
    one, other = Adapted(), Adapted(adapter=1.0)
    other.norm.running_mean.fill_(3.0)
    assert fingerprint(one) == fingerprint(other) == fingerprint(Adapted().to(torch.bfloat16)) != ""
    other.base = torch.compile(other.base, backend="eager")
    assert fingerprint(other) == fingerprint(one)


def test_different_bases_have_different_fingerprints() -> None:
    """Another value, shape or buffer shows."""
    found = {fingerprint(Adapted()), fingerprint(Adapted(seed=1))}
    wider = Adapted()
    wider.base = nn.Linear(40, 51).requires_grad_(False)
    masked = Adapted()
    masked.mask.zero_()
    assert len(found | {fingerprint(wider), fingerprint(masked)}) == 4


@pytest.mark.filterwarnings("error")
def test_imaginary_parts_count() -> None:
    """And torch doesn't warn of any that are discarded, which would end a script that makes warnings errors."""

    def made(imaginary: float) -> Adapted:
        model = Adapted()
        model.register_buffer("turns", torch.full((3,), complex(1.0, imaginary)))
        return model

    assert len({fingerprint(made(each)) for each in (0.0, 1.0, 0.0)}) == 2


def test_a_model_that_is_trained_whole_has_none() -> None:
    """There is nothing to compare, whatever its buffers."""
    assert fingerprint(nn.BatchNorm1d(3)) == ""
