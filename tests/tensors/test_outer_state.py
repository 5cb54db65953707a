"""The outer state of slices: steps in place, whole or not at all; several threads compute the same bits as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2p_diloco.tensors import buffers, limits
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.codec import decode, encode
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.flat import BLOCK, Finite, Threads, pseudo_gradient
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.limits import Room
from p2p_diloco.tensors.mean import weighted_mean
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.tensors.outer_state import OuterState, digest, joined

SIZE = BLOCK + 1000
LAYOUT = Layout.build((ParamSpec("p", (2 * SIZE,), "float32"),), 1, "contiguous", SIZE)
BUFFERED = Layout.build(
    (ParamSpec("p", (8,), "float32"),), 1, buffers=(ParamSpec("b", (4,), "float32"), ParamSpec("n", (2,), "int64"))
)
NESTEROV = OuterOptimizer()


def drawn(seed: int, numel: int = 2 * SIZE) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("threads", [Threads(1), Threads(3)], ids=["one thread", "three threads"])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("outer", "limit"),
    [(NESTEROV, 0.0), (NESTEROV, 2.0), (DelayedNesterov(NESTEROV, 4), 2.0), (OuterOptimizer("adam", 0.1), 2.0)],
    ids=["sgd", "limited", "delayed", "adam"],
)
def test_steps_are_those_of_the_optimizer(outer: Any, limit: float, codec: str, threads: Threads) -> None:
    """To the bit: θ, and every tensor of the optimizer's state, over several steps of growing means."""
    made, rates = OuterState(LAYOUT, outer, drawn(0), limit, threads), (0.5, 0.8)
    theta = [drawn(0)[:SIZE], drawn(0)[SIZE:]]
    state = [dict(held.state) for held in made.slices]
    for number in range(5):
        for index in range(2):
            mean = encode(drawn(10 + number, SIZE) * 10.0**number, codec)
            factor = made.step(index, made.slices[index], mean, codec, 1, number % 4, rates)
            grad, lengths = decode(mean, codec, SIZE), {}
            if limit:
                cut = limits.cut(grad.split(BLOCK), state[index].pop(limits.LENGTHS), limit, Room())
                grad, lengths = (
                    torch.cat([block.clone() for block in cut.of(grad.split(BLOCK))]),
                    {limits.LENGTHS: cut.lengths},
                )
                assert factor == cut.factor
            more = (1, number % 4) if isinstance(outer, DelayedNesterov) else ()
            theta[index], after = outer.revised(*rates).step(theta[index], state[index], grad, *more)
            state[index] = {**after, **lengths}
            held = made.slices[index]
            assert torch.equal(held.theta, theta[index])
            assert all(torch.equal(values, state[index][name]) for name, values in held.state.items())
            parts = [theta[index], *(state[index][name] for name in made.lengths(LAYOUT.slices[index]))]
            assert bytes(joined(held.export())) == b"".join(part.numpy().tobytes() for part in parts)
            assert made.nbytes(index) == sum(4 * part.numel() for part in parts)


def test_buffers_move_towards_what_is_sent() -> None:
    theta = drawn(1, BUFFERED.numel)
    made = OuterState(BUFFERED, NESTEROV, theta.clone())
    expected = [theta[place.start : place.stop].clone() for place in BUFFERED.slices]
    for index, share in ((1, 0.25), (2, 1.0), (2, 0.5)):
        place, values = BUFFERED.slices[index], drawn(index, BUFFERED.slices[index].numel)
        expected[index] = buffers.stepped(place.kind, expected[index], values, share)
        made.step_buffers(index, made.slices[index], encode(values, "fp32"), share)
        assert torch.equal(made.slices[index].theta, expected[index])
    with pytest.raises(ValueError, match="not finite"):
        made.step_buffers(1, made.slices[1], encode(torch.full((4,), float("nan")), "fp32"), 1.0)
    assert torch.equal(made.slices[1].theta, expected[1])


