"""Delayed Nesterov: the outer step of the asynchronous mode, spread over N submissions. Pure functions of one slice.

Law: as in `outer`: no update in place, and each line below is one operation on fp32, rounded by itself, so that
replicas on different machines agree to the bit. The buffer belongs to the state. The caller counts the submissions in
it (`core`), and passes their number in.

A commit adds k submissions with mean ḡ (k = 1, or all submissions of a grace window) to a buffer B, which holds f
submissions already and at most N: f + k ≤ N. Scalars are computed in double and rounded to fp32 first.

    1. θ' ← θ − s·ḡ       s = η·(k/N) for "paper"; η·k for "buffered", or η·(k − 1) if the N-th is among the k
    2. B' ← B + k·ḡ
    and with the N-th submission:
    3. c ← B' / N
    4. m' ← μ·m, then m' ← m' + c
    5. u ← μ·m', then u ← u + c for "buffered", then u ← η·u
    6. θ' ← θ' − u
    7. B' ← 0

"paper" is Liu et al. 2024, arXiv 2401.09135, Alg. 3, with c = 0; "buffered" spreads only the plain steps. N submissions
of the same ḡ are one Nesterov step on ḡ with "paper".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import Array, Finite, arrays, unheeded
from p2p_diloco.tensors.outer import Like, OuterOptimizer, State


@dataclass(frozen=True, slots=True)
class DelayedNesterov:
    """Spreads each outer step of `outer`, which must be sgd with nesterov, over N = `size` ≥ 2 submissions. `variant`:
    "paper" or "buffered"."""

    outer: OuterOptimizer
    size: int
    variant: str = "paper"

    def revised(self, lr: float, momentum: float) -> DelayedNesterov:
        """Return the same optimizer with other rates, which apply from the next submission on. The buffer and the
        momentum stay as they are."""
        return replace(self, outer=self.outer.revised(lr, momentum))

    def state_lengths(self, numel: int) -> dict[str, int]:
        """As `OuterOptimizer.state_lengths`."""
        return {"m": numel, "b": numel}

    @unheeded
    def step(
        self,
        theta: Tensor,
        state: Mapping[str, Tensor],
        grad: Tensor | Iterable[Tensor],
        submissions: int,
        buffered: int,
        seen: Finite | None = None,
        like: Like = torch.empty_like,
    ) -> tuple[Tensor, State]:
        """Return (θ', state') after a commit of `submissions` submissions with the mean `grad`. The buffer already
        holds `buffered` submissions.

        All flat fp32 [numel]; inputs stay unchanged. `grad`, `seen` and `like` as in `OuterOptimizer.step`. Raises
        ValueError for more submissions than the buffer has room for.
        """
        if submissions < 1 or buffered < 0 or buffered + submissions > self.size:
            raise ValueError(f"{submissions} submissions don't fit into a buffer of {self.size} that holds {buffered}")
        full = buffered + submissions == self.size
        parts = torch.split(grad, flats.BLOCK) if isinstance(grad, Tensor) else grad
        new_theta, new_m, new_b = like(theta), like(theta).copy_(state["m"]), like(theta)
        at_once = submissions / self.size if self.variant == "paper" else submissions - full
        step, count = np.float32(self.outer.lr * at_once), np.float32(submissions)
        for g, old, b, new, m, kept in arrays(parts, theta, state["b"], new_theta, new_m, new_b):
            np.multiply(g, step, out=new)
            np.subtract(old, new, out=new)
            np.multiply(g, count, out=kept)
            np.add(b, kept, out=kept)
            if full:
                self._fill(new, m, kept)
            if seen is not None:
                seen(new)
                seen(kept)
        return new_theta, {"m": new_m, "b": new_b}

    def _fill(self, theta: Array, m: Array, b: Array) -> None:
        """Compute lines 3 to 7 for one block, once the buffer is full. `theta`, `m` and `b`: this block of the new
        tensors, changed in place."""
        momentum, lr = np.float32(self.outer.momentum), np.float32(self.outer.lr)
        np.divide(b, np.float32(self.size), out=b)
        np.multiply(m, momentum, out=m)
        np.add(m, b, out=m)
        update = m * momentum
        if self.variant == "buffered":
            np.add(update, b, out=update)
        np.multiply(update, lr, out=update)
        np.subtract(theta, update, out=theta)
        b.fill(0.0)
