"""Measures the time and the error of codecs: `python tests/tensors/codec_cost.py`.

Of 25 million normally distributed elements in slices of the default size, on one thread: bytes by element, how many
times fewer than bf16 has, ns of processor time by element to encode, to decode, and to send (to encode and to keep what
is lost), and the root mean square of what is lost, as a share of that of the values. One object of JSON by codec;
`bf16, stochastic` is `rounding="stochastic"`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from p2p_diloco.core.version import ContributionId
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.codec import CODECS
from p2p_diloco.tensors.feedback import Feedback

NUMEL, SLICE, TURNS = 25_000_000, 2**20, 9


def took_ns(what: Callable[[Tensor], object], slices: Sequence[Tensor]) -> float:
    """By element: processor time, the least of several turns, for what else the cores do is no cost of ours."""
    times = []
    for _ in range(TURNS):
        began = time.process_time()
        for part in slices:
            what(part)
        times.append(time.process_time() - began)
    return round(1e9 * min(times) / NUMEL, 2)


def measured(values: Tensor, codec: str, encode: Callable[[Tensor], memoryview]) -> dict[str, float]:
    """A row."""
    slices = values.split(SLICE)
    payloads = {len(part): bytes(encode(part)) for part in slices}
    lost = [(codecs.decode(encode(part), codec, len(part)) - part).norm() for part in slices]
    feedbacks = {len(part): Feedback(len(part)) for part in slices}

    def decode(part: Tensor) -> None:
        for _ in codecs.decode_blocks(payloads[len(part)], codec, len(part)):
            pass

    def send(part: Tensor) -> None:
        feedback = feedbacks[len(part)]
        payload = encode(feedback.added(part))
        feedback.sent(ContributionId(1, 1), codecs.decode_blocks(payload, codec, len(part)))

    nbytes = sum(codecs.nbytes(codec, len(part)) for part in slices)
    return {
        "bytes": round(nbytes / NUMEL, 4),
        "fewer_than_bf16": round(2 * NUMEL / nbytes, 2),
        "encode_ns": took_ns(encode, slices),
        "decode_ns": took_ns(decode, slices),
        **({"send_ns": took_ns(send, slices)} if codecs.feeds_back(codec) else {}),
        "lost": round((torch.stack(lost).norm() / values.norm()).item(), 4),
    }


def main() -> None:
    """Measure, tell."""
    torch.set_num_threads(1)
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    for codec in sys.argv[1:] or CODECS:
        row = measured(values, codec, lambda flat, codec=codec: codecs.encode(flat, codec))  # type: ignore[misc]
        print(json.dumps({codec: row}), flush=True)
        if codec == "bf16":
            row = measured(values, codec, lambda flat: codecs.encode_stochastically(flat, 1))
            print(json.dumps({"bf16, stochastic": row}), flush=True)


if __name__ == "__main__":
    main()