@pytest.mark.parametrize(
    "outer", [NESTEROV, OuterOptimizer("Adam", lr=0.1), OuterOptimizer("ASGD", lr=0.1), DelayedNesterov(NESTEROV, 4)]
)
def test_exported_state_goes_on_elsewhere_to_the_bit(outer: Any) -> None:
    """Its digest is the same there, also once the buffer that brought it is used again; and so is the next step."""
    giver, taker = OuterState(LAYOUT, outer, drawn(0), 2.0), OuterState(LAYOUT, outer, drawn(5), 2.0)
    for seed in range(3):
        giver.step(1, giver.slices[1], encode(drawn(seed, SIZE), "bf16"), "bf16", 1, seed)
    raw = bytearray(joined(giver.slices[1].export()))
    assert len(raw) == giver.nbytes(1)
    staged = taker.stage(1, raw)
    raw[:] = bytes(len(raw))
    assert staged.digest() == giver.slices[1].digest() != taker.slices[1].digest()
    taker.adopt(1, staged)
    for one in (giver, taker):
        assert one.step(1, one.slices[1], encode(drawn(7, SIZE) * 80, "bf16"), "bf16", 1, 3) < 1
    assert taker.slices[1].digest() == giver.slices[1].digest()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_slice_before_its_first_step_is_exported_without_its_state(in_place: bool) -> None:
    """It is zeros, and so it is where the slice is staged, also over one that has made steps."""
    giver, taker = (OuterState(LAYOUT, NESTEROV, drawn(seed), 2.0) for seed in (0, 5))
    taker.step(1, taker.slices[1], encode(drawn(3, SIZE), "bf16"), "bf16")
    raw = joined(giver.slices[1].export(first=True))
    assert len(raw) == giver.nbytes(1, first=True) == 4 * SIZE < giver.nbytes(1)
    staged = taker.stage(1, raw, in_place=in_place)
    assert (staged is taker.slices[1]) == in_place
    assert staged.digest() == giver.slices[1].digest()
    with pytest.raises(ValueError, match="bytes"):
        taker.stage(1, raw[:-4], in_place=in_place)


def test_a_step_is_made_with_the_rates_that_are_named() -> None:
    """The numbers of docs/math.md: the momentum goes on, and the step after needs them named anew."""
    made = OuterState(LAYOUT, OuterOptimizer(lr=1.0, momentum=0.5), torch.zeros(LAYOUT.numel))
    ones, values = encode(torch.ones(SIZE), "fp32"), []
    for rates in (None, None, None, (0.25, 0.75), None):
        held = made.slices[1]
        made.step(1, held, ones, "fp32", rates=rates)
        values.append((held.state["m"][0].item(), held.theta[0].item()))
    assert values[:4] == [(1.0, -1.5), (1.5, -3.25), (1.75, -5.125), (2.3125, -5.80859375)]
    assert values[4] == (2.15625, -5.80859375 - 1 - 0.5 * 2.15625)


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


@pytest.mark.parametrize("threads", [Threads(1), Threads(2)], ids=["one thread", "two threads"])
def test_a_step_that_can_only_be_finite_is_made_in_place(threads: Threads) -> None:
    """Its bits are those of a step beside the present values, which is made after the state came from elsewhere, and
    where the momentum and the learning rate could lead beyond fp32."""
    made, other = (OuterState(LAYOUT, NESTEROV, drawn(0), 2.0, threads) for _ in range(2))
    places = []
    for number in range(4):
        mean = encode(drawn(number, SIZE), "bf16")
        made.step(0, made.slices[0], mean, "bf16")
        places.append(made.slices[0].state["m"].data_ptr())
        other.stage(0, joined(other.slices[0].export()), in_place=True)
        other.step(0, other.slices[0], mean, "bf16")
    assert len(set(places)) == 1
    assert made.slices[0].digest() == other.slices[0].digest()
    before = made.slices[0].digest()
    with pytest.raises(ValueError, match="not finite"):
        made.step(0, made.slices[0], encode(drawn(5, SIZE), "bf16"), "bf16", rates=(3e38, 0.9))
    assert made.slices[0].digest() == before


def test_a_buffer_that_leads_beyond_fp32_is_refused() -> None:
    """Also where θ stays finite until it is full."""
    made = OuterState(LAYOUT, DelayedNesterov(OuterOptimizer(lr=0.1), 3), drawn(0))
    large = encode(torch.full((SIZE,), 0.9 * torch.finfo(torch.float32).max), "fp32")
    with pytest.raises(ValueError, match="not finite"):
        made.step(0, made.slices[0], large, "fp32", 2, 0)


