"""Warns, once, if two peers contribute the same, which shows that they train on the same data in the same order.

Law: compares and warns; changes no mean. Only contributions that this peer averages are compared. Two are the same if
their hashes are equal; or, where machines round differently, if they point the same way in several rounds. Each is
decoded at most once, and little of it is kept, because the node does nothing else meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import combinations

import torch
from torch import Tensor

from p2p_diloco.node.run import Run
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.flat import Buffer, tensor_over
from p2p_diloco.tensors.layout import PARAMETER
from p2p_diloco.tensors.mean import WEIGHT_MIN

SAME_WAY = 0.998
"""Two contributions with a greater cosine point the same way. In 5 to 60 steps of a small language model the cosine was
0.44 to 0.73 with different data; 0.988 to 0.9998 with the same data in the same order, one peer in bf16, one in
fp32."""
ROUNDS = 3
"""Two peers' contributions must point the same way in this many rounds in a row."""
SAMPLE = 4096
"""The cosine is computed from this many values or more, spread over a slice. Shorter slices are not compared: few
values may be nearly proportional by chance."""

log = logging.getLogger(__name__)


class Alike:
    """Compares contributions until two are the same. `named` returns the text by which the log names peers."""

    def __init__(self, named: Callable[[str], str], run: Run) -> None:
        self._named, self._codec, self._slices = named, run.config.codec, run.layout.slices
        self._compared = -1  # the slice whose contributions are compared: the first long one that this peer averages
        self._rounds: dict[tuple[str, str], int] = {}  # by pair: rounds in a row with the same way
        self._warned = False

    def look(self, index: int, contributions: Iterable[tuple[str, float, str, Buffer]]) -> None:
        """Compare the contributions to a slice of which the mean is made, each given as (peer, weight, hash, payload),
        except those without progress, whose weight is `WEIGHT_MIN`, or that are nothing but zeros. Those to buffers are
        not compared: counters are equal on all peers, and so are buffers that never change."""
        place, every = self._slices[index], self._slices[index].numel // SAMPLE
        if self._warned or place.kind != PARAMETER:
            return
        made, first_with = list[tuple[str, Buffer]](), dict[str, str]()
        for peer, weight, hash, payload in contributions:
            if weight <= WEIGHT_MIN:
                continue
            made.append((peer, payload))
            if (other := first_with.setdefault(hash, peer)) != peer and tensor_over(payload).any():
                self._warn(other, peer, "the same bytes")
                return
        if not every or self._compared not in (-1, index) or len(made) < 2:
            return
        self._compared = index
        samples = [_sample(codecs.decode_blocks(payload, self._codec, place.numel), every) for _, payload in made]
        rows = torch.nn.functional.normalize(torch.stack(samples))
        cosines = rows @ rows.T
        pairs = combinations(range(len(made)), 2)
        same = [(made[i][0], made[j][0]) for i, j in pairs if cosines[i, j] > SAME_WAY]
        self._rounds = {pair: self._rounds.get(pair, 0) + 1 for pair in same if pair[0] != pair[1]}
        if (pair := next((pair for pair, rounds in self._rounds.items() if rounds >= ROUNDS), None)) is not None:
            self._warn(*pair, f"nearly the same in {ROUNDS} rounds")

    def _warn(self, one: str, other: str, what: str) -> None:
        self._warned = True
        log.warning(
            "%s contribute %s, so one of them is useless: they train on the same data in the same order; give each "
            "peer data of its own, for instance by using peer.seed as the seed",
            self._named(f"{one} and {other}"),
            what,
        )


def _sample(blocks: Iterable[Tensor], every: int) -> Tensor:
    """Each `every`-th value of each block."""
    return torch.cat([block[::every].clone() for block in blocks])
