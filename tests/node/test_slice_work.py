"""The effects of fragments on tensors: steps in place, each slice whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Accept, Apply, Average, Damaged, Digested, Fill, Keep, Roll
from p2p_diloco.core.leases import WEIGHT_MIN, DataSet, Use
from p2p_diloco.core.messages import Choice, Close, Commit, Mean, Ready, Slice
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.node import slice_work
from p2p_diloco.node.run import Run
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.node.slice_work import LOOK_AGAIN_S, SliceWork
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import PARAMETER, Layout, ParamSpec
from p2p_diloco.tensors.mean import weighted_mean
from p2p_diloco.tensors.outer_state import OuterState

ID = ContributionId(1, 1)
LAYOUT = Layout.build((ParamSpec("p", (12,), "float32"),), 1, "contiguous", 4, (ParamSpec("b", (2,), "float32"),))
SLICES = len(LAYOUT.slices)


def at(epoch: int) -> Version:
    return Version(0, epoch, epoch, f"{epoch:032x}")


def seal(fragment: int, base: Version, key: str, number: int, hash: str) -> bytes:
    return f"{fragment}/{base.epoch}/{key}/{number}/{hash}".encode()


def work(theta: Tensor | None = None, base: Tensor | None = None, **config: Any) -> SliceWork:
    run = Run("r", RunConfig(**{"codec": "fp32", **config}), LAYOUT)
    made = SliceWork(run, torch.linspace(0, 1, LAYOUT.numel) if theta is None else theta, seal, base)
    made.hold(0, at(0))
    return made


def digests(made: SliceWork) -> list[str]:
    return [held.digest() for held in made.state.slices]


def payload(values: Tensor) -> memoryview:
    return memoryview(values.numpy().tobytes())


def choice(weights: dict[str, float], revision: Revision = FOUNDED) -> Choice:
    entries = [(p, Ready(0, at(0), ID, ID, w, 1, (), uses=_uses(w))) for p, w in sorted(weights.items())]
    return Choice("a", 0, tuple(entries), revision=revision)


def _uses(weight: float) -> tuple[Use, ...]:
    return (Use(DataSet("train", 100), (), 5),) if weight == WEIGHT_MIN else ()


def commit(chosen: Choice, epoch: int = 0) -> Commit:
    return Commit(0, at(epoch), at(epoch + 1), 0, "a", "k", chosen, ("",) * SLICES, ("a",) * SLICES)


@pytest.mark.parametrize(("codec", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_contribution_stays_when_the_next_one_is_written(codec: str, dtype: torch.dtype) -> None:
    """Slices are sent, averaged and shown to auditors while the trainer writes its next pseudo-gradient."""
    delta = torch.linspace(1, 2, LAYOUT.numel).to(dtype)
    sent = work(codec=codec).encode(0, delta, ID)
    before = bytes(sent)
    delta.zero_()
    assert bytes(sent) == before != bytes(len(before))


def means(made: SliceWork, given: dict[str, tuple[float, Tensor]], epoch: int = 0) -> tuple[Mean, ...]:
    """The means of all slices as their owners make them. `given`: by peer, weight and values [numel]."""
    found = []
    for number, place in enumerate(LAYOUT.slices):
        parts = tuple(
            (weight, Slice(0, at(epoch), peer, ID, number, "", payload(values[place.start : place.stop])))
            for peer, (weight, values) in given.items()
        )
        done = made.average(Average(0, at(epoch), "k", number, parts))
        assert (done.number, done.hash) == (number, hash_of(done.payload))
        assert done.seal == seal(0, at(epoch), "k", number, done.hash)
        found.append(Mean(0, done.base, done.key, done.number, done.hash, "a", done.payload, done.seal))
    return tuple(found)


def stepped(made: SliceWork, value: float, epoch: int = 0, weight: float = 1.0) -> Apply:
    """Make the step of one contribution of this value throughout."""
    of = means(made, {"a": (weight, torch.full((LAYOUT.numel,), value))}, epoch)
    effect = Apply(commit(choice({"a": weight}), epoch), of)
    done = made.apply(effect)
    assert (done.base, done.version) == (at(epoch), at(epoch + 1))
    made.accept(Accept(((0, at(epoch + 1)),)))
    return effect


@pytest.mark.parametrize("revision", [FOUNDED, Revision(1, outer_lr=0.25)])
@pytest.mark.parametrize(
    "config",
    [{}, {"codec": "int8"}, {"aggregation": "centered_clip"}, {"outer": "auto", "sync_every": 100},
     {"outer_optimizer": "adam", "outer_lr": 0.1, "nesterov": False}],
)  # fmt: skip
def test_rounds_make_the_steps_of_the_outer_state(config: dict[str, Any], revision: Revision) -> None:
    """Means, steps, limits, rates that rise with the epoch, buffers: over six rounds of three peers."""
    ours = work(**config)
    run = ours._run
    theirs = OuterState(LAYOUT, run.outer, torch.linspace(0, 1, LAYOUT.numel), run.config.step_limit)
    delta = torch.linspace(-1, 1, LAYOUT.numel)
    values = {peer: delta * scale for peer, scale in zip("abc", (1.0, 3.0, 100.0), strict=True)}
    weights = {"a": 1.0, "b": 2.0, "c": 1.5}
    for epoch in range(6):
        chosen, made = choice(weights, revision), []
        for number, place in enumerate(LAYOUT.slices):
            codec, reply = run.codecs(number)
            parts = [(p, memoryview(bytearray(ours.encode(number, v, replace(ID, sequence=epoch)))))
                     for p, v in values.items()]  # fmt: skip
            done = ours.average(Average(0, at(epoch), "k", number, tuple(
                (weights[p], Slice(0, at(epoch), p, ID, number, "", part)) for p, part in parts)))  # fmt: skip
            given = [(p, weights[p], part) for p, part in parts]
            if place.kind == PARAMETER:
                dtype = codecs.written_in(reply, "nearest")
                mean = weighted_mean(given, codec, place.numel, dtype, run.config.aggregation)
                rates = run.rates_at(revision, epoch)
                theirs.step(number, theirs.slices[number], codecs.encode(mean, reply), reply, 3, 0, rates)
            else:
                mean = buffers.together(place.kind, given, place.numel, run.config.aggregation)
                theirs.step_buffers(number, theirs.slices[number], codecs.encode(mean, reply), 1.0)
            assert bytes(done.payload) == bytes(codecs.encode(mean, reply))
            made.append(Mean(0, at(epoch), "k", number, done.hash, "a", done.payload))
        ours.apply(Apply(commit(chosen, epoch), tuple(made)))
        for number in range(SLICES):
            assert ours.state.slices[number].digest() == theirs.slices[number].digest()


def test_a_commit_counts_as_many_submissions_in_the_buffer_as_it_has() -> None:
    """Delayed Nesterov: several submissions in a buffer that holds some."""
    ours = work(mode="async", dn_buffer_size=4, outer_optimizer="sgd")
    theirs = OuterState(LAYOUT, ours._run.outer, torch.linspace(0, 1, LAYOUT.numel), ours._run.config.step_limit)
    for epoch, buffered in enumerate((0, 2, 0)):
        of = means(ours, {p: (1.0, torch.linspace(-1, 1, LAYOUT.numel)) for p in "ab"}, epoch)
        ours.apply(Apply(commit(choice({"a": 1.0, "b": 1.0}), epoch), of, buffered))
        rates = ours._run.rates_at(FOUNDED, epoch)
        for number in range(3):
            theirs.step(number, theirs.slices[number], of[number].payload, "fp32", 2, buffered, rates)
            assert ours.state.slices[number].digest() == theirs.slices[number].digest()


def test_buffers_move_by_the_part_of_the_peers_that_a_submission_is_of() -> None:
    """Asynchronous mode: one of three peers moves them by a third. A staged slice follows alike."""
    ours, behind = (work(mode="async", outer_optimizer="sgd") for _ in range(2))
    before = ours.state.slices[3].theta.clone()
    of = means(ours, {"a": (1.0, torch.full((LAYOUT.numel,), 7.0))})
    behind.fill(Fill(0, at(0), 3, ours.part(0, 3).payload))
    ours.apply(Apply(commit(choice({"a": 1.0})), of, peers=3))
    behind.roll(Roll(commit(choice({"a": 1.0})), of[3], peers=3))
    assert ours.state.slices[3].digest() == behind._staged[0, 3].digest()
    assert torch.allclose(ours.state.slices[3].theta, before + (7.0 - before) / 3)


def test_a_step_is_made_in_place_slice_by_slice() -> None:
    """θ is the memory that was given. Before a slice changes, the base of the trainer's progress in it is kept, unless
    its memory has changed: then the base is lost."""
    theta, base = torch.zeros(LAYOUT.numel), torch.full((LAYOUT.numel,), 7.0)
    made = work(theta, base, outer_lr=1.0, outer_momentum=0.0)
    made.bases.loaded(range(SLICES))
    made.apply(Apply(commit(choice({"a": 1.0})), means(made, {"a": (1.0, torch.full((LAYOUT.numel,), -2.0))})), (1,))
    assert theta[:12].tolist() == [2.0] * 12
    assert made.bases.kept == set(range(SLICES)) - {1}
    assert made.bases.lost == {1}
    assert base[:12].tolist() == [0.0] * 4 + [7.0] * 4 + [0.0] * 4
    assert made.versions == {0: at(1)}


def test_a_slice_without_a_finite_result_stays_and_the_version_is_made(caplog: pytest.LogCaptureFixture) -> None:
    """All replicas decide it alike, by the slice alone; a replica that rolls a fetched slice, too."""
    made, newcomer = work(outer_lr=1e37, outer_momentum=0.0), work(outer_lr=1e37, outer_momentum=0.0)
    values = torch.zeros(LAYOUT.numel)
    values[5] = 2.0**29
    of = means(made, {"a": (1.0, values)})
    newcomer.fill(Fill(0, at(0), 1, made.part(0, 1).payload))
    before = [held.theta.tolist() for held in made.state.slices]
    effect = Apply(commit(choice({"a": 1.0})), of)
    made.apply(effect)
    assert made.versions[0] == at(1)
    assert [held.theta.tolist() for held in made.state.slices[:2]] == before[:2]
    assert "slice 1 makes no outer step to epoch 1" in caplog.text
    assert made.state.slices[3].theta.tolist() == [0.0, 0.0]  # the buffers took theirs
    assert newcomer.roll(Roll(effect.commit, of[1])).version == at(1)
    assert newcomer._staged[0, 1].digest() == made.state.slices[1].digest()


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": WEIGHT_MIN, "b": WEIGHT_MIN}])
def test_a_commit_of_empty_contributions_moves_nothing(weights: dict[str, float]) -> None:
    """The outer momentum must not move θ for them. One that is not empty makes a step again."""
    kept: list[int] = []
    made = work(None, kept.append)
    stepped(made, 1.0)
    before = digests(made)
    kept.clear()
    zeros = {p: (w, torch.zeros(LAYOUT.numel)) for p, w in weights.items() if w}
    made.apply(Apply(commit(choice(weights), 1), means(made, zeros, 1) if zeros else ()))
    assert (made.versions[0], kept) == (at(2), [])
    assert digests(made) == before
    stepped(made, 1.0, 2)
    assert digests(made) != before


# -- fetched slices


def test_fetched_slices_are_rolled_and_adopted_together() -> None:
    # A replica that is behind fetches, rolls and adopts. Slices come at unlike versions, are rolled to one, and
    # replace the present ones all at once.
    donor, behind = work(), work(None, torch.zeros(LAYOUT.numel))
    behind.bases.loaded(range(SLICES))
    first = stepped(donor, 1.0)
    early = [donor.part(0, number) for number in (0, 3)]
    second = stepped(donor, -3.0, 1)
    late = [donor.part(0, number) for number in (1, 2)]
    assert {part.version for part in early} == {at(1)}
    before = digests(behind)
    for part in (*early, *late):
        done = behind.fill(Fill(0, part.version, part.number, part.payload))
        assert (done.version, done.number) == (part.version, part.number)
        assert done.digest == behind._staged[0, part.number].digest()
    for part in early:
        assert behind.roll(Roll(second.commit, second.means[part.number])).number == part.number
    assert digests(behind) == before
    assert not behind.bases.kept
    behind.accept(Accept(((0, at(2)),), staged=True))
    assert digests(behind) == digests(donor)
    assert (behind.versions[0], behind.bases.kept, behind._staged) == (at(2), set(range(SLICES)), {})
    assert first.commit.version == at(1)

    # A newcomer needs no second memory. It holds no state that could be needed: slices are staged in place.
    donor = work()
    effect = stepped(donor, 1.0)
    newcomer = work(torch.zeros(LAYOUT.numel))
    newcomer.versions.clear()
    old = work()
    for number in range(SLICES):
        newcomer.fill(Fill(0, at(0), number, old.part(0, number).payload))
        newcomer.roll(Roll(effect.commit, effect.means[number]))
        assert newcomer._staged[0, number] is newcomer.state.slices[number]
    newcomer.accept(Accept(((0, at(1)),), staged=True))
    assert digests(newcomer) == digests(donor)

    # A repair replaces only damaged slices and keeps no base. The round goes on meanwhile: the staged slice is
    # rolled with the commit that was applied here.
    donor, kept = work(), list[int]()
    damaged = work(None, kept.append)
    damaged.state.slices[1].theta[0] += 1.0
    part = donor.part(0, 1)
    damaged.fill(Fill(0, at(0), 1, part.payload))
    effect = stepped(donor, 1.0)
    damaged.apply(effect)
    damaged.accept(Accept(((0, at(1)),)))
    damaged.roll(Roll(effect.commit, effect.means[1]))
    kept.clear()
    damaged.accept(Accept(((0, at(1)),), (1,), staged=True))
    assert digests(damaged) == digests(donor)
    assert not kept


# -- digests


def test_memory_is_compared_with_its_digest(caplog: pytest.LogCaptureFixture) -> None:
    """All slices before a step, one before it is sent; nothing is said while the digests of a version are missing.
    Damage that no peer can repair is kept: from then on the memory has its digest again, and the replica is told it.
    The trainer's progress in the slice is lost: what it was made from is not there any more."""
    made = work()
    made.bases.loaded(range(SLICES))
    assert made.damaged(0) is None
    assert made.digest(0) == Digested(0, at(0), tuple(digests(made)))
    assert made.damaged(0) is None
    made.state.slices[2].state["m"].view(torch.int32)[1] ^= 1
    assert made.damaged(0) == made.damaged(0, (2,)) == Damaged(0, (2,))
    assert made.damaged(0, (0, 1, 3)) is None
    made.keep(Keep(0, (2,)))
    assert "slices [2] were corrupted in memory, and no peer can repair them" in caplog.text
    assert made.bases.lost == {2}
    assert made.damaged(0) is None
    assert made.digest(0) == Digested(0, at(0), tuple(digests(made)))
    stepped(made, 1.0)
    assert made.damaged(0) is None
    assert isinstance(made.digest(0), Digested)
    assert made.damaged(0) is None