def test_theta_stays_in_its_memory() -> None:
    """The trainer's process has it mapped."""
    theta = drawn(0)
    made = OuterState(LAYOUT, NESTEROV, theta)
    made.step(1, made.slices[1], encode(torch.ones(SIZE), "fp32"), "fp32")
    made.adopt(0, made.stage(0, joined(made.slices[1].export())))
    assert torch.equal(theta[:SIZE], theta[SIZE:])
    assert not torch.equal(theta, drawn(0))


def test_a_state_that_is_not_one_is_not_staged() -> None:
    made = OuterState(LAYOUT, NESTEROV, drawn(0))
    raw = joined(made.slices[0].export())
    for wrong in (raw[:-4], memoryview(bytes(raw) + bytes(4)), b""):
        with pytest.raises(ValueError, match="elements in fp32 are"):
            made.stage(0, wrong)
    nan = b"\xff\xff\xff\xff"
    for spoilt in (bytes(raw[:-4]) + nan, nan + bytes(raw[4:])):
        with pytest.raises(ValueError, match="not finite"):
            made.stage(0, spoilt)


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


# -- digests


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_is_seen(bad):
    """In whichever block it is; finite values whose sum is not are finite."""
    for place in (None, 0, 32, 33, 999):
        values, seen = torch.full((1000,), torch.finfo(torch.float32).max), Finite()
        if place is not None:
            values[place] = bad
        for block in (*values.split(33), torch.empty(0)):
            seen(block.numpy())
        assert seen.finite is (place is None)


def test_what_lies_where_counts():
    """The same bytes under other names, or divided otherwise, are another state. Digests are compared between machines
    and stored in checkpoints, so they never change."""
    assert digest(torch.tensor([1.0, 2.0]), {"m": torch.tensor([0.5])}) == "1ec77077a2e04306612ae3497663e0f5"
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    assert digest(a, {"x": a, "y": b}) != digest(a, {"x": b, "y": a})
    assert digest(a, {"x": b}) != digest(a, {"z": b})
    assert digest(torch.cat([a, b]), {}) != digest(a, {"x": b})
    assert digest(a, {}) != digest(a, {"x": torch.empty(0)})
    assert digest(torch.tensor([0.0]), {}) != digest(torch.tensor([-0.0]), {})


# -- threads


NUMEL = 1000


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small slice has several."""
    monkeypatch.setattr("p2p_diloco.tensors.flat.BLOCK", 128)
    monkeypatch.setattr("p2p_diloco.tensors.outer_state.BLOCK", 128)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("count", [1, 2, 3, 64])
@pytest.mark.parametrize("numel", [1, 128, 129, NUMEL])
def test_ranges_cover_all_elements_once(count: int, numel: int) -> None:
    """Each element is in one range, whatever the number of threads; no more ranges than threads."""
    seen, ranges = torch.zeros(numel), []

    def work(place: slice) -> None:
        seen[place] += 1
        ranges.append(place)

    Threads(count).over(numel, work)
    assert bool((seen == 1).all())
    assert len(ranges) <= count
    assert all(place.start % 128 == 0 for place in ranges)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("codec", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("aggregation", ["mean", "clip", "centered_clip"])
def test_a_mean_has_the_same_bits(codec: str, aggregation: str) -> None:
    """Also with a codec whose bytes can't be divided."""
    torch.manual_seed(0)
    given = [(f"p{i}", 1.0 + i, codecs.encode(torch.randn(NUMEL) * (1 + i), codec)) for i in range(4)]
    alone, together = (
        weighted_mean(given, codec, NUMEL, torch.bfloat16, aggregation, Threads(count))  # type: ignore[arg-type]
        for count in (1, 3)
    )
    assert torch.equal(alone, together)


def test_an_error_of_any_thread_comes_after_all_are_done() -> None:
    """No thread goes on using memory that the caller takes back."""
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        Threads(2).all(lambda: done.append(1), fail, lambda: done.append(2))
    assert done == [1, 2]


def test_descending_along_the_pseudo_gradient_goes_to_where_the_peer_is():
    """The sign: θ_base − Δ is θ; the flipped one diverges."""
    out = torch.empty(1)
    pseudo_gradient(torch.tensor([1.0]), torch.tensor([0.5]), out)
    assert out.item() == 0.5
