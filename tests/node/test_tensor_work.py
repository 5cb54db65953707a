"""The core's effects on tensors where numbers go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Apply, Average, Averaged, Carry, Damaged
from p2p_diloco.core.leases import DataSet, Use
from p2p_diloco.core.messages import Commit, Contribution, Counted, Plan, State
from p2p_diloco.core.replica import meta_of
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.node.payloads import objection
from p2p_diloco.node.run import Run
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.tensors.codec import CODECS, decode, encode, nbytes
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.mean import WEIGHT_MIN

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


@pytest.mark.parametrize(("aggregation", "mean"), [("clip", 1.0), ("centered_clip", 1.0), ("mean", 334.0)])
def test_the_runs_aggregation_decides_what_a_long_contribution_counts(aggregation: str, mean: float) -> None:
    """Of three, one is a thousand times as long as the others."""
    made = work(outer_lr=1.0, outer_momentum=0.0, aggregation=aggregation)
    parts = [
        (p, Contribution(0, V, ID, ID, 1.0, 1, payload(torch.full((4,), v))))
        for p, v in zip("abc", (1.0, 1.0, 1000.0), strict=True)
    ]
    averaged = made.average(Average(0, V, tuple(parts), b"meta", None))
    assert isinstance(averaged, Averaged)
    made.accept([(0, averaged.digest)])
    assert made.store.theta(0).tolist() == pytest.approx([1.0 - mean] * 4, abs=1e-5)


def test_rates_rise_with_the_epoch_on_every_replica() -> None:
    """An aggregator and a peer that applies its commit compute the same bits, and no others at another epoch, also
    where a revision sets one of the rates."""
    settings_ = {"outer": "auto", "sync_every": 100, "nesterov": False, "step_limit": 0.0}
    for revision in (FOUNDED, Revision(1, outer_lr=0.25)):
        ours, theirs, elsewhere = work(**settings_), work(**settings_), work(**settings_)
        theta, moment, counted = 1.0, 0.0, (Counted("a", ID, 1.0, 1),)
        for epoch in (0, 1, 2, 54, 60):
            base = Version(0, epoch, epoch, f"d{epoch}")
            part = Contribution(0, base, ID, ID, 1.0, 1, payload(torch.ones(4)))
            averaged = ours.average(Average(0, base, (("a", part),), b"meta", None, 0, revision))
            assert isinstance(averaged, Averaged)
            after = Version(0, epoch + 1, epoch + 1, averaged.digest)
            commit = Commit(0, base, after, 0, "a", counted, Plan(("a",), ("a",)), averaged.payload, revision)
            assert theirs.apply(Apply(commit, b"meta")).digest == averaged.digest
            other = replace(commit, base=replace(base, epoch=epoch + 1))
            same = elsewhere.apply(Apply(other, b"meta")).digest == averaged.digest
            assert same == (epoch >= 54 or (not epoch and revision is not FOUNDED))  # else a rate rises in between
            for made in (ours, theirs):
                made.accept([(0, averaged.digest)])
            elsewhere.apply(Apply(commit, b"meta"))
            elsewhere.accept([(0, averaged.digest)])
            momentum = min(0.9, epoch / (epoch + 6))
            moment = moment * momentum + 1.0
            theta -= moment * (revision.outer_lr or 1 - 0.3 * momentum / 0.9)
            assert ours.store.theta(0).tolist() == pytest.approx([theta] * 4)


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


@pytest.mark.parametrize("codec", sorted(set(CODECS) - {"fp16"}))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -(2.0**31)])
def test_values_that_every_peer_would_refuse_are_not_sent(codec: str, value: float) -> None:
    """A pseudo-gradient that the others would refuse goes out as zeros; the largest that they take as it is."""
    made = work(codec)
    message = Contribution(0, V, ID, ID, 1.0, 1)
    bad = made.encode(0, torch.tensor([1.0, value, 1.0, 1.0]), ID)
    assert bad.nbytes == made.nbytes(message)
    assert decode(bad, codec, 4).tolist() == [0.0] * 4
    assert objection(made._run, message, bad) == ""
    most = torch.tensor([1.0, 2.0**30 - 64, -(2.0**30), 1.0])
    largest = made.encode(0, most, ID)
    assert 0.98 * 2.0**30 < decode(largest, codec, 4).abs().max() <= 2.0**30
    assert objection(made._run, message, largest) == ""


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(CODECS)), st.binary(min_size=16, max_size=16))
def test_garbage_is_objected_to_or_averaged(codec: str, raw: bytes) -> None:
    """What passes as a contribution makes the step that its values say."""
    made = work(codec, reply_codec="fp32", outer_lr=1.0, outer_momentum=0.0)
    message = Contribution(0, V, ID, ID, 1.0, 1)
    payload = memoryview(raw)[: made.nbytes(message)]
    if not objection(made._run, message, payload):
        averaged = made.average(Average(0, V, (("a", replace(message, payload=payload)),), b"meta", None))
        assert isinstance(averaged, Averaged)
        made.accept([(0, averaged.digest)])
        assert torch.equal(made.store.theta(0), 1 - decode(payload, codec, 4))


def test_fp16_clamps_larger_values() -> None:
    """Which the others take; a value that is not finite stays one."""
    made = work("fp16")
    sent = made.encode(0, torch.tensor([1.0, 1e9, -1e9, 0.5]), ID)
    assert decode(sent, "fp16", 4).tolist() == [1.0, 65504.0, -65504.0, 0.5]
    assert not made.encode(0, torch.tensor([1.0, float("inf"), 1.0, 1.0]), ID).tobytes().strip(b"\0")


LOSSY = ["int8", "int4", "e3m0", "topk"]
NUMBERS = torch.tensor([1.0, -0.3, 0.004, 0.1])


@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_lost_is_sent_with_the_next_once_it_is_counted(codec: str) -> None:
    """Until then the same is lost again: the progress is sent again as well."""
    made = work(codec)
    first = decode(made.encode(0, NUMBERS, ID), codec, 4)
    made.merge(0, Carry.KEEP, None)
    assert torch.equal(decode(made.encode(0, NUMBERS, ContributionId(1, 2)), codec, 4), first)
    made.merge(0, Carry.SUBTRACT, ContributionId(1, 2))
    second = made.encode(0, NUMBERS, ContributionId(1, 3))
    assert bytes(second) == bytes(encode(NUMBERS + (NUMBERS - first), codec))


@pytest.mark.parametrize("codec", LOSSY)
def test_a_residual_begins_anew_after_zeros_were_sent(codec: str) -> None:
    """It may be why they had to be."""
    made = work(codec)
    made.encode(0, NUMBERS, ID)
    made.merge(0, Carry.SUBTRACT, ID)
    made.encode(0, torch.full((4,), float("nan")), ContributionId(1, 2))
    made.merge(0, Carry.SUBTRACT, ContributionId(1, 2))
    assert bytes(made.encode(0, NUMBERS, ContributionId(1, 3))) == bytes(encode(NUMBERS, codec))


@pytest.mark.parametrize("codec", LOSSY)
def test_a_contribution_that_weighs_nothing_takes_no_residual_along(codec: str) -> None:
    """Counted with a weight of next to nothing it would be lost."""
    made = work(codec)
    first = decode(made.encode(0, NUMBERS, ID), codec, 4)
    made.merge(0, Carry.SUBTRACT, ID)
    idle = made.encode(0, torch.zeros(4), ContributionId(1, 2), weighs=False)
    assert decode(idle, codec, 4).tolist() == [0.0] * 4
    made.merge(0, Carry.SUBTRACT, ContributionId(1, 2))
    third = made.encode(0, NUMBERS, ContributionId(1, 3))
    assert bytes(third) == bytes(encode(NUMBERS + (NUMBERS - first), codec))


def test_rounding_at_random_is_each_contributions_own() -> None:
    """Of one contribution the same bytes, of another one others; on average what was to be sent."""
    config = RunConfig(rounding="stochastic")
    layout = Layout.build((ParamSpec("p", (4000,), "float32"),), 1, "contiguous", 2000)
    made, delta = TensorWork(Run("r", config, layout), torch.zeros(4000)), torch.full((4000,), 1.0 + 2.0**-9)
    once = bytes(made.encode(0, delta, ID))
    later, elsewhere = ContributionId(1, 2), ContributionId(2, 1)
    others = [made.encode(shard, delta, id) for shard, id in ((1, ID), (0, later), (0, elsewhere))]
    assert once == bytes(made.encode(0, delta, ID))
    assert len({once, *map(bytes, others)}) == 4
    assert decode(once, "bf16", 2000).mean().item() == pytest.approx(1.0 + 2.0**-9, abs=3e-4)
    assert objection(made._run, Contribution(0, V, ID, ID, 1.0, 1), memoryview(once)) == ""


@pytest.mark.parametrize(
    ("codec", "asked", "reply"),
    [
        ("fp32", None, "fp32"), ("bf16", None, "bf16"), ("fp16", None, "fp16"), ("topk", None, "bf16"),
        ("int8", None, "bf16"), ("int4", None, "bf16"), ("e3m0", None, "bf16"), ("e3m0", "int8", "int8"),
        ("fp32", "e3m0", "e3m0"),
    ],
)  # fmt: skip
def test_the_mean_travels_in_a_codec_of_its_own(codec: str, asked: str | None, reply: str) -> None:
    """As asked; by itself in no codec whose losses somebody would have to keep."""
    made = work(codec, reply_codec=asked, outer_lr=1.0, outer_momentum=0.0)
    part = Contribution(0, V, ID, ID, 1.0, 1, made.encode(0, NUMBERS, ID))
    averaged = made.average(Average(0, V, (("a", part),), b"meta", None))
    assert isinstance(averaged, Averaged)
    assert averaged.payload.nbytes == nbytes(reply, 4) == made.nbytes(Commit(0, V, V, 0, "a", (), Plan(("a",), ("a",))))
    made.accept([(0, averaged.digest)])
    assert torch.equal(made.store.theta(0), torch.ones(4) - decode(averaged.payload, reply, 4))


def test_a_states_values_need_only_be_finite() -> None:
    """An optimizer may have accumulated what no contribution may hold."""
    made, large = work(), payload(torch.full((8,), 1e30))
    state = State(0, V, 0, Plan(("a",), ("a",)), {}, {0: "d"})
    commit = Commit(0, V, V, 0, "a", (), state.plan)
    contribution = Contribution(0, V, ID, ID, 1.0, 1)
    assert objection(made._run, state, large) == objection(made._run, commit, large[:16]) == ""
    assert "too large" in objection(made._run, contribution, large[:16])
    for message in (state, commit, replace(contribution, weight=2.0)):
        assert "not finite" in objection(made._run, message, payload(torch.tensor([1.0, 1.0, 1.0, float("nan")])))


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


def test_a_commit_without_contributions_is_no_outer_step() -> None:
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
    state = State(0, V, 0, Plan(("a",), ("a",)), {}, {0: "d"})
    sound = replace(state, version=replace(V, digest=made.store.digest(0, meta_of(state))))
    assert not made.damaged(sound)
    flip(made.store.theta(0), 0, 3)
    assert made.damaged(sound)


def test_a_commit_of_empty_contributions_alone_moves_nothing() -> None:
    """Peers that have trained nothing ask for data; the outer momentum must not move θ for that. One contribution that
    is not empty makes a step again."""
    made = work(outer_lr=1.0, outer_momentum=0.9)
    before = average(made, 1.0).clone()
    uses = (Use(DataSet("train", 100), (), 5),)
    empty = Contribution(0, V, ID, ID, WEIGHT_MIN, 0, payload(torch.zeros(4)), uses=uses)
    averaged = made.average(Average(0, V, (("a", empty), ("b", empty)), b"empty", None))
    assert isinstance(averaged, Averaged)
    listed = tuple(Counted(peer, ID, WEIGHT_MIN, 0, uses) for peer in "ab")
    commit = Commit(0, V, V, 0, "a", listed, Plan((), ("a",)), averaged.payload)
    assert made.apply(Apply(commit, b"empty")).digest == averaged.digest
    made.accept([(0, averaged.digest)])
    assert torch.equal(made.store.theta(0), before)
    part = replace(empty, weight=1.0)
    averaged = made.average(Average(0, V, (("a", empty), ("b", part)), b"meta", None))
    assert isinstance(averaged, Averaged)
    made.accept([(0, averaged.digest)])
    assert not torch.equal(made.store.theta(0), before)


def buffers_of(values: Tensor) -> TensorWork:
    """The work of a model of one parameter and two buffers, at these values."""
    layout = Layout.build((ParamSpec("p", (4,), "float32"),), buffers=(ParamSpec("var", (2,), "float32"),))
    return TensorWork(Run("r", RunConfig(codec="bf16"), layout), torch.cat([torch.ones(4), values]))


def test_buffers_stay_where_nothing_can_be_averaged(caplog: pytest.LogCaptureFixture) -> None:
    """A mean of 0 would be no step of parameters, but the end of a variance. So in what is sent of a spoilt memory."""
    made = buffers_of(torch.tensor([3.0, 4.0]))
    part = Contribution(1, V, ID, ID, 1.0, 1, payload(torch.tensor([1.0, float("nan")])))
    averaged = made.average(Average(1, V, (("a", part),), b"meta", None))
    assert isinstance(averaged, Averaged)
    made.accept([(1, averaged.digest)])
    assert made.store.theta(1).tolist() == [3.0, 4.0]
    assert "can't be averaged" in caplog.text
    spoilt = torch.cat([torch.ones(4), torch.tensor([float("inf"), 1.0])])
    assert decode(made.encode(1, spoilt, ID), "fp32", 2).tolist() == [3.0, 4.0]
    assert "without progress" in caplog.text


@pytest.mark.parametrize(("mode", "peers", "then"), [("sync", 4, 7.0), ("async", 4, 4.0), ("async", 1, 7.0)])
def test_buffers_step_alike_on_all_replicas(mode: str, peers: int, then: float) -> None:
    """From 3 towards 7: in the asynchronous mode by the share of one of the peers that the plan names."""
    config = RunConfig(mode=mode)
    group = tuple("abcd"[:peers])
    ours, theirs = buffers_of(torch.full((2,), 3.0)), buffers_of(torch.full((2,), 3.0))
    for work_ in (ours, theirs):
        work_._run = Run("r", config, work_._run.layout)
    part = Contribution(1, V, ID, ID, 1.0, 1, payload(torch.full((2,), 7.0)))
    averaged = ours.average(Average(1, V, (("a", part),), b"meta", None, peers=peers))
    assert isinstance(averaged, Averaged)
    counted = (Counted("a", ID, 1.0, 1),)
    commit = Commit(1, V, Version(0, 1, 1, averaged.digest), 0, "a", counted, Plan(group, ("a",)), averaged.payload)
    assert theirs.apply(Apply(commit, b"meta")).digest == averaged.digest
    theirs.accept([(1, averaged.digest)])
    assert theirs.store.theta(1).tolist() == [then, then]
    assert theirs.store.theta(0).tolist() == [1.0] * 4
