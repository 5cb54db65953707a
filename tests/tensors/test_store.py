"""State changes when it is accepted, and never before."""

from __future__ import annotations

import pytest
import torch

from p2p_diloco.tensors import codec
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.tensors.store import ShardStore

LAYOUT = Layout.build((ParamSpec("a", (10, 3), "float32"), ParamSpec("b", (17,), "float32")), 2, shard_elements=8)
NUMEL = LAYOUT.shards[1].numel


def store(outer: OuterOptimizer | None = None) -> ShardStore:
    theta = torch.linspace(-1, 1, LAYOUT.numel)
    return ShardStore(LAYOUT, outer or OuterOptimizer(), theta)


def mean(seed: int, name: str = "bf16") -> bytes:
    return bytes(codec.encode(torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)), name))


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_same_bytes_lead_every_replica_to_the_same_digest(name):
    """Two replicas that apply the same means agree after each, also through memory of their own."""
    one, two = store(), store()
    for seed in range(3):
        first = one.propose(1, mean(seed, name), name, b"m")
        second = two.propose(1, memoryview(mean(seed, name)), name, b"m")
        assert first.digest == second.digest
        one.accept(1, first)
        two.accept(1, second)
        assert one.digest(1, b"m") == two.digest(1, b"m") == first.digest
    assert one.digest(1, b"m") != one.digest(1, b"n")


def test_a_proposal_changes_nothing():
    """However many are made, in whatever order, until one is accepted."""
    held = store()
    held.accept(1, held.propose(1, mean(0), "bf16", b""))
    before, theta, m = held.digest(1, b""), held.theta(1).clone(), held.state(1)["m"].clone()
    exported = b"".join(held.export(1))
    again = [held.propose(1, mean(1), "bf16", b"").digest for _ in range(2)]
    held.load(1, exported, b"")
    assert again[0] == again[1] != before
    assert held.digest(1, b"") == before
    assert torch.equal(held.theta(1), theta)
    assert torch.equal(held.state(1)["m"], m)


def test_accepting_writes_the_shards_part_of_the_shared_vector_and_no_other():
    """The trainer sees the new values where it looks for them."""
    shared = torch.zeros(LAYOUT.numel).share_memory_()
    held = ShardStore(LAYOUT, OuterOptimizer(lr=1.0, momentum=0.0), shared)
    held.accept(1, held.propose(1, codec.encode(torch.ones(NUMEL), "fp32"), "fp32", b""))
    place = LAYOUT.shards[1]
    expected = torch.zeros(LAYOUT.numel)
    expected[place.start : place.stop] = -1
    assert torch.equal(shared, expected)


@pytest.mark.parametrize("outer", [OuterOptimizer(), OuterOptimizer("Adam", lr=0.1), OuterOptimizer("ASGD", lr=0.1)])
def test_exported_state_goes_on_elsewhere_to_the_bit(outer):
    """Digest checked before adopting; the next step is the same on both."""
    giver, taker = store(outer), store(outer)
    for seed in range(2):
        giver.accept(1, giver.propose(1, mean(seed), "bf16", b""))
    raw = b"".join(giver.export(1))
    assert len(raw) == giver.state_nbytes(1)
    proposal = taker.load(1, raw, b"")
    assert proposal.digest == giver.digest(1, b"") != taker.digest(1, b"")
    taker.accept(1, proposal)
    assert taker.propose(1, mean(7), "bf16", b"").digest == giver.propose(1, mean(7), "bf16", b"").digest


def test_replaced_tensors_are_reused_for_later_proposals(monkeypatch):
    """Many steps, fetched states and restatements take no more of it than the first few; a proposal that is dropped
    takes its own along, and nothing is spoilt."""
    fresh = []
    monkeypatch.setattr(torch, "empty_like", lambda tensor: fresh.append(tensor) or torch.empty(tensor.shape))
    held, plain = store(), store()
    for seed in range(12):
        if seed == 6:
            held.propose(1, mean(99), "bf16", b"")
        if seed % 4 == 1:
            held.accept(1, held.restate(1, b""))
        if seed % 4 == 3:
            held.accept(1, held.load(1, b"".join(plain.export(1)), b""))
        held.accept(1, held.propose(1, mean(seed), "bf16", b""))
        theta, state = OuterOptimizer().step(plain.theta(1), plain.state(1), codec.decode(mean(seed), "bf16", NUMEL))
        plain.theta(1).copy_(theta)
        plain._states[1] = state
        assert held.digest(1, b"") == plain.digest(1, b"")
    assert len(fresh) <= 2 + 2


