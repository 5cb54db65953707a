"""Carries out the core's effects on tensors: means, outer steps, and the loading of fetched states.

Law: proposals change nothing; only `accept` changes the outer state. If a result can't be computed from received data,
its digest is NO_DIGEST, and the core treats it as any wrong digest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from p2p_diloco.core.events import Applied, Apply, Average, Averaged, Damaged, Fill, Filled
from p2p_diloco.core.lending import is_empty
from p2p_diloco.core.lending import submissions as submissions_of
from p2p_diloco.core.messages import Commit, Contribution, Message, State
from p2p_diloco.core.replica import meta_of
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.node.bases import Bases
from p2p_diloco.node.encoding import Encoding
from p2p_diloco.node.run import Run
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors import running
from p2p_diloco.tensors.layout import PARAMETER
from p2p_diloco.tensors.mean import Given, weighted_mean
from p2p_diloco.tensors.store import Proposal, ShardStore
from p2p_diloco.tensors.threads import ALONE, Threads

NO_DIGEST = ""

log = logging.getLogger(__name__)


class TensorWork:
    """The outer state of one replica, and the proposals for its next state."""

    def __init__(self, run: Run, theta: Tensor, base: Tensor | None = None, threads: Threads = ALONE) -> None:
        """`theta` [numel] fp32 is used in place, as θ. `base` [numel] fp32 is memory for the bases of a trainer; None
        if there is no trainer. `threads` compute means and outer steps."""
        self._run = run
        self.threads = threads
        self.bases = Bases(run.layout, theta, theta if base is None else base)
        self.store = ShardStore(run.layout, run.outer, theta, run.config.step_limit, threads)
        self._proposals: dict[tuple[int, str], Proposal] = {}
        encoding = Encoding(run, self._neutral)
        self.encode, self.merge = encoding.encode, encoding.merge

    # -- what the core asks for

    def average(self, effect: Average) -> Averaged | Damaged:
        """Compute the weighted mean of the contributions, encode it for the wire, and compute the outer step from
        exactly these bytes."""
        if effect.held is not None and self.store.digest(effect.shard, effect.held) != effect.base.digest:
            return Damaged(effect.shard, effect.base)
        try:
            return self._averaged(effect, effect.contributions)
        except ValueError as error:
            log.error("the contributions to shard %d can't be averaged, and are ignored: %s", effect.shard, error)
        try:
            return self._averaged(effect, ())
        except ValueError as error:
            mend = "start the run again from a checkpoint, with a lower outer_lr"
            raise P2PDilocoError(f"the run has diverged: {error}", mend=mend) from None

    def _averaged(self, effect: Average, contributions: Sequence[tuple[str, Contribution]]) -> Averaged:
        shard = effect.shard
        payload = self._mean(shard, [(peer, c.weight, c.payload) for peer, c in contributions])
        # how many the commit lists that are not empty, even if the mean ignores them
        submissions = sum(not is_empty(c) for _, c in effect.contributions)
        digest = self._proposed(shard, payload, submissions, effect)
        return Averaged(shard, effect.base, effect.number, digest, payload)

    def mean_of(self, shard: int, contributions: Sequence[Given]) -> memoryview:
        """Compute the encoded mean that an aggregator makes of these contributions. It is neutral if they can't be
        averaged."""
        try:
            return self._mean(shard, contributions)
        except ValueError:
            return self._mean(shard, ())

    def _mean(self, shard: int, contributions: Sequence[Given]) -> memoryview:
        """Raises ValueError if the contributions can't be averaged."""
        place, aggregation = self._run.layout.shards[shard], self._run.config.aggregation
        numel, (codec, reply) = place.numel, self._run.codecs(shard)
        if not contributions:
            mean = self._neutral(shard)
        elif place.kind == PARAMETER:
            dtype = codecs.written_in(reply, "nearest")
            mean = weighted_mean(contributions, codec, numel, dtype, aggregation, self.threads)
        else:
            mean = running.together(place.kind, contributions, numel, aggregation)
        return codecs.encode(mean, reply)

    def _neutral(self, shard: int) -> Tensor:
        """A contribution or a mean without progress: zeros, or the present values of buffers."""
        is_parameter = self._run.layout.shards[shard].kind == PARAMETER
        return torch.zeros(self._numel(shard), device="cpu") if is_parameter else self.store.theta(shard).clone()

    def _proposed(self, shard: int, payload: memoryview, submissions: int, of: Average | Apply) -> str:
        """Compute the state that follows a commit, and keep it as a proposal; returns its digest. A commit without
        contributions, or with empty ones alone, makes no outer step: only the version changes, not the tensors.

        Raises:
            ValueError: the state would have values that are not finite.
        """
        by, run = of if isinstance(of, Average) else of.commit, self._run
        if not submissions:
            proposal = self.store.restate(shard, of.meta)
        elif run.layout.shards[shard].kind == PARAMETER:
            (_, codec), rates = run.codecs(shard), run.rates_at(by.revision, by.base.epoch)
            proposal = self.store.propose(shard, payload, codec, of.meta, submissions, of.buffered, rates)
        else:
            peers = by.peers if isinstance(by, Average) else len(by.plan.group)
            share = min(1.0, submissions / max(1, peers)) if run.rules.asynchronous else 1.0
            proposal = self.store.propose_buffers(shard, payload, of.meta, share)
        self._proposals[shard, proposal.digest] = proposal
        return proposal.digest

    def damaged(self, state: State) -> bool:
        """Whether a shard's tensors don't have the digest that the shard's version names."""
        return self.store.digest(state.shard, meta_of(state)) != state.version.digest

    def apply(self, effect: Apply) -> Applied:
        """Compute the outer step of another peer's commit. The result is only a proposal until `accept` is called."""
        commit = effect.commit
        shard, submissions, digest = commit.shard, submissions_of(commit), NO_DIGEST
        try:
            digest = self._proposed(shard, commit.payload, submissions, effect)
        except ValueError as error:
            log.warning("a commit on shard %d can't be applied: %s", shard, error)
        return Applied(shard, commit.base, digest)

    def fill(self, effect: Fill) -> Filled:
        """Make a proposal from a state that was fetched."""
        state = effect.state
        try:
            proposal = self.store.load(state.shard, state.payload, effect.meta)
        except ValueError as error:
            log.warning("a fetched state of shard %d can't be used: %s", state.shard, error)
            return Filled(state.shard, state.version, NO_DIGEST)
        self._proposals[state.shard, proposal.digest] = proposal
        return Filled(state.shard, state.version, proposal.digest)

    def accept(self, proposals: Iterable[tuple[int, str]]) -> None:
        """Replace the present state of shards by proposals, each given as (shard, digest). Discard the other proposals
        for these shards."""
        for shard, digest in proposals:
            proposal = self._proposals[shard, digest]
            was, present = self.store.accepted_theta(shard), partial(self.store.present_theta, shard)
            self.bases.before(shard, was, proposal.theta_digest, present)
            self.store.accept(shard, proposal)
            for key in [key for key in self._proposals if key[0] == shard]:
                del self._proposals[key]

    # -- payloads

    def nbytes(self, message: Message) -> int:
        """The length in bytes that the payload of this message must have; 0 if the message has none."""
        match message:
            case Contribution(shard=shard):
                return self.nbytes_of_contribution(shard)
            case Commit(shard=shard):
                return codecs.nbytes(self._run.codecs(shard)[1], self._numel(shard))
            case State(shard=shard):
                return self.store.state_nbytes(shard)
            case _:
                return 0

    def nbytes_of_contribution(self, shard: int) -> int:
        """The length in bytes of an encoded contribution to this shard."""
        return codecs.nbytes(self._run.codecs(shard)[0], self._numel(shard))

    def export(self, shard: int) -> memoryview:
        """Encode a shard's present state as a payload."""
        return memoryview(b"".join(self.store.export(shard)))

    def _numel(self, shard: int) -> int:
        return self._run.layout.shards[shard].numel
