"""The model's parameters beside the global ones: loading, carrying progress over, pseudo-gradients.

Law: plain arithmetic on host memory, in fp32, of what this process holds and no more; only the thread that trains may
call it. θ is read, never written, and only while the node lets it be read. How values get here from a device, `staging`
knows; which values are this process's, `extents`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from p2p_diloco.node.local_progress import Take
from p2p_diloco.peer.extents import ALONE, Extent, Rank, extents_of, is_sharded, reshard
from p2p_diloco.peer.staging import CHUNK_BYTES, Staging, staging_for
from p2p_diloco.tensors.flat import pseudo_gradient
from p2p_diloco.tensors.layout import Layout
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

MERGED_AT_ONCE = 1 << 18
"""Elements that are merged at a time: their progress takes memory beside them, which malloc never returns."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where some of a parameter's values lie: of which shard, and in the flat vector."""

    shard: int
    place: slice
    speaks: bool

    def pieces(self, values: Tensor) -> Iterator[tuple[Tensor, Span]]:
        """The same in pieces of `MERGED_AT_ONCE`."""
        for start in range(0, len(values), MERGED_AT_ONCE):
            piece = values[start : start + MERGED_AT_ONCE]
            first = self.place.start + start
            yield piece, Span(self.shard, slice(first, first + len(piece)), self.speaks)


class Local(Protocol):
    """What an exchange does to parameters, whichever process holds them."""

    def merge(self, takes: Mapping[int, Take], kept: Collection[int] = ()) -> None:
        """See `LocalModel`, as for the others."""

    def write_delta(self, shards: Collection[int], kept: Collection[int] = ()) -> None: ...

    def may_be_sent(self, shards: Collection[int]) -> bool: ...

    def global_values(self, kept: Collection[int] = ()) -> dict[str, Tensor]: ...


