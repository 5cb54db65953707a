"""Measures what codecs, means and the step limit cost: `python tests/tensors/costs.py codecs`, `means` or `limit`.

All on one thread, in processor time; medians or the least of several turns, because what else the cores do is no cost
of ours. One object of JSON by codec or number.

codecs: of 25 million normally distributed elements in slices of the default size: bytes by element, how many times
fewer than bf16 has, ns by element to encode, to decode, and to send (to encode and to keep what is lost), and the root
mean square of what is lost, as a share of that of the values. `bf16, stochastic` is `rounding="stochastic"`. Further
arguments choose codecs.

means: one slice in bf16 of 2²⁰ elements, or as many as a further argument says, by number of contributions: ms of the
plain mean, of each aggregation, and of the plain mean with its encoding and the outer step.

limit: what the step limit adds to what a peer computes for another peer's commit (the check of the payload's values,
decoding, the outer step, the digest and the copy into θ), of one slice in bf16 with SGD, by its number of elements
(further arguments): ms with the setting step_limit at 0 and at its default, measured in turns, and the median ratio of
neighbours.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.core.version import ContributionId
from p2p_diloco.node.slice_work import check_values
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.feedback import Feedback
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.limits import Aggregation
from p2p_diloco.tensors.mean import weighted_mean
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.tensors.outer_state import OuterState

NUMEL, SLICE = 25_000_000, 2**20


def took_s(what: Callable[[], object]) -> float:
    began = time.process_time()
    what()
    return time.process_time() - began


def drawn(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def held(numel: int, step_limit: float) -> OuterState:
    layout = Layout.build((ParamSpec("p", (numel,), "float32"),), 1, slice_elements=numel)
    return OuterState(layout, OuterOptimizer(), torch.zeros(numel), step_limit)


def of_codec(values: Tensor, codec: str, encode: Callable[[Tensor], memoryview]) -> dict[str, float]:
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

    def took_ns(what: Callable[[Tensor], object]) -> float:
        turns = [sum(took_s(partial(what, part)) for part in slices) for _ in range(9)]
        return round(1e9 * min(turns) / NUMEL, 2)

    nbytes = sum(codecs.nbytes(codec, len(part)) for part in slices)
    return {
        "bytes": round(nbytes / NUMEL, 4),
        "fewer_than_bf16": round(2 * NUMEL / nbytes, 2),
        "encode_ns": took_ns(encode),
        "decode_ns": took_ns(decode),
        **({"send_ns": took_ns(send)} if codecs.feeds_back(codec) else {}),
        "lost": round((torch.stack(lost).norm() / values.norm()).item(), 4),
    }


def of_codecs(*names: str) -> None:
    values = drawn(NUMEL)
    for codec in names or codecs.CODECS:
        print(json.dumps({codec: of_codec(values, codec, partial(codecs.encode, codec=codec))}), flush=True)
        if codec == "bf16":
            row = of_codec(values, codec, partial(codecs.encode_stochastically, seed=1))
            print(json.dumps({"bf16, stochastic": row}), flush=True)


def of_means(given: str = str(2**20)) -> None:
    numel = int(given)
    state = held(numel, RunConfig().step_limit)
    for count in (3, 4, 8, 16):
        parts = [(f"{n:02}", 20.0, codecs.encode(drawn(numel, n), "bf16")) for n in range(count)]
        mean = partial(weighted_mean, parts, "bf16", numel, torch.bfloat16)
        kinds: dict[str, Callable[[], object]] = {name: partial(mean, name) for name in get_args(Aggregation)}
        kinds["outer step"] = lambda mean=mean: state.step(0, state.slices[0], codecs.encode(mean(), "bf16"), "bf16")  # type: ignore[misc]
        row = {name: statistics.median(took_s(what) for _ in range(41)) for name, what in kinds.items()}
        print(json.dumps({count: {name: round(1000 * each, 2) for name, each in row.items()}}), flush=True)


def of_limit(*given: str) -> None:
    def apply(state: OuterState, payload: memoryview, numel: int) -> None:
        check_values(payload, "bf16", numel)
        state.step(0, state.slices[0], payload, "bf16")

    for numel in map(int, given or ("9000", "131072", "1048576")):
        payload = codecs.encode(drawn(numel), "bf16")
        both = [partial(apply, held(numel, limit), payload, numel) for limit in (0.0, RunConfig().step_limit)]
        pairs = [[1000 * took_s(one) for one in both] for _ in range(101)][3:]
        without, limited = (round(statistics.median(side), 3) for side in zip(*pairs, strict=True))
        ratio = round(statistics.median(b / a for a, b in pairs), 2)
        print(json.dumps({numel: {"without": without, "with": limited, "ratio": ratio}}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"codecs": of_codecs, "means": of_means, "limit": of_limit}[sys.argv[1]](*sys.argv[2:])
