"""The outer state of a replica: θ of all slices, and the outer optimizer's state of those of parameters.

Law: a step changes one slice, in place, and only if all its new values are finite; no other slice is touched, and there
is memory for one slice's step, not for a second copy of a fragment. Where the result can only be finite, it is written
over the present values, and not looked at. θ may lie in memory shared with the trainer, which only reads it. A staged
slice is a slice of another version, outside of this state until it is adopted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from p2p_diloco.tensors import buffers, limits
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.flat import ALONE, BLOCK, Buffer, Finite, Threads, as_bytes, magnitude
from p2p_diloco.tensors.layout import PARAMETER, Layout, SliceSpec
from p2p_diloco.tensors.limits import LENGTHS, Room
from p2p_diloco.tensors.outer import Like, OuterOptimizer, State

SPARE = 6
"""The most tensors kept for reuse in the next step: θ and two state tensors, for each of two lengths of slices."""
CUT_WARNS = 0.5
"""A mean that is cut to less than this part of its length is logged as a warning; weaker cuts also occur in honest
runs."""
Rates = tuple[float, float]
FINITE = 2.0**100
"""A step of less than this leaves every finite fp32 finite: it is less than half the distance of the largest one to its
neighbour, 2¹⁰⁴. What rounding adds is less than the rest."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SliceState:
    """θ [numel] and the outer optimizer's state of one slice. `longest`: a bound of the magnitudes in sgd's momentum;
    infinite if it isn't known, or if θ is not known to be finite."""

    theta: Tensor
    state: State
    longest: float = math.inf

    def digest(self) -> str:
        """The xxh3-128 of all tensors, 32 hexadecimal digits."""
        return digest(self.theta, self.state)

    def export(self, *, first: bool = False) -> list[memoryview]:
        """θ, then each state tensor in the order of storage, as fp32. They are views, valid until the next step.
        `first`: of a slice before its first step, whose state is zeros: θ alone."""
        return [as_bytes(self.theta), *(as_bytes(values) for values in (() if first else self.state.values()))]


