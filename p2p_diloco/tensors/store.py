"""The outer state of every shard that a replica holds.

Law: state changes in `accept` and nowhere else. `propose` and `load` only say what the state would be, and
its digest, so that whoever calls can compare it with the digest that a commit names before anything has
happened. θ may lie in memory shared with the trainer, who only reads it; it is written in place, the
optimizer's state is swapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.digest import Look, digest, look
from p2p_diloco.tensors.layout import Layout
from p2p_diloco.tensors.outer import OuterOptimizer, State
from p2p_diloco.tensors.raw import Buffer, as_bytes


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a shard's outer state would become: θ [numel], the outer optimizer's state, the digest of all."""

    theta: Tensor
    state: State
    digest: str


class ShardStore:
    """θ and the outer optimizer's state, by shard."""

    def __init__(self, layout: Layout, outer: OuterOptimizer | DelayedNesterov, theta: Tensor) -> None:
        """Hold `theta` (flat fp32, `layout.numel` long; not copied) with the state that precedes any step."""
        if theta.dtype != torch.float32 or theta.shape != (layout.numel,) or not theta.is_contiguous():
            raise ValueError(
                f"expected {layout.numel} elements of flat fp32, found {theta.dtype} {tuple(theta.shape)}"
            )
        self.layout = layout
        self.outer = outer
        self._theta = theta
        self._states: list[State] = [outer.init_state(shard.numel) for shard in layout.shards]

    def theta(self, shard: int) -> Tensor:
        """The shard's part of θ [numel], a view."""
        place = self.layout.shards[shard]
        return self._theta[place.start : place.stop]

    def state(self, shard: int) -> Mapping[str, Tensor]:
        """The shard's state of the outer optimizer; to be read only."""
        return self._states[shard]

    def digest(self, shard: int, meta: bytes) -> str:
        """The digest of what the shard holds now, and `meta`."""
        return digest(self.theta(shard), self._states[shard], meta)

    def propose(
        self, shard: int, mean: Buffer, codec: str, meta: bytes, submissions: int = 1, buffered: int = 0
    ) -> Proposal:
        """The outer step on the mean pseudo-gradient in `mean`, encoded by `codec`; nothing changes.

        With Delayed Nesterov: the mean of so many `submissions`, where so many are `buffered`.
        `meta` is the rest of the state that the proposal leads to. Raises ValueError for a wrong length, for
        values that aren't finite, and for a step whose result isn't (no replica could load it).
        """
        grad = codecs.decode_blocks(mean, codec, self.layout.shards[shard].numel)
        seen = Look()
        held, outer = (self.theta(shard), self._states[shard]), self.outer
        if isinstance(outer, DelayedNesterov):
            theta, state = outer.step(*held, grad, submissions, buffered, seen)
        else:
            theta, state = outer.step(*held, grad, seen)
        return _proposal(theta, state, seen, meta)

    def restate(self, shard: int, meta: bytes) -> Proposal:
        """What the shard holds now, as a proposal with another `meta`. Raises ValueError for values that aren't
        finite."""
        theta, state = self.theta(shard).clone(), self._states[shard]
        return _proposal(theta, state, look(theta, state), meta)

    def accept(self, shard: int, proposal: Proposal) -> None:
        """Make the proposal the shard's state."""
        self.theta(shard).copy_(proposal.theta)
        self._states[shard] = proposal.state

    def state_nbytes(self, shard: int) -> int:
        """Bytes that `export` gives."""
        numel = self.layout.shards[shard].numel
        return 4 * (numel + sum(self.outer.state_lengths(numel).values()))

    def export(self, shard: int) -> list[memoryview]:
        """θ, then each state tensor in the outer optimizer's order: fp32, to be sent one after another.

        θ is a copy, so that a commit accepted while it is being sent doesn't tear it; the rest is never
        written to.
        """
        states = self._states[shard]
        order = self.outer.state_lengths(self.layout.shards[shard].numel)
        return [as_bytes(self.theta(shard).clone()), *(as_bytes(states[name]) for name in order)]

    def load(self, shard: int, buffer: Buffer, meta: bytes) -> Proposal:
        """What `export` gave elsewhere, joined, as a proposal of its own memory; nothing changes.

        Raises ValueError for a wrong length or for values that aren't finite.
        """
        numel = self.layout.shards[shard].numel
        lengths = self.outer.state_lengths(numel)
        values = codecs.decode(buffer, "fp32", numel + sum(lengths.values()))
        theta, start, state = values[:numel].clone(), numel, {}
        for name, length in lengths.items():
            state[name] = values[start : start + length].clone()
            start += length
        return _proposal(theta, state, look(theta, state), meta)


def _proposal(theta: Tensor, state: State, seen: Look, meta: bytes) -> Proposal:
    if not seen.finite:
        raise ValueError("the state would hold values that are not finite")
    return Proposal(theta, state, seen.digest(meta))
