"""What codecs cost and lose: `python tests/tensors/codec_cost.py`.

Of a vector of 25 million normally distributed elements, on one thread: bytes by element, how many times fewer than
bf16 has, ns by element to encode and to decode, and the root mean square of what is lost, as a share of that of the
values. One object of JSON by codec; `bf16, stochastic` is `rounding="stochastic"`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.codec import CODECS

NUMEL, TURNS = 25_000_000, 5


def took_ns(what: Callable[[], object]) -> float:
    """By element: the median of several turns, after one to warm up."""
    times = []
    for _ in range(TURNS + 1):
        began = time.perf_counter()
        what()
        times.append(time.perf_counter() - began)
    return 1e9 * statistics.median(times[1:]) / NUMEL


def measured(values: Tensor, codec: str, encode: Callable[[Tensor], memoryview]) -> dict[str, float]:
    """A row."""
    raw = bytes(encode(values))
    error = codecs.decode(raw, codec, NUMEL).sub_(values).norm() / values.norm()
    return {
        "bytes": round(len(raw) / NUMEL, 4),
        "fewer_than_bf16": round(2 * NUMEL / len(raw), 2),
        "encode_ns": round(took_ns(lambda: encode(values)), 2),
        "decode_ns": round(took_ns(lambda: [None for _ in codecs.decode_blocks(raw, codec, NUMEL)]), 2),
        "lost": round(error.item(), 4),
    }


def main() -> None:
    """Measure, tell."""
    torch.set_num_threads(1)
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    for codec in sys.argv[1:] or CODECS:
        row = measured(values, codec, lambda flat, codec=codec: codecs.encode(flat, codec))  # type: ignore[misc]
        print(json.dumps({codec: row}), flush=True)
        if codec == "bf16":
            row = measured(values, codec, lambda flat: codecs.encode_stochastically(flat, "bf16", 1))
            print(json.dumps({"bf16, stochastic": row}), flush=True)


if __name__ == "__main__":
    main()
