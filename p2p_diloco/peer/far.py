"""The values of a rank on another host than rank 0, where the peer's shared memory can't be mapped.

Law: moves values and computes nothing. Such a rank has memory of its own, of which only the pages of its part of the
model are used; `LocalModel` computes on it as on shared memory. Values travel over the rank's connection to rank 0, a
bounded piece at a time: the rank asks rank 0 to write or to read values, and rank 0 serves such requests while it waits
for the rank's answer to a command.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import Blend
from p2p_diloco.peer.rank_n import Rank0Client
from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.raw import as_bytes, tensor_over

PIECE_BYTES = 8 << 20
"""The most bytes of values in a message."""

Range = tuple[int, int]
"""Elements of the flat vector: start, stop."""


class FarModel:
    """The part of a model's parameters that a rank on another host holds. Its methods are those of `LocalModel`.

    `theta`, `base`, `delta`: this rank's own memory, [layout.numel] each, on which `own` computes. Between two calls,
    this `theta` has the values that the model loaded last, even of slices whose θ has changed since on rank 0; so a
    base never has to be sent.
    """

    def __init__(self, own: LocalModel, rank0: Rank0Client, theta: Tensor, base: Tensor, delta: Tensor) -> None:
        self._own, self._rank0 = own, rank0
        self._theta, self._base, self._delta = theta, base, delta

    def write_theta(self) -> None:
        """Copy this rank's parameters into the peer's θ."""
        self._own.write_theta()
        self._give("theta", self._theta, self._own.ranges(self._own.slices, spoken=True))

    def merge(self, blends: Mapping[int, Blend], kept: Collection[int] = ()) -> None:
        """Load new global values, as `LocalModel.merge` does. If that needs the Δ of a parameter that several ranks
        hold, and another rank has written it, that Δ comes from rank 0, too."""
        del kept  # `base` of this rank has the loaded values of every slice in `blends`
        changed = self._own.ranges(blends)
        _copy(self._theta, self._base, changed)
        self._get("theta", self._theta, changed)
        sent = [index for index, blend in blends.items() if blend.reads_sent]
        self._get("delta", self._delta, self._own.ranges(sent, spoken=False))
        self._own.merge(blends, blends.keys())

    def write_delta(self, slices: Collection[int], kept: Collection[int] = ()) -> bool:
        """Compute this rank's pseudo-gradients, and write them into the peer's memory. Returns whether they may be
        sent."""
        del kept
        sound = self._own.write_delta(slices)
        self._give("delta", self._delta, self._own.ranges(slices, spoken=True))
        return sound

    def global_values(self, kept: Collection[int] = ()) -> dict[str, Tensor]:
        """A copy of this rank's part of the global parameters, as `LocalModel.global_values` makes it."""
        self._look(kept)
        return self._own.global_values(self._own.slices)

    def keep_values(self, kept: Collection[int] = ()) -> None:
        """Keep this rank's part of the global parameters, as `LocalModel.keep_values` does."""
        self._look(kept)
        self._own.keep_values(self._own.slices)
        self._theta = self._base = self._delta = torch.empty(0, dtype=torch.float32, device="cpu")

    def _look(self, kept: Collection[int]) -> None:
        """Put into `base` the values that a rank on rank 0's host would read: for the `kept` slices the values that
        were loaded last, for all other slices the values of the peer's θ."""
        _copy(self._theta, self._base, self._own.ranges(kept))
        self._get("theta", self._base, self._own.ranges(set(self._own.slices) - set(kept)))

    # -- what is sent

    def _give(self, which: str, values: Tensor, ranges: Iterable[Range]) -> None:
        """Write these ranges of values into the peer's memory `which`. A piece is sent only after rank 0 is ready to
        read it, because rank 0 serves one rank after another, and a connection that nobody reads would break."""
        for piece in pieces(ranges, values.element_size()):
            self._rank0.send("put", which=which, ranges=piece)
            self._rank0.next()
            self._rank0.send("values", values=packed(values, piece))

    def _get(self, which: str, values: Tensor, ranges: Iterable[Range]) -> None:
        """Read these ranges of the peer's memory `which` ("theta" or "delta") into the same ranges of `values`."""
        for piece in pieces(ranges, values.element_size()):
            self._rank0.send("get", which=which, ranges=piece)
            unpack(self._rank0.next()["values"], values, piece)


def pieces(ranges: Iterable[Range], element_bytes: int) -> Iterator[list[Range]]:
    """Cut ranges into lists of at most `PIECE_BYTES` together."""
    room = most = PIECE_BYTES // element_bytes
    piece: list[Range] = []
    for start, stop in ranges:
        while start < stop:
            end = min(stop, start + room)
            piece.append((start, end))
            room -= end - start
            start = end
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def packed(values: Tensor, ranges: Iterable[Range]) -> bytes:
    """The bytes of these ranges of `values`, one range after another."""
    return b"".join(as_bytes(values[start:stop]) for start, stop in ranges)


def unpack(sent: bytes, values: Tensor, ranges: Iterable[Range]) -> None:
    """Write the bytes `sent`, which `packed` has made from these ranges, into the same ranges of `values`."""
    flat, at = tensor_over(sent).view(values.dtype), 0
    for start, stop in ranges:
        values[start:stop] = flat[at : at + stop - start]
        at += stop - start


def _copy(source: Tensor, target: Tensor, ranges: Iterable[Range]) -> None:
    for start, stop in ranges:
        flats.copy(source[start:stop], target[start:stop])
