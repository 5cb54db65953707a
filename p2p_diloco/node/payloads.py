"""Judges the values in the payloads that other peers send.

Law: reads a payload, and changes nothing.
"""

from __future__ import annotations

import torch

from p2p_diloco.tensors import codec as codecs

FINITE_MAX = torch.finfo(torch.float32).max


def unfit(payload: memoryview, codec: str, numel: int, magnitude_max: float = FINITE_MAX) -> str:
    """Check the values in a payload; returns the reason why they can't be used, or an empty text."""
    try:
        if codecs.peak(payload, codec, numel) <= magnitude_max:  # NaN compares as false
            return ""
    except ValueError as error:
        return f"its payload can't be decoded: {error}"
    return "its payload has values that are not finite or too large"
