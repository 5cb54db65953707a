"""The core's effects on tensors where numbers go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Apply, Average, Averaged, Damaged
from p2p_diloco.core.messages import Commit, Contribution, Plan, State
from p2p_diloco.core.replica import meta_of
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.node.run import Run
from p2p_diloco.node.work import TensorWork
from p2p_diloco.tensors.layout import Layout, ParamSpec

V, ID = Version(0, 0, 0, "d"), ContributionId(1, 1)


def work(codec: str = "fp32", **config: object) -> TensorWork:
    layout = Layout.build((ParamSpec("p", (4,), "float32"),), 1)
    return TensorWork(Run("r", RunConfig(codec=codec, **config), layout), torch.ones(4))


def payload(values: Tensor) -> memoryview:
    return memoryview(values.numpy().tobytes())


def average(made: TensorWork, value: float) -> Tensor:
    part = Contribution(0, V, ID, ID, 1.0, 1, payload(torch.full((4,), value)))
    averaged = made.average(Average(0, V, (("a", part),), b"meta", None))
    assert isinstance(averaged, Averaged)
    made.accept([(0, averaged.digest)])
    return made.store.theta(0)


def test_a_step_that_leads_nowhere_counts_as_none(caplog: pytest.LogCaptureFixture) -> None:
    """An outer step whose result would not be finite is logged, and the run goes on as if nothing had been sent."""
    made = work(outer_lr=1e37, outer_momentum=0.0)
    assert average(made, 1e30).tolist() == [1.0] * 4
    assert "can't be averaged" in caplog.text


def test_a_state_that_can_make_no_step_is_a_sentence() -> None:
    made = work(outer_lr=1e37, outer_momentum=0.9)
    made.store._states[0]["m"].fill_(1e30)
    with pytest.raises(P2PDilocoError, match=r"the run has diverged.*lower outer_lr"):
        average(made, 1.0)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -(2.0**31)])
def test_what_nobody_would_take_does_not_leave(codec: str, value: float) -> None:
    """A pseudo-gradient that the others would refuse goes out as zeros; the largest that they take as it is."""
    made = work(codec)
    message = Contribution(0, V, ID, ID, 1.0, 1)
    bad = made.encode(0, torch.tensor([1.0, value, 1.0, 1.0]))
    assert bytes(bad) == bytes(made.nbytes(message))
    most = torch.tensor([1.0, 2.0**30 - 64, -(2.0**30), 1.0])
    assert bytes(made.encode(0, most)) != bytes(made.nbytes(message))
    assert made.objection(message, made.encode(0, most)) == ""


def test_a_states_values_need_only_be_finite() -> None:
    """An optimizer may have accumulated what no contribution may hold."""
    made, large = work(), payload(torch.full((8,), 1e30))
    state = State(0, V, 0, Plan(("a",), ("a",)), (), ((0, "d"),))
    commit = Commit(0, V, V, 0, "a", (), state.plan)
    contribution = Contribution(0, V, ID, ID, 1.0, 1)
    assert made.objection(state, large) == made.objection(commit, large) == ""
    assert "huge" in made.objection(contribution, large)
    for message in (state, commit, replace(contribution, weight=2.0)):
        assert "not finite" in made.objection(message, payload(torch.tensor([1.0, float("nan")])))


def flip(values: Tensor, element: int, bit: int) -> None:
    """One bit of one fp32 element."""
    values.view(torch.int32)[element] ^= 1 << bit


@pytest.mark.parametrize("bit", [0, 12, 30])
@pytest.mark.parametrize("what", ["theta", "m"])
def test_a_flipped_bit_is_found_before_the_next_commit(what: str, bit: int) -> None:
    """In θ as in the momentum, the lowest bit as the highest: no mean is taken on a base that is not its version's."""
    made = work(outer_momentum=0.9)
    average(made, 0.5)
    base = replace(V, digest=made.store.digest(0, b"held"))
    effect = Average(0, base, (("a", Contribution(0, base, ID, ID, 1.0, 1, payload(torch.ones(4)))),), b"meta", b"held")
    assert isinstance(made.average(effect), Averaged)
    flip(made.store.theta(0) if what == "theta" else made.store._states[0]["m"], 2, bit)
    assert made.average(effect) == Damaged(0, base)
    assert isinstance(made.average(replace(effect, held=None)), Averaged)


def test_what_nobody_contributed_to_is_no_outer_step() -> None:
    """A commit of no contributions moves neither θ nor the momentum, where it is made and where it is applied."""
    author, replica = work(outer_momentum=0.9), work(outer_momentum=0.9)
    for made in (author, replica):
        average(made, 0.5)
    before = [author.store.theta(0).clone(), author.store.state(0)["m"].clone()]
    averaged = author.average(Average(0, V, (), b"new", None))
    assert isinstance(averaged, Averaged)
    commit = Commit(0, V, replace(V, epoch=1), 0, "a", (), Plan(("a",), ("a",)), averaged.payload)
    applied = replica.apply(Apply(commit, b"new"))
    assert applied.digest == averaged.digest
    for made in (author, replica):
        made.accept([(0, averaged.digest)])
        assert made.store.digest(0, b"new") == averaged.digest
        assert torch.equal(made.store.theta(0), before[0])
        assert torch.equal(made.store.state(0)["m"], before[1])


def test_a_damaged_state_is_told_from_a_sound_one() -> None:
    made = work()
    state = State(0, V, 0, Plan(("a",), ("a",)), (), ((0, "d"),))
    sound = replace(state, version=replace(V, digest=made.store.digest(0, meta_of(state))))
    assert not made.damaged(sound)
    flip(made.store.theta(0), 0, 3)
    assert made.damaged(sound)