class LocalModel:
    """A model's trainable parameters, as far as this process holds them, in the flat order of a layout.

    `theta`, `base`, `delta`: [layout.numel] fp32; the global parameters, what they were when they were loaded, and the
    pseudo-gradients that were last sent. Of shards whose θ is still what was loaded `base` is not read; the node tells
    which shards are `kept` there (`node.bases`).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        theta: Tensor,
        base: Tensor,
        delta: Tensor,
        local_share: float = 0.0,
        rank: Rank = ALONE,
    ) -> None:
        self._layout, self._theta, self._base, self._delta = layout, theta, base, delta
        self._local_share = local_share
        self._all = extents_of(model, layout, rank)
        self._held = [extent for extent in self._all if extent.numel]  # of a small parameter a rank may have no row
        self._starts = [extent.start for extent in self._held]
        self._sharded = model if any(is_sharded(extent.param) for extent in self._all) else None
        self._stagings: dict[torch.device, Staging] = {}

    @torch.no_grad()
    def write_theta(self) -> None:
        """Offer the model's parameters as the global ones, before the run begins; nothing is trained yet."""
        for values, span in self._through(range(len(self._layout.shards)), fetch=True, spoken=True):
            self._theta[span.place].copy_(values)

    @torch.no_grad()
    def merge(self, takes: Mapping[int, Take], kept: Collection[int] = ()) -> None:
        """Load shards of θ, and carry over what was trained on top of the old ones, as each one's `Take` says."""
        if self._sharded is not None:
            reshard(self._sharded)
        forgotten = [self._layout.shards[shard] for shard, take in takes.items() if take is Take.FORGET]
        bare = {shard for shard, take in takes.items() if take in (Take.DROP, Take.FORGET)}
        for values, span in self._through(bare, store=True):
            values.copy_(self._theta[span.place])
        for place in forgotten:
            self._delta[place.start : place.stop] = 0.0
        fetched = self._through(takes.keys() - bare, fetch=True, store=True)
        for values, span in (piece for whole, where in fetched for piece in where.pieces(whole)):
            local = values.to(torch.float32, copy=True)
            self._take(local, values.dtype, span, takes[span.shard], kept)
            values.copy_(local)

    def _take(self, local: Tensor, dtype: torch.dtype, span: Span, take: Take, kept: Collection[int]) -> None:
        """Turn local values into those that the take makes of them; `dtype`: theirs in the model."""
        theta, delta = self._theta[span.place], self._delta[span.place]
        if take is Take.MIX:  # Streaming DiLoCo, arXiv 2501.18512
            torch.lerp(theta, local, self._local_share, out=local)
            return
        if take is Take.SENT:
            torch.neg(delta.to(torch.float32), out=local)
        else:
            local.sub_(self._anchor(span, kept).to(dtype))  # as it was loaded
        match take:
            case Take.SUBTRACT:
                local.add_(delta)
            case Take.RESTORE:
                local.sub_(delta)
        local.add_(theta)

    def _anchor(self, span: Span, kept: Collection[int]) -> Tensor:
        """The global values that were loaded last."""
        return (self._base if span.shard in kept else self._theta)[span.place]

    @torch.no_grad()
    def write_delta(self, shards: Collection[int], kept: Collection[int] = ()) -> None:
        """Write these shards' pseudo-gradients, base − local, where the node reads them; of a rank, its part."""
        for values, span in self._through(shards, fetch=True, spoken=True):
            pseudo_gradient(self._anchor(span, kept), values, self._delta[span.place])

    def may_be_sent(self, shards: Collection[int]) -> bool:
        """Whether these shards' pseudo-gradients, as last written here, are finite and within `MAGNITUDE_MAX`."""
        for extent, pieces in self._touched(shards):
            for _, start, stop in pieces if extent.speaks else ():
                low, high = torch.aminmax(self._delta[start:stop])
                if not (low.item() >= -MAGNITUDE_MAX and high.item() <= MAGNITUDE_MAX):  # NaN compares as false
                    return False
        return True

    def global_values(self, kept: Collection[int] = ()) -> dict[str, Tensor]:
        """A copy of the global parameters by name, each in its parameter's shape, dtype and place, and sharded as it
        is. `kept`: the shards that are read as they were loaded last, though θ has gone on.
        """
        return {extent.name: extent.like(self._loaded(extent.start, extent.stop, kept)) for extent in self._all}

    def _loaded(self, start: int, stop: int, kept: Collection[int]) -> Tensor:
        """A range of the global parameters, [stop − start]; those of the `kept` shards as they were loaded last."""
        values = self._theta[start:stop]
        places = [self._layout.shards[shard] for shard in kept]
        overlaps = [(max(start, p.start), min(stop, p.stop)) for p in places if p.start < stop and start < p.stop]
        if overlaps:
            values = values.clone()
        for a, b in overlaps:
            values[a - start : b - start] = self._base[a:b]
        return values

    # -- where the values are

    def _through(
        self, shards: Collection[int], *, fetch: bool = False, store: bool = False, spoken: bool = False
    ) -> Iterator[tuple[Tensor, Span]]:
        """What these shards hold of this process's parameters, piece by piece: flat values in host memory, of the
        parameter's dtype, and where they belong. `fetch`, `store`: as `InPlace.through`. `spoken`: only what this
        process writes for the peer.
        """
        devices: dict[torch.device, list[tuple[Extent, list[tuple[int, int, int]]]]] = {}
        for extent, pieces in self._touched(shards):
            if extent.speaks or not spoken:
                devices.setdefault(extent.values().device, []).append((extent, pieces))
        for device, touched in devices.items():
            staging = self._stagings.get(device)
            if staging is None:
                staging = self._stagings[device] = staging_for(device)
            strided: list[tuple[Tensor, Tensor]] = []
            yield from staging.through(_chunks(touched, strided), fetch=fetch, store=store)
            if store:
                for tensor, dense in strided:
                    tensor.copy_(dense)

    def _touched(self, shards: Collection[int]) -> Iterator[tuple[Extent, list[tuple[int, int, int]]]]:
        """Each extent that has elements in these shards, and the pieces (shard, start, stop), in flat order."""
        pieces: dict[int, list[tuple[int, int, int]]] = {}
        for index in sorted(shards):
            shard = self._layout.shards[index]
            position = max(0, bisect_left(self._starts, shard.start + 1) - 1)
            while position < len(self._held) and self._starts[position] < shard.stop:
                extent = self._held[position]
                a, b = max(extent.start, shard.start), min(extent.stop, shard.stop)
                if a < b:  # between two extents there may be other ranks' elements
                    pieces.setdefault(position, []).append((index, a, b))
                position += 1
        for position, found in pieces.items():
            yield self._held[position], found


def _chunks(
    touched: list[tuple[Extent, list[tuple[int, int, int]]]], strided: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Span]]:
    """These pieces as flat views of the parameters' memory, none longer than CHUNK_BYTES. A parameter that isn't
    contiguous is copied into a dense tensor first: `strided` gets both.
    """
    for extent, pieces in touched:
        values = extent.values()
        dense = values.contiguous()
        if not values.is_contiguous():
            strided.append((values, dense))
        flat, longest = dense.view(-1), CHUNK_BYTES // dense.element_size()
        for shard, start, stop in pieces:
            for a in range(start, stop, longest):
                b = min(a + longest, stop)
                yield flat[a - extent.start : b - extent.start], Span(shard, slice(a, b), extent.speaks)


def with_global_values(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's state_dict with these parameters in place of its own (under each of a tied one's names),
    as copies.
    """
    by_identity = {id(parameter): values[name] for name, parameter in model.named_parameters() if name in values}
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        replaced = by_identity.get(id(value))
        state[name] = value.detach().clone() if replaced is None else replaced
    return state