def test_what_was_loaded_lives_without_its_buffer():
    """A network buffer is used again as soon as it has been read."""
    giver = store()
    giver.accept(1, giver.propose(1, mean(0), "bf16", b""))
    buffer = bytearray(b"".join(giver.export(1)))
    proposal = store().load(1, buffer, b"")
    buffer[:] = bytes(len(buffer))
    taker = store()
    taker.accept(1, proposal)
    assert taker.digest(1, b"") == proposal.digest


@pytest.mark.parametrize("bit", [0, 8 * 4 * NUMEL - 1, 8 * 4 * NUMEL, 8 * 4 * 2 * NUMEL - 9])
def test_a_flipped_bit_in_a_received_state_changes_the_digest(bit):
    giver = store()
    raw = bytearray(b"".join(giver.export(1)))
    raw[bit // 8] ^= 1 << bit % 8
    assert store().load(1, raw, b"").digest != giver.digest(1, b"")


@pytest.mark.parametrize("change", [lambda raw: raw[:-4], lambda raw: raw + bytes(4), lambda raw: b""])
def test_state_of_a_wrong_length_is_refused(change):
    raw = b"".join(store().export(1))
    with pytest.raises(ValueError, match="bytes, found"):
        store().load(1, change(raw), b"")
    with pytest.raises(ValueError, match="bytes, found"):
        store().propose(1, change(mean(0)), "bf16", b"")


def test_values_that_are_not_finite_are_refused_wherever_they_are():
    """In the mean, in θ, in the optimizer's state; also where a finite mean leads beyond fp32."""
    held = store()
    with pytest.raises(ValueError, match="not finite"):
        held.propose(1, codec.encode(torch.full((NUMEL,), torch.inf), "bf16"), "bf16", b"")
    nan = torch.tensor([torch.nan]).numpy().tobytes()
    raw = b"".join(held.export(1))
    with pytest.raises(ValueError, match="not finite"):
        held.load(1, nan + raw[4:], b"")
    with pytest.raises(ValueError, match="not finite"):
        held.load(1, raw[:-4] + nan, b"")
    largest = torch.full((NUMEL,), torch.finfo(torch.float32).max)
    with pytest.raises(ValueError, match="not finite"):
        held.propose(1, codec.encode(largest, "fp32"), "fp32", b"")


@pytest.mark.parametrize(
    "theta",
    [torch.zeros(3), torch.zeros(LAYOUT.numel, dtype=torch.float64), torch.zeros(2 * LAYOUT.numel)[::2]],
)
def test_a_vector_that_doesnt_fit_the_layout_is_refused(theta):
    with pytest.raises(ValueError, match="47 elements of flat fp32"):
        ShardStore(LAYOUT, OuterOptimizer(), theta)


def test_a_step_is_taken_with_the_rates_that_are_named():
    """The numbers of docs/math.md: the momentum goes on, and the step after needs them named anew."""
    held = store(OuterOptimizer(lr=1.0, momentum=0.5))
    held.theta(1).zero_()
    ones, values = codec.encode(torch.ones(NUMEL), "fp32"), []
    for rates in (None, None, None, (0.25, 0.75), None):
        held.accept(1, held.propose(1, ones, "fp32", b"", rates=rates))
        values.append((held.state(1)["m"][0].item(), held.theta(1)[0].item()))
    assert values[:4] == [(1.0, -1.5), (1.5, -3.25), (1.75, -5.125), (2.3125, -5.80859375)]
    assert values[4] == (2.15625, -5.80859375 - 1 - 0.5 * 2.15625)


def test_torch_optimizers_take_another_learning_rate():
    """Their state stays, and a step is as long as the new one says."""
    one, two = (store(OuterOptimizer("adam", lr=lr)) for lr in (0.1, 0.4))
    for held in (one, two):
        held.accept(1, held.propose(1, mean(0), "bf16", b"", rates=(0.1, 0.0)))
    first, second = one.propose(1, mean(1), "bf16", b"", rates=(0.4, 0.0)), two.propose(1, mean(1), "bf16", b"")
    assert first.digest == second.digest
