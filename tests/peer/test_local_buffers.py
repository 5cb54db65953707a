"""The model's buffers at the trainer: what is sent, and what becomes of progress at each merge."""

from __future__ import annotations

import math
from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.errors import UsageError
from p2p_diloco.peer.extents import Rank
from p2p_diloco.peer.local import LocalModel, with_global_values
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors.layout import Layout, specs_of

PARAMETERS, MEANS, COUNTERS = 0, 1, 2


class Normed(nn.Module):
    """One weight, and BatchNorm of one channel under two names."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.norm = nn.BatchNorm1d(1, affine=False).to(dtype)

    def has(self, mean: float, var: float, seen: int) -> None:
        self.norm.running_mean.fill_(mean)
        self.norm.running_var.fill_(var)
        self.norm.num_batches_tracked.fill_(seen)

    @property
    def held(self) -> tuple[float, float, int]:
        of = self.norm
        return of.running_mean.item(), of.running_var.item(), int(of.num_batches_tracked.item())


class Trainer:
    """A model and its side of the exchange: θ begins with the model's own values, and the base is θ."""

    def __init__(self, model: Normed, rank: Rank | None = None, share: float = 0.0) -> None:
        self.model = model
        self.layout = Layout.build(specs_of(model), buffers=buffers.specs_of(model))
        self.theta, self.base, self.values = torch.zeros(3, self.layout.numel)
        delta = torch.zeros(self.layout.numel, dtype=torch.bfloat16)
        memory = self.theta, self.base, delta
        self.local = LocalModel(model, self.layout, *memory, rank or Rank(), values=self.values, share=share)
        self.local.write_theta()

    def becomes(self, mean: float, var: float, seen: int) -> set[int]:
        """θ changes, as after a commit; returns the slices whose loaded values are in `base` now."""
        self.base.copy_(self.theta)
        self.theta[1:] = torch.tensor([mean, var, seen])
        return {MEANS, COUNTERS}

    def merge(self, blend: Blend, kept: Collection[int] = ()) -> tuple[float, float, int]:
        self.local.merge(dict.fromkeys((PARAMETERS, MEANS, COUNTERS), blend), kept)
        return self.model.held

    def sends(self, kept: Collection[int] = ()) -> list[float]:
        self.local.write_delta((PARAMETERS, MEANS, COUNTERS), kept)
        return self.values[1:].tolist()


def trainer(mean: float = 0.0, var: float = 1.0, seen: int = 0, dtype: torch.dtype = torch.float32) -> Trainer:
    model = Normed(dtype)
    model.has(mean, var, seen)
    return Trainer(model)


def test_a_newcomer_without_progress_takes_the_global_values() -> None:
    """Even if its own counter is higher."""
    one = trainer(0.5, 2.0, 100)
    assert one.merge(Blend.ALL, one.becomes(0.25, 1.5, 3)) == (0.25, 1.5, 3)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_buffers_are_never_mixed(share: float) -> None:
    """They keep what was gained since the sending, whatever share of the parameters stays. If the base is gone,
    nothing was trained since."""
    one = Trainer(Normed(torch.float32), share=share)
    one.model.has(0.5, 1.5, 5)
    one.sends()
    one.model.has(0.75, 1.25, 9)
    kept = one.becomes(0.25, 1.5, 9)
    assert one.merge(Blend.MIX, kept) == (0.5, 1.25, 9)
    one.sends()
    one.becomes(0.125, 2.0, 11)
    assert one.merge(Blend.MIX) == (0.125, 2.0, 11)


@pytest.mark.parametrize("blend", [Blend.ALL, Blend.SINCE, Blend.SENT])
def test_a_variance_never_becomes_negative(blend: Blend) -> None:
    """Two peers saw it fall by the same, so the sum of both is more than there was. A mean may change its sign."""
    one = trainer(0.5, 1.0, 0)
    if blend is Blend.SINCE:
        one.sends()
    one.model.has(-0.5, 0.1, 5)
    if blend is Blend.SENT:
        one.sends()
    mean, var, _ = one.merge(blend, one.becomes(-0.5, 0.2, 5))
    assert var == pytest.approx(0.1)
    assert mean == pytest.approx(-1.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**31])
def test_a_value_that_cant_be_sent_is_replaced_by_the_global_one(bad: float) -> None:
    """Training goes on: statistics of an overflown step heal, and harm nobody else."""
    one = trainer(0.5, 1.0, 0)
    one.model.has(bad, 2.0, 5)
    assert one.sends() == [0.5, 2.0, 5.0]
    assert one.local.write_delta((PARAMETERS, MEANS, COUNTERS))
    kept = one.becomes(0.25, 1.5, 5)
    for blend in (Blend.SINCE, Blend.ALL, Blend.NONE):
        one.model.has(bad, 2.0, 5)
        assert one.merge(blend, kept)[0] == 0.25


def test_a_short_dtype_loses_nothing_of_what_does_not_change() -> None:
    """A peer in fp16 sends the global values back as they were, not as it has rounded them."""
    one = trainer(dtype=torch.float16)
    kept = one.becomes(1 / 3, 1.1, 5)
    one.merge(Blend.NONE, kept)
    assert one.model.held[0] != one.theta[1].item()
    assert one.sends() == one.theta[1:].tolist()
    one.model.norm.running_var.fill_(1.5)
    assert one.sends()[:2] == [one.theta[1].item(), 1.5]


def test_a_state_dict_has_the_global_values_in_the_models_dtypes() -> None:
    """Those loaded last, not the newest and not the model's own; after leaving, too."""
    one = trainer(0.5, 1.0, 3)
    one.model.has(0.75, 2.0, 4)
    kept = one.becomes(0.25, 1.5, 9)
    for _ in range(2):
        state = with_global_values(one.model, one.local.global_values(kept))
        assert state["norm.running_mean"].tolist() == [0.5]
        assert state["norm.running_var"].dtype == torch.float32
        assert state["norm.num_batches_tracked"].item() == 3
        assert state["norm.num_batches_tracked"].dtype == torch.int64
        one.local.keep_values(kept)
    assert one.model.held == (0.75, 2.0, 4)


@pytest.mark.parametrize("now", [None, torch.zeros(2), torch.zeros(1, dtype=torch.int64)])
def test_a_buffer_may_not_change_its_shape_or_kind(now: Tensor | None) -> None:
    one = trainer()
    one.model.norm.running_mean = now
    with pytest.raises(UsageError, match=r"buffer=norm\.running_mean was .* when the run was entered, .*buffers=local"):
        one.sends()


def test_buffers_that_are_not_contiguous_and_span_slices() -> None:
    model = Normed()
    model.register_buffer("table", torch.arange(12.0).view(3, 4).t())
    layout = Layout.build(specs_of(model), slice_elements=5, buffers=buffers.specs_of(model))
    theta, base, values = torch.zeros(3, layout.numel)
    local = LocalModel(model, layout, theta, base, torch.zeros(layout.numel), values=values)
    local.write_theta()
    slices = [place.index for place in layout.slices]
    theta[:] = torch.arange(layout.numel) + 0.0
    local.merge(dict.fromkeys(slices, Blend.NONE))
    start = next(start for spec, start in layout.places if spec.name == "table")
    assert torch.equal(model.table, theta[start : start + 12].view(4, 3))
    local.write_delta(slices)
    assert torch.equal(values[1:], theta[1:])
