"""The outer state of slices: the steps of `ShardStore`, in place, and whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2p_diloco.tensors import outer_state
from p2p_diloco.tensors.codec import encode
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.tensors.outer_state import OuterState, joined
from p2p_diloco.tensors.store import ShardStore
from p2p_diloco.tensors.threads import Threads

SIZE = BLOCK + 1000
LAYOUT = Layout.build((ParamSpec("p", (2 * SIZE,), "float32"),), 1, "contiguous", SIZE)
BUFFERED = Layout.build(
    (ParamSpec("p", (8,), "float32"),), 1, buffers=(ParamSpec("b", (4,), "float32"), ParamSpec("n", (2,), "int64"))
)
NESTEROV = OuterOptimizer()


def drawn(seed: int, numel: int = 2 * SIZE) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [Threads(1), Threads(3)], ids=["one thread", "three threads"])
@pytest.mark.parametrize("codec", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize(
    ("outer", "limit"),
    [(NESTEROV, 0.0), (NESTEROV, 2.0), (DelayedNesterov(NESTEROV, 4), 0.0), (OuterOptimizer("adam", 0.1), 2.0)],
    ids=["sgd", "limited", "delayed", "adam"],
)
def test_steps_are_those_of_shards(outer: Any, limit: float, codec: str, threads: Threads) -> None:
    """To the bit: θ, and every tensor of the optimizer's state, over several steps of growing means."""
    old = ShardStore(LAYOUT, outer, drawn(0), limit)
    new = OuterState(LAYOUT, outer, drawn(0), limit, threads)
    for number in range(6):
        for index in range(2):
            mean = encode(drawn(10 + number, SIZE) * 10.0**number, codec)
            proposal = old.propose(index, mean, codec, b"", 1, number % 4, (0.5, 0.8))
            old.accept(index, proposal)
            new.step(index, new.slices[index], mean, codec, 1, number % 4, (0.5, 0.8))
            held = new.slices[index]
            assert held.digest() == old.digest(index, b"")
            assert torch.equal(held.theta, old.theta(index))
            assert bytes(joined(held.export())) == b"".join(map(bytes, old.export(index)))
            assert new.nbytes(index) == old.state_nbytes(index)


def test_buffers_move_as_shards_do() -> None:
    theta = drawn(1, BUFFERED.numel)
    old, new = ShardStore(BUFFERED, NESTEROV, theta.clone()), OuterState(BUFFERED, NESTEROV, theta)
    for index, share in ((1, 0.25), (2, 1.0), (2, 0.5)):
        values = encode(drawn(index, BUFFERED.shards[index].numel), "fp32")
        old.accept(index, old.propose_buffers(index, values, b"", share))
        new.step_buffers(index, new.slices[index], values, share)
        assert torch.equal(new.slices[index].theta, old.theta(index))
    with pytest.raises(ValueError, match="not finite"):
        new.step_buffers(1, new.slices[1], encode(torch.full((4,), float("nan")), "fp32"), 1.0)
    assert torch.equal(new.slices[1].theta, old.theta(1))


@pytest.mark.parametrize("threads", [Threads(1), Threads(2)], ids=["one thread", "two threads"])
@pytest.mark.parametrize("where", [0, SIZE - 1])
def test_a_step_that_is_not_finite_changes_nothing(where: int, threads: Threads) -> None:
    """Wherever in the slice the value is; the next step is as if this one had never been."""
    made, other = (OuterState(LAYOUT, NESTEROV, drawn(0), 2.0, threads) for _ in range(2))
    mean = encode(drawn(1, SIZE), "fp32")
    spoilt = drawn(2, SIZE)
    spoilt[where] = 3e38
    for one in (made, other):
        one.step(0, one.slices[0], mean, "fp32")
    before = made.slices[0].digest()
    with pytest.raises(ValueError, match="not finite"):
        made.step(0, made.slices[0], encode(spoilt, "fp32"), "fp32", rates=(1e3, 0.9))
    assert made.slices[0].digest() == before
    for one in (made, other):
        one.step(0, one.slices[0], mean, "fp32")
    assert made.slices[0].digest() == other.slices[0].digest()


def test_theta_stays_in_its_memory() -> None:
    """The trainer's process has it mapped."""
    theta = drawn(0)
    made = OuterState(LAYOUT, NESTEROV, theta)
    made.step(1, made.slices[1], encode(torch.ones(SIZE), "fp32"), "fp32")
    made.adopt(0, made.stage(0, joined(made.slices[1].export())))
    assert torch.equal(theta[:SIZE], theta[SIZE:])
    assert not torch.equal(theta, drawn(0))


def test_a_staged_slice_steps_and_is_adopted_apart_from_the_present_one() -> None:
    donor, made = OuterState(LAYOUT, NESTEROV, drawn(0)), OuterState(LAYOUT, NESTEROV, drawn(5))
    mean = encode(torch.ones(SIZE), "fp32")
    donor.step(0, donor.slices[0], mean, "fp32")
    staged = made.stage(0, joined(donor.slices[0].export()))
    assert staged.digest() == donor.slices[0].digest()
    made.step(0, made.slices[0], mean, "fp32")
    for one, held in ((donor, donor.slices[0]), (made, staged)):
        one.step(0, held, mean, "fp32")
    assert made.slices[0].digest() != donor.slices[0].digest()
    made.adopt(0, staged)
    assert made.slices[0].digest() == donor.slices[0].digest()
    own = made.stage(1, joined(donor.slices[1].export()), in_place=True)
    assert own is made.slices[1]
    assert own.digest() == donor.slices[1].digest()
    made.adopt(1, own)
    assert own.digest() == donor.slices[1].digest()


def test_a_state_that_is_not_one_is_not_staged() -> None:
    made = OuterState(LAYOUT, NESTEROV, drawn(0))
    raw = joined(made.slices[0].export())
    with pytest.raises(ValueError, match="elements in fp32 are"):
        made.stage(0, raw[:-4])
    spoilt = bytearray(raw)
    spoilt[-4:] = b"\xff\xff\xff\xff"
    with pytest.raises(ValueError, match="not finite"):
        made.stage(0, memoryview(spoilt))


def test_steps_take_no_new_memory() -> None:
    """One slice's θ and state are kept for all slices' steps."""
    made = OuterState(LAYOUT, NESTEROV, drawn(0))
    mean = encode(torch.ones(SIZE), "bf16")
    for _ in range(3):
        for index in range(2):
            made.step(index, made.slices[index], mean, "bf16")
    there = {one.data_ptr() for one in made._spare} | {held.state["m"].data_ptr() for held in made.slices}
    assert len(made._spare) == 2
    for index in range(2):
        made.step(index, made.slices[index], mean, "bf16")
    assert there == {one.data_ptr() for one in made._spare} | {held.state["m"].data_ptr() for held in made.slices}


def test_a_cut_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made = OuterState(LAYOUT, NESTEROV, drawn(0), 2.0)
    for length in (1.0, 1.0, 1.0, 100.0):
        made.step(1, made.slices[1], encode(torch.full((SIZE,), length), "fp32"), "fp32")
    assert "slice 1: a mean was cut to 0.02 of its length" in caplog.text
    assert outer_state.CUT_WARNS > 0.02
