"""The outer state of every shard that a replica holds.

Law: only `accept` changes state. `propose` and `load` return the state that would result, with its digest, so that the
caller can first compare it with the digest of a commit. θ may lie in memory shared with the trainer, which only reads
it; θ is written in place, the optimizer's state is swapped, and the old state's memory is reused for the next proposal.
Copy a state to keep it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors import running, step_limit
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.digest import Look, digest, look
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.layout import PARAMETER, Layout, Shard
from p2p_diloco.tensors.limits import Room
from p2p_diloco.tensors.outer import OuterOptimizer, State
from p2p_diloco.tensors.raw import Buffer, as_bytes
from p2p_diloco.tensors.step_limit import LENGTHS
from p2p_diloco.tensors.threads import ALONE, Threads

SPARE = 6
"""The most tensors kept for reuse in the next proposals: θ and two state tensors, for each of two shard lengths."""

CUT_WARNS = 0.5
"""A mean that is cut to less than this part of its length is logged as a warning; weaker cuts also occur in honest
runs."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A possible next outer state of a shard: θ [numel], the outer optimizer's state, one digest of both and `meta`,
    and the digest of θ alone. `factor`: the factor by which the step limit has cut the mean; 1 if it was not cut."""

    theta: Tensor
    state: State
    digest: str
    theta_digest: str
    factor: float = 1.0


class ShardStore:
    """θ of all shards and the outer optimizer's state of those of parameters; with a limit, also the lengths of their
    last means."""

    def __init__(
        self,
        layout: Layout,
        outer: OuterOptimizer | DelayedNesterov,
        theta: Tensor,
        limit: float = 0.0,
        threads: Threads = ALONE,
    ) -> None:
        """`theta`: flat fp32 [layout.numel], not copied. The optimizer's state is the initial one. `limit`: a mean is
        cut to at most this many times the median length of the last means (`step_limit`); 0: no mean is cut.
        `threads`: compute the steps."""
        if theta.dtype != torch.float32 or theta.shape != (layout.numel,) or not theta.is_contiguous():
            raise ValueError(f"expected {layout.numel} elements of flat fp32, found {theta.dtype} {tuple(theta.shape)}")
        self.layout = layout
        self.outer = outer
        self._limit, self._room, self._threads = limit, Room(), threads
        self._theta = theta
        self._revised: tuple[tuple[float, float] | None, OuterOptimizer | DelayedNesterov] = None, outer
        self._states: list[State] = [
            {name: torch.zeros(length, device="cpu") for name, length in self.state_lengths(shard).items()}
            for shard in layout.shards
        ]
        self._spare: list[Tensor] = []
        self._digests = [""] * len(layout.shards)  # of θ alone, at its acceptance

    def theta(self, shard: int) -> Tensor:
        """Return the shard's part of θ [numel], as a view."""
        place = self.layout.shards[shard]
        return self._theta[place.start : place.stop]

    def state(self, shard: int) -> Mapping[str, Tensor]:
        """Return the outer optimizer's state for the shard. It is read-only, and valid until the next `accept`."""
        return self._states[shard]

    def state_lengths(self, shard: Shard) -> dict[str, int]:
        """Return the number of elements of each state tensor of a shard, by name, in the order of storage."""
        return state_lengths(shard, self.outer, self._limit)

    def digest(self, shard: int, meta: bytes) -> str:
        """Return the digest of the shard's present state and `meta`."""
        return digest(self.theta(shard), self._states[shard], meta)

    def accepted_theta(self, shard: int) -> str:
        """Return the digest that θ alone had when it was last accepted; empty before the first `accept`."""
        return self._digests[shard]

    def present_theta(self, shard: int) -> str:
        """Return the digest of θ alone as it is now. It differs from `accepted_theta` if memory was corrupted."""
        there = Look()
        there.hash("theta", self.theta(shard).numpy())
        return there.of("theta")

    def propose(
        self,
        shard: int,
        mean: Buffer,
        codec: str,
        meta: bytes,
        submissions: int = 1,
        buffered: int = 0,
        rates: tuple[float, float] | None = None,
    ) -> Proposal:
        """Propose the outer step on the mean pseudo-gradient in `mean`, which `codec` has encoded. The present state
        does not change. The shard consists of parameters.

        With Delayed Nesterov, `submissions` is the number of submissions in `mean`, and `buffered` the number that the
        buffer already holds. `rates` are (lr, momentum); None: the optimizer's own. `meta` is the rest of
        the resulting state, for the digest. Raises ValueError for a wrong length, and if a value of the result isn't
        finite (no replica could load it).
        """
        grad, cut = self._limited(shard, mean, codec)
        seen = Look()
        held, outer = (self.theta(shard), self._states[shard]), self._at(rates)
        if isinstance(outer, DelayedNesterov):
            theta, state = outer.step(*held, grad, submissions, buffered, seen, self._like)
        elif self._threads.count > 1 and outer.is_sgd and codecs.is_cast(codec):
            theta, state = self._spread(shard, mean, codec, cut, outer, seen)
        else:
            theta, state = outer.step(*held, grad, seen, self._like)
        if cut is None:
            return _proposal(theta, state, seen, meta)
        seen(f"state.{LENGTHS}", cut.lengths.numpy())
        return _proposal(theta, {**state, LENGTHS: cut.lengths}, seen, meta, cut.factor)

    def _spread(
        self, shard: int, mean: Buffer, codec: str, cut: step_limit.Cut | None, outer: OuterOptimizer, seen: Look
    ) -> tuple[Tensor, State]:
        """Make the step of `sgd` in several threads, each on its own range of the shard."""
        theta, m = self.theta(shard), self._states[shard]["m"]
        new_theta, new_m = self._like(theta), self._like(m)

        def step(place: slice) -> None:
            decoded = codecs.decode_blocks(codecs.part(mean, codec, place), codec, place.stop - place.start)
            grad = decoded if cut is None else cut.of(decoded)
            room = iter((new_theta[place], new_m[place]))
            outer.step(theta[place], {"m": m[place]}, grad, None, lambda _: next(room))

        self._threads.over(theta.numel(), step)
        self._threads.all(
            lambda: seen("theta", new_theta.numpy()), lambda: seen("state.m", new_m.numpy(), follows=True)
        )
        return new_theta, {"m": new_m}

    def propose_buffers(self, shard: int, values: Buffer, meta: bytes, share: float) -> Proposal:
        """Propose the outer step of a shard of buffers (`running.stepped`) on the encoded `values`. `share`: how far it
        moves towards them. `meta` as in `propose`. Raises ValueError for a wrong length, and if a value isn't
        finite."""
        place = self.layout.shards[shard]
        sent = codecs.decode(values, running.CODEC, place.numel)
        theta = running.stepped(place.kind, self.theta(shard), sent, share)
        return _proposal(theta, {}, look(theta, {}), meta)

    def _limited(self, shard: int, mean: Buffer, codec: str) -> tuple[Iterable[Tensor], step_limit.Cut | None]:
        """Return the blocks of a mean after the limit is applied, and the `Cut`; without a limit the `Cut` is None."""
        numel = self.layout.shards[shard].numel
        first: Iterable[Tensor] = codecs.decode_blocks(mean, codec, numel)
        if not self._limit:
            return first, None
        if numel <= BLOCK:
            first = list(first)  # one block, which is decoded once for both passes
        second = first if numel <= BLOCK else codecs.decode_blocks(mean, codec, numel)
        cut = step_limit.cut(first, self._states[shard][LENGTHS], self._limit, self._room)
        return cut.of(second), cut

    def _at(self, rates: tuple[float, float] | None) -> OuterOptimizer | DelayedNesterov:
        """Return the outer optimizer with these rates; None: its own. The last result is cached."""
        if rates != self._revised[0]:
            self._revised = rates, self.outer if rates is None else self.outer.revised(*rates)
        return self._revised[1]

    def restate(self, shard: int, meta: bytes) -> Proposal:
        """Return the shard's present state as a proposal with another `meta`. Raises ValueError if a value isn't
        finite."""
        theta, state = self._like(self.theta(shard)).copy_(self.theta(shard)), self._states[shard]
        return _proposal(theta, state, look(theta, state), meta)

    def accept(self, shard: int, proposal: Proposal) -> None:
        """Make the proposal the shard's state. The proposal's θ and the shard's previous state must not be used any
        more."""
        if proposal.factor < 1:
            level = logging.WARNING if proposal.factor < CUT_WARNS else logging.DEBUG
            _log.log(level, "shard %d: a mean was cut to %.2g of its length (step_limit)", shard, proposal.factor)
        self.theta(shard).copy_(proposal.theta)
        self._digests[shard] = proposal.theta_digest
        before, self._states[shard] = self._states[shard], proposal.state
        # `restate` keeps its tensors; the lengths are too short to be worth reusing
        void = [old for name, old in before.items() if old is not proposal.state[name] and name != LENGTHS]
        self._spare = [*self._spare, proposal.theta, *void][-SPARE:]

    def _like(self, tensor: Tensor) -> Tensor:
        """Return a tensor as long as this one, with any content. Memory of an earlier proposal is reused if it fits,
        because new memory each time would fragment the heap to twice its size."""
        fitting = [index for index, spare in enumerate(self._spare) if spare.numel() == tensor.numel()]
        return self._spare.pop(fitting[-1]) if fitting else torch.empty_like(tensor)

    def state_nbytes(self, shard: int) -> int:
        """Return the length in bytes of what `export` returns."""
        place = self.layout.shards[shard]
        return 4 * (place.numel + sum(self.state_lengths(place).values()))

    def export(self, shard: int) -> list[memoryview]:
        """Return θ, then each state tensor in the order of storage, as fp32. They are views, valid until the next
        `accept`."""
        states, order = self._states[shard], self.state_lengths(self.layout.shards[shard])
        return [as_bytes(self.theta(shard)), *(as_bytes(states[name]) for name in order)]

    def load(self, shard: int, buffer: Buffer, meta: bytes) -> Proposal:
        """Make a proposal from another replica's `export`, whose parts are joined in `buffer`. The values are copied,
        and the present state does not change.

        Raises ValueError for a wrong length or for values that aren't finite.
        """
        place = self.layout.shards[shard]
        lengths = self.state_lengths(place)
        sizes = [place.numel, *lengths.values()]
        values = codecs.decode(buffer, "fp32", sum(sizes))
        theta, *others = (self._like(part).copy_(part) for part in torch.split(values, sizes))
        state = dict(zip(lengths, others, strict=True))
        return _proposal(theta, state, look(theta, state), meta)


def state_lengths(shard: Shard, outer: OuterOptimizer | DelayedNesterov, limit: float) -> dict[str, int]:
    """Return the number of elements of each state tensor of a shard, by name, in the order of storage: those of the
    outer optimizer, and with a limit the lengths of the last means. A shard of buffers has none."""
    if shard.kind != PARAMETER:
        return {}
    return step_limit.state_lengths(outer.state_lengths(shard.numel), limit)


def _proposal(theta: Tensor, state: State, seen: Look, meta: bytes, factor: float = 1.0) -> Proposal:
    if not seen.finite:
        raise ValueError("the state would hold values that are not finite")
    return Proposal(theta, state, seen.digest(meta), seen.of("theta"), factor)
