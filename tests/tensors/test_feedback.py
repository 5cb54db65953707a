"""Error feedback for codecs of few bits: no progress is lost or sent twice, for every fate of the contributions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from p2p_diloco.core.carry import LEFT, PART, Carried, Outcome
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.feedback import Feedback
from p2p_diloco.tensors.layout import Layout, specs_of

LOSSY = [name for name in codecs.CODECS if codecs.feeds_back(name)]
NUMEL, CARRY_ROUNDS = 200, 2
COUNTED, KEPT = Outcome(counted=True), Outcome()


def sent(feedback: Feedback, delta: Tensor, codec: str, id: ContributionId) -> Tensor:
    """Send a pseudo-gradient; what is decoded of it."""
    raw = bytes(codecs.encode(feedback.added(delta), codec))
    feedback.sent(id, codecs.decode_blocks(raw, codec, len(delta)))
    return codecs.decode(raw, codec, len(delta))


def id(sequence: int) -> ContributionId:
    return ContributionId(5, sequence)


class Sender:
    """One slice of one peer, with what the core, the trainer and the node each keep of it, and a log that counts its
    contributions or doesn't. All progress so far is `trained`; what is known to be given up is `dropped`.
    """

    def __init__(self, codec: str, seed: int) -> None:
        self.codec, self.source = codec, torch.Generator().manual_seed(seed)
        self.model = nn.Linear(NUMEL, 1, bias=False)
        layout = Layout.build(specs_of(self.model), 1)
        self.theta, self.base, self.delta = torch.zeros(NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)
        self.local = LocalModel(self.model, layout, self.theta, self.base, self.delta)
        self.local.write_theta()
        self.progress, self.feedback = Carried(base=self.version(0)), Feedback(NUMEL)
        self.epoch = self.sequence = 0
        self.sent: dict[int, Tensor] = {}  # what was decoded, by sequence
        self.held: dict[int, Tensor] = {}  # the pseudo-gradients of it, by sequence
        self.log: list[int] = []  # those that are counted
        self.trained, self.dropped = torch.zeros(NUMEL), torch.zeros(NUMEL)

    def version(self, epoch: int) -> Version:
        return Version(0, epoch, epoch, "")

    @property
    def uncounted(self) -> Tensor:
        """The pseudo-gradient as it would be now: θ was loaded at each merge."""
        return self.theta - self.model.weight.detach().view(-1)

    @property
    def balance(self) -> Tensor:
        """Zero, as the law has it."""
        counted = sum((self.sent[n] for n in self.log), torch.zeros(NUMEL))
        return counted + self.feedback.residual + self.uncounted - (self.trained - self.dropped)

    def train(self) -> None:
        step = torch.randn(NUMEL, generator=self.source) ** 3
        self.trained += step
        with torch.no_grad():
            self.model.weight.sub_(step.view(1, -1))

    def send(self) -> None:
        self.sequence += 1
        self.local.write_delta([0])
        self.progress.send(id(self.sequence))
        self.progress.sends += 1
        self.held[self.sequence] = self.delta.clone()
        self.sent[self.sequence] = sent(self.feedback, self.delta, self.codec, id(self.sequence))

    @property
    def riding(self) -> range:
        """The contributions whose progress rides in the last one."""
        oldest, last = self.progress.oldest, self.progress.last
        return range(oldest.sequence, last.sequence) if oldest is not None and last is not None else range(0)

    def merge(self, log: list[int], *, kin: bool = True) -> None:
        """A newer state has come, which counts these, and descends from the base if it is `kin`."""
        self.epoch, self.log, last, included = self.epoch + 1, log, self.progress.last, self.progress.included
        counted, uncounted, part = id(log[-1]) if log else None, self.uncounted, bool(log) and log[-1] in self.riding
        outcome = self.progress.merge(self.version(self.epoch), counted, kin=kin, most=CARRY_ROUNDS)
        self.feedback.merge(outcome, counted)
        self.base.copy_(self.theta)
        self.theta.copy_(torch.randn(NUMEL, generator=self.source))
        blend = Blend.NONE if outcome.dropped else Blend.SINCE if outcome.counted else Blend.ALL
        self.local.merge({0: blend}, kept=[0])
        if part:
            self.dropped -= self.balance  # older progress is counted, and what came after can't be told from it
        elif blend is Blend.NONE:
            held = torch.zeros(NUMEL) if last is None else self.held[last.sequence]
            self.dropped += uncounted + (included - outcome.counted) * held


happenings = st.sampled_from(
    ["train", "train", "send", "send", "counted", "counted", "missed", "missed", "forked", "both", "forgotten", "older"]
)


@settings(deadline=None, max_examples=120)
@given(st.sampled_from(LOSSY), st.integers(0, 10**6), st.lists(happenings, min_size=5, max_size=40))
@example("int8", 0, ["train", "send", "counted", "forked", "forked"])  # two lineages lose one after the other
def test_no_progress_is_lost_and_none_is_counted_twice(codec: str, seed: int, happenings: list[str]) -> None:
    """Decoded contributions of the lineage, residual and uncounted progress add up to all progress, whether a
    contribution is counted, missed, carried, dropped for its age, counted in a lineage that lost, or in both."""
    sender = Sender(codec, seed)
    for happening in happenings:
        included, newest = sender.progress.included, sender.progress.last
        log = sender.log[:-1] if included else sender.log
        match happening:
            case "train":
                sender.train()
            case "send":
                sender.send()
            case "counted" if newest is not None:
                sender.merge([*log, newest.sequence])
            case "missed":
                sender.merge(sender.log)
            case "forked":
                sender.merge(log, kin=False)
            case "both" if newest is not None:
                sender.merge([*log, newest.sequence], kin=False)
            case "forgotten" if included:
                sender.merge(log)
            case "older" if sender.riding:
                sender.merge([*log, sender.riding[0]])
        scale = 1 + sender.trained.abs().max().item()
        assert sender.balance.abs().max().item() < 1e-5 * scale * len(happenings)


@pytest.mark.parametrize("counted", [id(2), id(3)])
def test_what_was_sent_without_the_residual_took_none_along(counted: ContributionId) -> None:
    """Whichever of the two is counted: the one before it, with the residual, leaves what it lost; it itself nothing,
    also if its lineage loses."""
    feedback = Feedback(NUMEL)
    sent(feedback, torch.randn(NUMEL), "e3m0", id(1))
    feedback.merge(COUNTED, id(1))
    before, delta = feedback.residual.clone(), torch.randn(NUMEL)
    decoded = sent(feedback, delta, "e3m0", id(2))
    feedback.sent_apart(id(3))
    if counted == id(2):
        feedback.merge(Outcome(dropped=PART), counted)
        assert torch.equal(feedback.residual, before + delta - decoded)
        return
    feedback.merge(COUNTED, counted)
    assert torch.equal(feedback.residual, before)
    feedback.merge(Outcome(dropped=LEFT), id(1))
    assert torch.equal(feedback.residual, before)


def test_contributions_with_and_without_the_residual_are_distinguished() -> None:
    """An older contribution is counted that took none along: the residual stays to be sent."""
    feedback = Feedback(NUMEL)
    sent(feedback, torch.randn(NUMEL), "e3m0", id(1))
    feedback.merge(COUNTED, id(1))
    before = feedback.residual.clone()
    feedback.sent_apart(id(2))
    sent(feedback, torch.randn(NUMEL), "e3m0", id(3))
    feedback.merge(Outcome(dropped=PART), id(2))
    assert torch.equal(feedback.residual, before)


def test_a_residual_that_could_not_be_sent_is_gone_whatever_is_counted() -> None:
    feedback = Feedback(NUMEL)
    sent(feedback, torch.randn(NUMEL), "e3m0", id(4))
    feedback.added(torch.full((NUMEL,), torch.inf))
    feedback.sent_nothing(id(5))
    for outcome, counted in (
        (COUNTED, id(5)),
        (Outcome(dropped=LEFT), id(1)),
        (Outcome(dropped=PART), id(4)),
        (KEPT, id(3)),
    ):
        feedback.merge(outcome, counted)
        assert not feedback.residual.any()