def test_memory_is_not_compared_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In short rounds this would take as long as a step."""
    made, now = work(), 100.0
    monkeypatch.setattr(slice_work.time, "monotonic", lambda: now)
    assert made.unseen(0) == list(range(SLICES))
    made.digest(0)
    assert made.unseen(0) == []
    now += LOOK_AGAIN_S
    assert made.unseen(0) == list(range(SLICES))
    made.state.slices[2].theta[0] += 1.0
    assert made.damaged(0) == Damaged(0, (2,))
    assert made.unseen(0) == [2]


@pytest.mark.parametrize("what", ["step", "keep"])
def test_digests_of_tensors_that_change_meanwhile_are_dropped(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    made = work()
    held = type(made.state.slices[0])
    plain = held.digest

    def slow(one: Any) -> str:
        monkeypatch.setattr(held, "digest", plain)
        stepped(made, 1.0) if what == "step" else made.keep(Keep(0, (0,)))
        return plain(one)

    monkeypatch.setattr(held, "digest", slow)
    assert made.digest(0) is None
    assert isinstance(made.digest(0), Digested)


# -- payloads


def test_payloads_have_known_lengths() -> None:
    """Before the first commit a slice travels without the outer optimizer's state; a new generation's first state is a
    checkpoint's, and has it."""
    made = work(codec="bf16", reply_codec="fp32")
    slices = [made.nbytes(Slice(0, at(0), "a", ID, number, "")) for number in range(SLICES)]
    assert slices == [8, 8, 8, 8]  # the last: two buffers in fp32
    assert [made.nbytes(Mean(0, at(0), "k", number, "", "a")) for number in range(SLICES)] == [16, 16, 16, 8]
    assert made.nbytes(Close(0, at(0), 0, "a", 0, "k", None, ())) == 0
    theta = [4 * held.theta.numel() for held in made.state.slices]
    whole = [made.state.nbytes(index) for index in range(SLICES)]
    assert sum(theta) < sum(whole)
    for generation, epoch, travels in ((0, 0, theta), (1, 0, whole), (0, 1, whole)):
        made.hold(0, Version(generation, epoch, epoch, "chain"))
        parts = [made.part(0, number) for number in range(SLICES)]
        assert [part.payload.nbytes for part in parts] == travels == [made.nbytes(part) for part in parts]


def test_contributions_that_cannot_be_averaged_make_a_neutral_mean(caplog: pytest.LogCaptureFixture) -> None:
    """What is received is checked; if a check has a gap, the owner goes on."""
    made = work()
    for number, neutral in ((0, [0.0] * 4), (3, made.state.slices[3].theta.tolist())):
        part = Slice(0, at(0), "a", ID, number, "", memoryview(b"short"))
        done = made.average(Average(0, at(0), "k", number, ((1.0, part),)))
        assert torch.frombuffer(bytearray(done.payload), dtype=torch.float32).tolist() == neutral
    assert "can't be averaged" in caplog.text
