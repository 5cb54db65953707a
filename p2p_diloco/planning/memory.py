"""The host memory that a peer needs, without activations.

Law: figures of docs/operations.md and docs/performance.md, which were measured; `doctor` uses the same.
"""

from __future__ import annotations

from typing import NamedTuple

from p2p_diloco.config import RunConfig
from p2p_diloco.planning.exchange import FEEDS_BACK

NODE_BYTES = 200_000_000
"""Memory of a node without a model."""
SMALL = 50_000_000
"""Models with fewer parameters than this take `SMALL_MORE` bytes more for each parameter."""
SMALL_MORE = 2
PER_PARAMETER = 20
"""Bytes of host memory for each parameter, at the peak of a round: bf16, SGD, two peers."""
PER_PEER, PEERS_MOST = 1.5, 9.0
"""Further bytes for each parameter: `PER_PEER` for each peer beyond two (2.8 in all were measured with four peers, 8.7
with eight), `PEERS_MOST` at most in all, because collected contributions and kept commits are limited."""
TRAINER = 16
"""Bytes for each parameter in the trainer: fp32 values and gradients, and AdamW's two moments."""


class Memory(NamedTuple):
    """The bytes of a peer's two processes. Memory that they share (θ, the pseudo-gradient) counts as the node's."""

    trainer: float
    node: float


def per_parameter(run: RunConfig, parameters: int) -> int:
    """Bytes of host memory that a peer needs for each parameter, in a run of two peers. The model and its optimizer are
    not included."""
    amount = PER_PARAMETER + (SMALL_MORE if parameters < SMALL else 0)
    amount += 0 if run.codec == "bf16" else 2  # the pseudo-gradient in shared memory
    amount += 8 if run.codec == "fp32" else 0  # contributions and means are twice as long
    amount += 4 if run.overlap_steps or run.mode == "async" else 0  # the older θ
    return amount + (8 if run.codec in FEEDS_BACK else 0)  # the kept rounding error


def memory(run: RunConfig, parameters: int, peers: int) -> Memory:
    """The memory of a peer's two processes: of the trainer without activations, and of the node at the peak of a
    round."""
    more = min(PEERS_MOST, PER_PEER * max(0, peers - 2))
    return Memory(TRAINER * parameters, NODE_BYTES + (per_parameter(run, parameters) + more) * parameters)
