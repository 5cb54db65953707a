"""Judges the values in the payloads that other peers send.

Law: reads a payload, and changes nothing.
"""

from __future__ import annotations

import torch

from p2p_diloco.core.messages import Commit, Contribution, Message
from p2p_diloco.node.run import Run
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

FINITE_MAX = torch.finfo(torch.float32).max


def objection(run: Run, message: Message, payload: memoryview) -> str:
    """Check a payload's values; returns the reason for refusing it, or an empty text. All values must be finite. In a
    contribution they must also be so small that their sums are finite."""
    match message:
        case Contribution(shard=shard):
            return unfit(payload, run.codecs(shard)[0], run.layout.shards[shard].numel, MAGNITUDE_MAX)
        case Commit(shard=shard):
            return unfit(payload, run.codecs(shard)[1], run.layout.shards[shard].numel)
        case _:
            return unfit(payload, "fp32", payload.nbytes // 4)


def unfit(payload: memoryview, codec: str, numel: int, magnitude_max: float = FINITE_MAX) -> str:
    """Check the values in a payload; returns the reason why they can't be used, or an empty text."""
    try:
        if codecs.peak(payload, codec, numel) <= magnitude_max:  # NaN compares as false
            return ""
    except ValueError as error:
        return f"its payload can't be decoded: {error}"
    return "its payload has values that are not finite or too large"
