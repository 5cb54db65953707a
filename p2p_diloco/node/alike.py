"""Warns, once, if two peers contribute the same, which shows that they train on the same data in the same order.

Law: compares and warns; changes no mean. Only contributions that this peer averages are compared. Two are the same if
their bytes are equal; or, where machines round differently, if they point the same way in several rounds. The bytes of
each contribution are hashed at most once, and never compared pair by pair, because the node does nothing else
meanwhile.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import torch
from blake3 import blake3
from torch import Tensor

from p2p_diloco.node.run import Run
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.flat import Buffer, tensor_over
from p2p_diloco.tensors.layout import PARAMETER
from p2p_diloco.tensors.mean import WEIGHT_MIN

HEAD_BYTES = 4096
"""A contribution is read to its end only if another one begins with the same bytes, this many."""
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

Given = tuple[str, Buffer]
"""A peer and the payload of its contribution."""


class Alike:
    """Compares contributions until two are the same. `named` returns the text by which the log names peers."""

    def __init__(self, named: Callable[[str], str], run: Run) -> None:
        self._named, self._codec = named, run.config.codec
        self._slices = run.layout.slices
        self._compared = -1  # the slice whose contributions' directions are compared
        self._rounds: dict[tuple[str, str], int] = {}  # by pair: rounds in a row with the same way
        self._warned = False

    def look(self, index: int, contributions: Iterable[tuple[str, float, Buffer]]) -> None:
        """Compare the contributions to a slice of which the mean is made, each given as (peer, weight, payload), except
        those without progress, whose weight is `WEIGHT_MIN`. Those to buffers are not compared: counters are equal on
        all peers, and so are buffers that never change."""
        if self._warned or self._slices[index].kind != PARAMETER:
            return
        made = [(peer, memoryview(payload)) for peer, weight, payload in contributions if weight > WEIGHT_MIN]
        if pair := _same_bytes(made):
            self._warn(pair, "the same bytes")
        elif pair := self._same_way(index, made):
            self._warn(pair, f"nearly the same in {ROUNDS} rounds")

    def _warn(self, pair: tuple[str, str], what: str) -> None:
        self._warned = True
        log.warning(
            "%s contribute %s, so one of them is useless: they train on the same data in the same order; give each "
            "peer data of its own, for instance by using peer.seed as the seed",
            self._named(" and ".join(pair)),
            what,
        )

    def _same_way(self, index: int, made: Sequence[Given]) -> tuple[str, str] | None:
        """Two peers whose contributions have pointed the same way in the last `ROUNDS` rounds; None if there are none.
        Only one slice is compared: the first that this peer has averaged."""
        self._compared = index if self._compared < 0 else self._compared
        numel = self._slices[index].numel
        if index != self._compared or numel < SAMPLE or len(made) < 2:
            return None
        samples = [_sample(codecs.decode_blocks(payload, self._codec, numel), numel // SAMPLE) for _, payload in made]
        rows = torch.nn.functional.normalize(torch.stack(samples))
        cosines = rows @ rows.T
        pairs = combinations(range(len(made)), 2)
        same = [(made[i][0], made[j][0]) for i, j in pairs if cosines[i, j] > SAME_WAY]
        self._rounds = {pair: self._rounds.get(pair, 0) + 1 for pair in same if pair[0] != pair[1]}
        return next((pair for pair, rounds in self._rounds.items() if rounds >= ROUNDS), None)


def _sample(blocks: Iterable[Tensor], every: int) -> Tensor:
    """Each `every`-th value of each block."""
    return torch.cat([block[::every].clone() for block in blocks])


def _same_bytes(made: Sequence[Given]) -> tuple[str, str] | None:
    """Two peers that contribute the same bytes; None if there are none. Payloads of nothing but zeros are left out."""
    heads = Counter(bytes(payload[:HEAD_BYTES]) for _, payload in made)
    first_with: dict[bytes, str] = {}
    for peer, payload in made:
        if heads[bytes(payload[:HEAD_BYTES])] == 1 or not tensor_over(payload).any():
            continue
        other = first_with.setdefault(blake3(payload).digest(), peer)
        if other != peer:
            return other, peer
    return None