class OuterState:
    """The slices of a replica, by their index in the layout."""

    def __init__(
        self,
        layout: Layout,
        outer: OuterOptimizer | DelayedNesterov,
        theta: Tensor,
        limit: float = 0.0,
        threads: Threads = ALONE,
    ) -> None:
        """`theta`: flat fp32 [layout.numel], not copied. The optimizer's state is the initial one. `limit`: a mean is
        cut to at most this many times the median length of the slice's last means (`limits.cut`); 0: no mean is cut.
        `threads` compute the steps."""
        if theta.dtype != torch.float32 or theta.shape != (layout.numel,) or not theta.is_contiguous():
            raise ValueError(f"expected {layout.numel} elements of flat fp32, found {theta.dtype} {tuple(theta.shape)}")
        self.layout, self.outer = layout, outer
        self._limit, self._room, self._threads = limit, Room(), threads
        self._revised: tuple[Rates | None, OuterOptimizer | DelayedNesterov] = None, outer
        self._spare: list[Tensor] = []
        self.slices = [SliceState(theta[place.start : place.stop], self._zeros(place)) for place in layout.slices]

    def lengths(self, place: SliceSpec) -> dict[str, int]:
        """The number of elements of each state tensor of a slice, by name, in the order of storage."""
        return state_lengths(place, self.outer, self._limit)

    def nbytes(self, index: int, *, first: bool = False) -> int:
        """The length in bytes of a slice's `export`."""
        place = self.layout.slices[index]
        return 4 * (place.numel + (0 if first else sum(self.lengths(place).values())))

    def _zeros(self, place: SliceSpec) -> State:
        return {name: torch.zeros(length, device="cpu") for name, length in self.lengths(place).items()}

    # -- steps

    def step(
        self,
        index: int,
        held: SliceState,
        mean: Buffer,
        codec: str,
        submissions: int = 1,
        buffered: int = 0,
        rates: Rates | None = None,
    ) -> float:
        """Make the outer step on the mean pseudo-gradient in `mean`, which `codec` has encoded. `held`: of parameters,
        the present one with this index or a staged one. Returns the factor by which the step limit has cut the mean; 1
        if it was not cut.

        With Delayed Nesterov, `submissions` is the number of submissions in `mean`, and `buffered` the number that the
        buffer already holds. `rates` are (lr, momentum); None: the optimizer's own. Raises ValueError for a wrong
        length, and if a value of the result isn't finite; then the slice stays as it is.
        """
        grad, cut = self._limited(held, self.layout.slices[index].numel, mean, codec)
        outer, longest = self._at(rates), math.inf if cut is None else held.longest + cut.norm
        sgd = outer if isinstance(outer, OuterOptimizer) and outer.is_sgd else None
        # |m'| ≤ |m| + |ḡ|, and the step is η · (μ · m' + ḡ), with μ < 1
        stays_finite = sgd is not None and 2 * sgd.lr * longest < FINITE
        like: Like = (lambda values: values) if stays_finite else self._like  # new values are written over the old
        seen = None if stays_finite else Finite()
        if isinstance(outer, DelayedNesterov):
            theta, state = outer.step(held.theta, held.state, grad, submissions, buffered, seen, like)
        elif self._threads.count > 1 and sgd is not None and codecs.is_cast(codec):
            theta, state = self._spread(held, mean, codec, cut, sgd, seen, like)
        else:
            theta, state = outer.step(held.theta, held.state, grad, seen, like)
        if cut is not None:
            state = {**state, LENGTHS: cut.lengths}
            if seen is not None:
                seen(cut.lengths.numpy())
            if cut.factor < 1:
                level = logging.WARNING if cut.factor < CUT_WARNS else logging.DEBUG
                _log.log(level, "slice %d: a mean was cut to %.2g of its length (step_limit)", index, cut.factor)
        if seen is None:
            held.state, held.longest = state, longest
        else:
            self._replace(held, theta, state, seen)
            held.longest = math.inf if sgd is None or cut is None else magnitude(state["m"])
        return 1.0 if cut is None else cut.factor

    def step_buffers(self, index: int, held: SliceState, values: Buffer, share: float) -> None:
        """Make the outer step of a slice of buffers (`buffers.stepped`) on the encoded `values`. `share`: how far it
        moves towards them. Raises ValueError as `step` does."""
        place = self.layout.slices[index]
        theta = buffers.stepped(place.kind, held.theta, codecs.decode(values, buffers.CODEC, place.numel), share)
        seen = Finite()
        seen(theta.numpy())
        self._replace(held, theta, {}, seen)

    def _replace(self, held: SliceState, theta: Tensor, state: State, seen: Finite) -> None:
        if not seen.finite:
            self._keep(theta, *state.values())
            raise ValueError("the step would lead to values that are not finite")
        held.theta.copy_(theta)
        before, held.state = held.state, state
        self._keep(theta, *before.values())

    def _spread(
        self,
        held: SliceState,
        mean: Buffer,
        codec: str,
        cut: limits.Cut | None,
        outer: OuterOptimizer,
        seen: Finite | None,
        like: Like,
    ) -> tuple[Tensor, State]:
        """Make the step of `sgd` in several threads, each on its own range of the slice."""
        theta, m = held.theta, held.state["m"]
        new_theta, new_m = like(theta), like(m)

        def step(place: slice) -> None:
            decoded = codecs.decode_blocks(codecs.part(mean, codec, place), codec, place.stop - place.start)
            grad = decoded if cut is None else cut.of(decoded)
            room = iter((new_theta[place], new_m[place]))
            outer.step(theta[place], {"m": m[place]}, grad, seen, lambda _: next(room))

        self._threads.over(theta.numel(), step)
        return new_theta, {"m": new_m}

    def _limited(
        self, held: SliceState, numel: int, mean: Buffer, codec: str
    ) -> tuple[Iterable[Tensor], limits.Cut | None]:
        """Return the blocks of a mean after the limit is applied, and the `Cut`; without a limit the `Cut` is None."""
        first: Iterable[Tensor] = codecs.decode_blocks(mean, codec, numel)
        if not self._limit:
            return first, None
        if numel <= BLOCK:
            first = list(first)  # one block, which is decoded once for both passes
        second = first if numel <= BLOCK else codecs.decode_blocks(mean, codec, numel)
        cut = limits.cut(first, held.state[LENGTHS], self._limit, self._room)
        return cut.of(second), cut

    def _at(self, rates: Rates | None) -> OuterOptimizer | DelayedNesterov:
        """Return the outer optimizer with these rates; None: its own. The last result is cached."""
        if rates != self._revised[0]:
            self._revised = rates, self.outer if rates is None else self.outer.revised(*rates)
        return self._revised[1]

    # -- other versions of slices

    def stage(self, index: int, buffer: Buffer, *, in_place: bool = False) -> SliceState:
        """Make a slice from another replica's `export`, whose parts are joined in `buffer`. The values are copied: into
        memory of their own or, with `in_place`, over the present slice, for a replica that holds no state. Without
        state tensors the slice is one before its first step.

        Raises ValueError for a wrong length or for values that aren't finite.
        """
        place = self.layout.slices[index]
        first = memoryview(buffer).nbytes == self.nbytes(index, first=True)
        lengths = {} if first else self.lengths(place)
        values = codecs.decode(buffer, "fp32", self.nbytes(index, first=first) // 4)
        if not torch.isfinite(values).all():
            raise ValueError("the state has values that are not finite")
        theta, *others = torch.split(values, [place.numel, *lengths.values()])
        to = self.slices[index] if in_place else SliceState(self._like(theta), self._zeros(place))
        to.longest = math.inf
        to.theta.copy_(theta)
        for target, part in zip(to.state.values(), others or self._zeros(place).values(), strict=True):
            target.copy_(part)
        return to

    def adopt(self, index: int, staged: SliceState) -> None:
        """Make a staged slice the present one. It must not be used any more."""
        present = self.slices[index]
        if staged is not present:
            present.theta.copy_(staged.theta)
            before, present.state, present.longest = present.state, staged.state, staged.longest
            self._keep(staged.theta, *before.values())

    # -- memory

    def _like(self, tensor: Tensor) -> Tensor:
        """Return a tensor as long as this one, with any content. Memory of an earlier step is reused if it fits,
        because new memory each time would fragment the heap to twice its size."""
        fitting = [index for index, spare in enumerate(self._spare) if spare.numel() == tensor.numel()]
        return self._spare.pop(fitting[-1]) if fitting else torch.empty_like(tensor)

    def _keep(self, *void: Tensor) -> None:
        """Keep memory for reuse. Lengths and other short tensors are not worth it."""
        self._spare = [*self._spare, *(one for one in void if one.numel() > limits.LENGTHS_MAX)][-SPARE:]


def state_lengths(place: SliceSpec, outer: OuterOptimizer | DelayedNesterov, limit: float) -> dict[str, int]:
    """Return the number of elements of each state tensor of a slice, by name, in the order of storage: those of the
    outer optimizer, and with a limit the lengths of the last means. A slice of buffers has none."""
    if place.kind != PARAMETER:
        return {}
    return outer.state_lengths(place.numel) | ({LENGTHS: limits.LENGTHS_MAX} if limit else {})


def joined(parts: Sequence[memoryview]) -> memoryview:
    """Join the parts of an `export` for sending."""
    return memoryview(b"".join(parts))


def digest(theta: Tensor, state: Mapping[str, Tensor]) -> str:
    """Return one xxh3-128, 32 hexadecimal digits, over each tensor's name, length and own xxh3-128, in the order of
    names. The lengths make sure that different states give different byte streams.

    Replicas with equal digests hold the same bits of θ and of every tensor of the outer optimizer's state. It detects
    faults, not forgery: xxh3 is fast, not cryptographic.
    """
    whole = xxhash.xxh3_128()
    for name, values in sorted([("theta", theta), *((f"state.{name}", values) for name, values in state.items())]):
        raw = values.numpy()
        whole.update(f"{name}:{raw.nbytes};".encode() + xxhash.xxh3_128(raw.data).digest())
    return whole.hexdigest()
