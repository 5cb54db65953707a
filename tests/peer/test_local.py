"""The model's parameters beside the global ones, against the formulas written down plainly, and its buffers."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from p2p_diloco.errors import UsageError
from p2p_diloco.node.slice_work import Bases
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.extents import Rank
from p2p_diloco.peer.local import LocalModel, with_global_values
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors.layout import Layout, specs_of

BLENDS = (Blend.NONE, Blend.ALL, Blend.SINCE, Blend.SENT, Blend.MIX)
"""One of each kind."""

pytestmark = pytest.mark.usefixtures("short_merges")


class Model(nn.Module):
    """Parameters of several shapes and dtypes, one of them tied, one frozen, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 2))
        self.b = nn.Parameter(torch.randn(5).to(dtype))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.c = nn.Parameter(torch.randn(2, 2).t())
        self.tied = self.a
        self.register_buffer("seen", torch.tensor([3.0]))


def flat(model: Model, layout: Layout) -> Tensor:
    named = dict(model.named_parameters())
    return torch.cat([named[spec.name].detach().float().reshape(-1) for spec, _ in layout.places])


def train(model: Model) -> None:
    with torch.no_grad():
        for p in (model.a, model.b, model.c):
            p.add_(torch.randn(p.shape).to(p.dtype))


def rounded(model: Model, layout: Layout, values: Tensor) -> Tensor:
    """Flat values as the model can hold them."""
    dtypes = torch.cat([torch.full((spec.numel,), spec.dtype == "bfloat16") for spec, _ in layout.places])
    return torch.where(dtypes, values.bfloat16().float(), values)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_blend_is_its_formula(data: st.DataObject) -> None:
    """Over any history of merges, trainings and sendings, of any slices, local values are what the formulas
    say."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    model = Model(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    layout = Layout.build(
        specs_of(model), data.draw(st.sampled_from([1, 2])), "contiguous", data.draw(st.integers(1, 15))
    )
    theta, old, delta = (torch.zeros(layout.numel) for _ in range(3))
    share = data.draw(st.sampled_from([0.0, 0.25]))
    local, bases = LocalModel(model, layout, theta, old, delta, share=share), Bases(layout, theta, old)
    everything = [place.index for place in layout.slices]
    theta.copy_(torch.randn(layout.numel))
    local.merge(dict.fromkeys(everything, Blend.NONE))
    bases.loaded(everything)
    base = rounded(model, layout, theta)
    assert torch.equal(flat(model, layout), base)
    sent = torch.zeros(layout.numel)
    for _ in range(data.draw(st.integers(1, 4))):
        train(model)
        if data.draw(st.booleans()):
            slices = data.draw(st.sets(st.sampled_from(everything), min_size=1))
            before = flat(model, layout)
            local.write_delta(slices, bases.kept)
            if data.draw(st.booleans()):
                bases.stand(slices)
            for index in slices:
                part = slice(layout.slices[index].start, layout.slices[index].stop)
                sent[part] = (base - before)[part]
        assert torch.equal(delta, sent)
        for index in everything:
            bases.keep(index)
        theta.copy_(torch.randn(layout.numel))
        blends = data.draw(st.dictionaries(st.sampled_from(everything), st.sampled_from(BLENDS)))
        gone = Blend.SENT  # there is nothing to measure another from
        blends |= {n: gone for n in bases.gone if blends.get(n) not in (Blend.NONE, Blend.MIX)}
        expected = flat(model, layout)
        for index, blend in blends.items():
            part = slice(layout.slices[index].start, layout.slices[index].stop)
            progress = expected[part] - base[part]
            match blend:
                case Blend.SINCE:
                    progress = progress + sent[part]
                case Blend.SENT:
                    progress = -sent[part]
                case Blend.NONE:
                    progress = torch.zeros(len(progress))
            mixed = torch.lerp(theta[part], expected[part], share)
            expected[part] = mixed if blend is Blend.MIX else theta[part] + progress
            base[part] = rounded(model, layout, theta)[part]
        local.merge(blends, bases.kept)
        bases.loaded(blends)
        assert torch.equal(flat(model, layout), rounded(model, layout, expected))
        assert torch.equal(delta, sent)


class Odd(nn.Module):
    """Parameters longer than a piece, a scalar, transposed, channels last, with gaps."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        tensors = [
            torch.randn(40),
            torch.randn(()),
            torch.randn(5, 3).t(),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.randn(40)[::2],
        ]
        for index, tensor in enumerate(tensors):
            same = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            self.register_parameter(f"p{index}", nn.Parameter(same.copy_(tensor)))

    def plain(self) -> Tensor:
        return torch.cat([p.detach().float().reshape(-1) for p in self.parameters()])


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_strides_and_dtypes_are_no_matter(dtype: torch.dtype, sent: torch.dtype) -> None:
    """To the bit: θ is what the model holds, and a model that loads θ holds it rounded to its dtype. Δ = base − local
    in fp32, of the base as the parameters hold it, no more than rounded where it is kept in less."""
    torch.manual_seed(0)
    model = Odd(dtype)
    layout = Layout.build(specs_of(model))
    theta, delta = torch.empty(layout.numel), torch.empty(layout.numel, dtype=sent)
    local = LocalModel(model, layout, theta, torch.zeros(0), delta)
    local.write_theta()
    assert torch.equal(theta, model.plain())
    theta.copy_(torch.randn(layout.numel))
    everything = [place.index for place in layout.slices]
    local.write_delta(everything)
    assert torch.equal(delta, (theta.to(dtype).float() - model.plain()).to(sent))
    versions = [p._version for p in model.parameters()]
    local.merge(dict.fromkeys(everything, Blend.NONE))
    assert torch.equal(model.plain(), theta.to(dtype).float())
    assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
    assert all(p.requires_grad and p.grad_fn is None for p in model.parameters())
    local.write_delta(everything)
    assert not delta.any()


