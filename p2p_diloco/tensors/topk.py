"""A sparse codec: it sends the elements of the largest magnitude in each chunk.

Law: every chunk sends 1 of 64 of its elements (rounded up), so that the length is known beforehand. The bytes hold
first the places of all elements that are sent, little-endian uint16, rising within a chunk; then their values, bf16. Of
elements of equal magnitude the first ones are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import as_bytes, magnitude

CHUNK = 4096
"""Elements of a chunk; divides `flat.BLOCK`. A place uses 12 of its 16 bits."""
ONE_OF = 64
KEPT = CHUNK // ONE_OF


@dataclass(frozen=True, slots=True)
class TopK:
    """A codec that sends only the largest elements of each chunk. The others decode to 0."""

    feeds_back = True  # elements that are not sent now must be sent later

    def nbytes(self, numel: int) -> int:
        return 4 * _kept(numel)

    def encode(self, flat: Tensor) -> memoryview:
        numel = flat.numel()
        raw = torch.empty(self.nbytes(numel), dtype=torch.uint8, device="cpu")
        places, values = _parts(raw)
        for start in range(0, numel, flats.BLOCK):
            here = flat[start : start + flats.BLOCK]
            whole = len(here) // CHUNK * CHUNK
            for part, at in ((here[:whole].reshape(-1, CHUNK), start), (here[whole:].unsqueeze(0), start + whole)):
                if part.numel():
                    found = _largest(part)
                    place = slice(_kept(at), _kept(at) + found.numel())
                    places[place] = found.reshape(-1).to(torch.int16)
                    values[place] = part.gather(1, found).reshape(-1).to(torch.bfloat16)
        return as_bytes(raw)

    def peak(self, raw: Tensor, numel: int) -> float:
        """Return the largest magnitude of the values. It is exact, though `codec.Codec.peak` asks only for a bound."""
        places, values = _parts(raw)
        _check(places, numel)
        return magnitude(values)

    def decode_blocks(self, raw: Tensor, numel: int) -> Iterator[Tensor]:
        places, values = _parts(raw)
        _check(places, numel)
        return _decoded(places, values, numel)


def _decoded(places: Tensor, values: Tensor, numel: int) -> Iterator[Tensor]:
    assert flats.BLOCK % CHUNK == 0, "a block of work must consist of whole chunks"
    if not numel:
        yield torch.empty(0, device="cpu")  # `flat.blocks` yields one empty block, too
    for start in range(0, numel, flats.BLOCK):
        length = min(flats.BLOCK, numel - start)
        here = slice(_kept(start), _kept(start + length))
        chunks = torch.arange(here.stop - here.start, device="cpu").div_(KEPT, rounding_mode="floor").mul_(CHUNK)
        out = torch.zeros(length, device="cpu")
        out[places[here] + chunks] = values[here].to(torch.float32)
        yield out


def _largest(chunks: Tensor) -> Tensor:
    """Return the places, int64 [chunks, kept], of the largest elements of `chunks` [chunks, length]. The places rise
    within each chunk.

    Elements are compared by a key that no two share: the magnitude's bits, then the distance from the end. NaN is above
    all numbers.
    """
    length = chunks.shape[1]
    from_end = torch.arange(length - 1, -1, -1, device="cpu")
    keys = chunks.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64)
    keys = keys.mul_(CHUNK).add_(from_end).topk(_kept(length), dim=1, sorted=False).values
    return keys.bitwise_and_(CHUNK - 1).neg_().add_(length - 1).sort(dim=1).values


def _kept(numel: int) -> int:
    """Return how many of `numel` elements are sent."""
    return -(-numel // ONE_OF)


def _parts(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return views into `raw`: the places, int16, and the values, bf16."""
    half = len(raw) // 2
    return raw[:half].view(torch.int16), raw[half:].view(torch.bfloat16)


def _check(places: Tensor, numel: int) -> None:
    """Raise ValueError unless the places rise within each chunk and lie in it."""
    whole = numel // CHUNK * KEPT
    for chunks, length in ((places[:whole].view(-1, KEPT), CHUNK), (places[whole:].unsqueeze(0), numel % CHUNK)):
        within = not chunks.numel() or bool((chunks[:, 0] >= 0).all() & (chunks[:, -1] < length).all())
        if not (within and bool((chunks[:, 1:] > chunks[:, :-1]).all())):  # a difference may wrap round
            raise ValueError("the places of the elements must rise within each chunk and lie in it")
