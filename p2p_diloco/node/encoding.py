"""Encodes the trainer's pseudo-gradients, and the values of buffers, as payloads; and checks the values in payloads.

Law: changes no outer state. If every peer would refuse the values that a codec makes, no progress is sent, because a
refused contribution would be sent again for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import blake2b

import torch
from torch import Tensor

from p2p_diloco.core.events import Loaded
from p2p_diloco.core.version import ContributionId
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.run import Run
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.feedback import Feedback
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

FINITE_MAX = torch.finfo(torch.float32).max

log = logging.getLogger(__name__)


def check_values(payload: memoryview, codec: str, numel: int, magnitude_max: float = FINITE_MAX) -> None:
    """Raises Refusal if the values in a payload can't be used."""
    try:
        if codecs.peak(payload, codec, numel) <= magnitude_max:  # NaN compares as false
            return
    except ValueError as error:
        raise Refusal(f"its payload can't be decoded: {error}") from None
    raise Refusal("its payload has values that are not finite or too large")


class Encoding:
    """Encodes one peer's contributions, slice by slice, and keeps the error feedback of each."""

    def __init__(self, run: Run, neutral: Callable[[int], Tensor]) -> None:
        """`neutral`: the values of a contribution to a slice without progress."""
        self._run, self._neutral = run, neutral
        self._feedback: dict[int, Feedback] = {}  # by slice; made when a contribution first needs it

    def encode(self, index: int, delta: Tensor, id: ContributionId, *, weighs: bool = True) -> memoryview:
        """Encode a slice's pseudo-gradient, or the values of buffers, from `delta` [numel], for the contribution `id`.
        The result shares no memory with `delta`, which is written again for the next exchange.

        With error feedback the rounding error is added to the next contribution, unless `weighs` is False.
        """
        place, (codec, _) = self._run.layout.slices[index], self._run.codecs(index)
        values, feedback = delta[place.start : place.stop], None
        if codecs.shares(values, codec):  # sent as the trainer has written it, which has checked it
            return memoryview(bytes(codecs.encode(values, codec)))
        if codecs.feeds_back(codec):
            feedback = self._feedback[index] = self._feedback.get(index) or Feedback(place.numel)
            values = feedback.added(values) if weighs else values
        payload = self._encoded(values, index, id)
        try:
            check_values(payload, codec, place.numel, MAGNITUDE_MAX)
        except Refusal as refusal:
            log.error("this peer's contribution to slice %d is sent without progress: %s", index, refusal.reason)
            payload = memoryview(bytearray(codecs.encode(self._neutral(index), codec)))
            if feedback is not None:
                feedback.sent_nothing(id)
        else:
            if feedback is not None and weighs:
                feedback.sent(id, codecs.decode_blocks(payload, codec, place.numel))
            elif feedback is not None:
                feedback.sent_apart(id)
        return payload

    def merge(self, loaded: Loaded) -> None:
        """Update the error feedback of a fragment that the trainer merges."""
        for index in self._run.rules.fragments[loaded.fragment]:
            if (feedback := self._feedback.get(index)) is not None:
                feedback.merge(loaded.outcome, loaded.counted)

    def _encoded(self, values: Tensor, index: int, id: ContributionId) -> memoryview:
        """Encode values with the run's codec and rounding. The unique id of the contribution is the seed of its random
        rounding."""
        codec, _ = self._run.codecs(index)
        if self._run.config.rounding == "nearest" or codec == buffers.CODEC:
            return codecs.encode(values, codec)
        drawn = blake2b(repr((id.incarnation, id.sequence, index)).encode(), digest_size=8).digest()
        return codecs.encode_stochastically(values, int.from_bytes(drawn, "little", signed=True))