_EXCHANGE = """
import os, torch
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors.layout import Layout, specs_of

torch.set_num_threads(4)
numel = 300_000
model = torch.nn.Module()
for dtype in (torch.float32, torch.bfloat16):
    model.register_parameter(f"p{dtype.itemsize}", torch.nn.Parameter(torch.empty(numel, dtype=dtype)))
layout = Layout.build(specs_of(model), 1, "contiguous", numel)
delta = torch.empty(layout.numel, dtype=torch.bfloat16)
local = LocalModel(model, layout, *torch.empty(2, layout.numel), delta, share=0.5)
before = len(os.listdir("/proc/self/task"))
local.write_theta()
local.write_delta(local.slices)
for blend in Blend:
    local.merge(dict.fromkeys(local.slices, blend))
print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
torch.zeros(numel).add_(1.0)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_an_exchange_leaves_torchs_threads_alone() -> None:
    """No work of an exchange is divided among torch's threads, and their number stays what the user has set. (Torch
    starts its threads at the first work that it divides, here the addition at the end.)"""
    done = subprocess.run([sys.executable, "-c", _EXCHANGE], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "4", "3"]


class Scaled(nn.Linear):
    """A layer with extra state, as FP8 layers and observers have it."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 1, bias=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        assert state == self.extra


@pytest.mark.parametrize("extra", [{"amax": [1.0, 2.0]}, None, b"abc"])
def test_extra_state_that_is_no_tensor_is_kept(extra: Any) -> None:
    """In a run and without one."""
    model = nn.Sequential(Scaled(extra))
    state = with_global_values(model, {"0.weight": torch.full((1, 2), 7.0)})
    assert state["0._extra_state"] is extra
    assert state["0.weight"].tolist() == [[7.0, 7.0]]
    model.load_state_dict(state)
    assert AbsentPeer(model, None).global_state_dict().keys() == state.keys()


def test_an_entry_that_a_hook_has_cast_is_global_too() -> None:
    """A hook may put a copy of a parameter in another dtype into the state_dict. The value is the run's, under all
    names, in the entry's dtype."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).bfloat16()
    model[1].weight = model[0].weight

    def cast(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.update({name: value.float() for name, value in state.items()})

    model._register_state_dict_hook(cast)
    state = with_global_values(model, {"0.weight": torch.full((2, 2), 7.0, dtype=torch.bfloat16)})
    for name in ("0.weight", "1.weight"):
        assert state[name].dtype == torch.float32
        assert (state[name] == 7.0).all()


# -- buffers


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


def test_buffers_are_loaded_and_sent_as_the_run_has_them() -> None:
    # A newcomer without progress takes the global values. Even if its own counter is higher.
    one = trainer(0.5, 2.0, 100)
    assert one.merge(Blend.ALL, one.becomes(0.25, 1.5, 3)) == (0.25, 1.5, 3)

    # A short dtype loses nothing of what does not change. A peer in fp16 sends the global values back as they
    # were, not as it has rounded them.
    one = trainer(dtype=torch.float16)
    kept = one.becomes(1 / 3, 1.1, 5)
    one.merge(Blend.NONE, kept)
    assert one.model.held[0] != one.theta[1].item()
    assert one.sends() == one.theta[1:].tolist()
    one.model.norm.running_var.fill_(1.5)
    assert one.sends()[:2] == [one.theta[1].item(), 1.5]

    # A state dict has the global values in the model's dtypes. Those loaded last, not the newest and not the
    # model's own; after leaving, too.
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

    # buffers that are not contiguous and span slices
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


@pytest.mark.parametrize("now", [None, torch.zeros(2), torch.zeros(1, dtype=torch.int64)])
def test_a_buffer_may_not_change_its_shape_or_kind(now: Tensor | None) -> None:
    one = trainer()
    one.model.norm.running_mean = now
    with pytest.raises(UsageError, match=r"buffer=norm\.running_mean was .* when the run was entered, .*buffers=local"):
        one.sends()
