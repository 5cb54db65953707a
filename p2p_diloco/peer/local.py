"""Loads global values into the model's parameters, carries local progress over, and computes pseudo-gradients.

Law: plain arithmetic on host memory, in fp32, only on the values that this process holds and only in the training
thread: no piece is so long that torch would divide it among its threads. They wait for each other, which on busy cores
takes many times as long as the work, and how many there are is the user's choice for training. θ is written only once,
before this peer enters its run, and read only while the node allows it. `devices` copies values from a device;
`extents` says which values this process holds; `local_buffers` does the same work for the model's buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from p2p_diloco.peer.devices import CHUNK_BYTES, Staging, staging_for
from p2p_diloco.peer.extents import ALONE, Extent, Rank, extents_of, is_sharded, reshard
from p2p_diloco.peer.local_buffers import LocalBuffers
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import magnitude
from p2p_diloco.tensors.layout import PARAMETER, Layout, plain_name
from p2p_diloco.tensors.mean import MAGNITUDE_MAX


@dataclass(frozen=True, slots=True)
class Span:
    """The place of some values of a parameter. `index`: of the slice that the values belong to; `place`: their range in
    the flat vector."""

    index: int
    place: slice


class LocalModel:
    """The part of a model's trainable parameters, and of its exchanged buffers, that this process holds, in the flat
    order of a layout.

    All three tensors are [layout.numel]. `theta`: the newest global parameters, fp32; `base`: older global parameters
    that the model has loaded, fp32; `delta`: the pseudo-gradients that were last sent, fp32 or bf16
    (`codec.written_in`); `values`: where the values of buffers are written that are sent, fp32; needed only for a
    layout with buffers. In each method `kept` has the slices whose θ has changed since the model loaded it: for these,
    `base` has the loaded values (`node.slice_work.Bases`); for all other slices θ still has them.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        theta: Tensor,
        base: Tensor,
        delta: Tensor,
        rank: Rank = ALONE,
        values: Tensor | None = None,
        share: float = 0.0,
    ) -> None:
        """`share`: α, the part of local values that stays where they are mixed with the global ones."""
        self._share = share
        self._layout, self._theta, self._base, self._delta = layout, theta, base, delta
        self._all = extents_of(model, layout, rank)
        self._held = [extent for extent in self._all if extent.numel]  # a rank may hold no row of a small parameter
        self._starts = [extent.start for extent in self._held]
        self._sharded = model if any(is_sharded(extent.param) for extent in self._all) else None
        self._parameters = [place.index for place in layout.slices if place.kind == PARAMETER]
        self._speaks = rank.index == 0
        self._buffers = LocalBuffers(model, layout, theta, base, delta if values is None else values)
        self._stagings: dict[torch.device, Staging | None] = {}
        self.has_values = False
        """Whether `keep_values` was called."""
        self.merging: Callable[[], AbstractContextManager[None]] = nullcontext
        """Makes the context of each merge."""

    @torch.no_grad()
    def write_theta(self) -> None:
        """Copy the model's parameters and buffers into θ before this peer enters the run. A founder's become the run's
        first global ones."""
        for values, span in self._through(self._parameters, fetch=True, spoken=True):
            flats.copy(values, self._theta[span.place])
        if self._speaks:
            self._buffers.write_theta()

    @torch.no_grad()
    def merge(self, blends: Mapping[int, Blend], kept: Collection[int] = ()) -> None:
        """Load the new θ of the slices in `blends`. The `Blend` of a slice says what becomes of the local progress in
        it."""
        if self._sharded is not None:
            reshard(self._sharded)
        with self.merging() if blends else nullcontext():
            self._merge(blends, kept)

    def _merge(self, blends: Mapping[int, Blend], kept: Collection[int]) -> None:
        parameters, buffers = self._apart(blends)
        self._buffers.merge({index: blends[index] for index in buffers}, kept)
        blends = {index: blends[index] for index in parameters}
        # values that are only written need not come over from a device
        written = (Blend.NONE, Blend.SENT) if self._share else (Blend.NONE, Blend.SENT, Blend.MIX)
        unread = {index for index, blend in blends.items() if blend in written}
        for whole, where in self._through(unread, store=True):
            theta, delta = self._theta[where.place], self._delta[where.place]
            if blends[where.index].reads_sent:
                for values, anchors, sent in flats.blocks(whole, theta, delta, size=flats.undivided()):
                    torch.sub(anchors, sent, out=values)
            else:
                flats.copy(theta, whole)
        for whole, where in self._through(blends.keys() - unread, fetch=True, store=True):
            of_span = self._theta[where.place], self._loaded_in(where, kept), self._delta[where.place]
            for values, theta, loaded, sent in flats.blocks(whole, *of_span, size=flats.undivided()):
                self._blend(blends[where.index], values, theta, loaded, sent)

    def _blend(self, blend: Blend, values: Tensor, theta: Tensor, loaded: Tensor, sent: Tensor) -> None:
        """Replace the values by the new ones, which depend on them. Sums are fp32, whatever the values' dtype."""
        local = values.to(torch.float32)  # without a copy if they are fp32
        if blend is Blend.MIX:  # Streaming DiLoCo, arXiv 2501.18512
            torch.lerp(theta, local, self._share, out=local)
        else:
            local.sub_(loaded.to(values.dtype))  # in the dtype in which it was loaded
            if blend.reads_sent:
                local.add_(sent)
            local.add_(theta)
        if local is not values:
            values.copy_(local)

    def _loaded_in(self, span: Span, kept: Collection[int]) -> Tensor:
        """The global values of this span that the model loaded last."""
        return (self._base if span.index in kept else self._theta)[span.place]

    @torch.no_grad()
    def write_delta(self, slices: Collection[int], kept: Collection[int] = ()) -> bool:
        """Write the pseudo-gradients of these slices, base − local, and the values of buffers into the shared memory. A
        rank writes only its part. Returns whether they may be sent: whether all pseudo-gradients are finite and within
        `MAGNITUDE_MAX`. What is written for buffers always is."""
        parameters, buffers = self._apart(slices)
        self._buffers.write_values(buffers, kept, speaks=self._speaks)
        sound = True
        for values, span in self._through(parameters, fetch=True, spoken=True):
            written = self._delta[span.place]
            flats.pseudo_gradient(self._loaded_in(span, kept), values, written)
            # at once, while most are still in the cache; NaN compares as false
            sound = magnitude(written) <= MAGNITUDE_MAX and sound
        return sound

    def global_values(self, kept: Collection[int] = ()) -> dict[str, Tensor]:
        """A copy of the global parameters and buffers by name, as the model loaded them last. Each has its parameter's
        shape, dtype, device and sharding. `kept`: the slices that are read from `base`, because θ already has newer
        values."""
        parameters = {each.name: each.like(self._loaded(each.start, each.stop, kept)) for each in self._all}
        return parameters | self._buffers.global_values(kept)

    def keep_values(self, kept: Collection[int] = ()) -> None:
        """Copy this process's part of the global parameters, and let go of the shared memory. From now on only
        `global_values` may be called; its `kept` has no effect then."""
        theta = torch.empty_like(self._theta)  # pages that stay unwritten take no memory
        for source, slices in ((self._theta, self.slices), (self._base, kept)):
            for start, stop in self.ranges(slices):
                flats.copy(source[start:stop], theta[start:stop])
        self._theta = self._base = theta
        self._delta, self.has_values = torch.empty(0, dtype=torch.float32, device="cpu"), True
        self._buffers.keep_values(theta)

    def _loaded(self, start: int, stop: int, kept: Collection[int]) -> Tensor:
        """A range of the global parameters that the model loaded last, [stop − start]. Values of the `kept` slices are
        read from `base`."""
        values = self._theta[start:stop]
        places = [self._layout.slices[index] for index in kept]
        overlaps = [(max(start, p.start), min(stop, p.stop)) for p in places if p.start < stop and start < p.stop]
        if overlaps:
            values = values.clone()
        for a, b in overlaps:
            values[a - start : b - start] = self._base[a:b]
        return values

    # -- where the values are

    @property
    def slices(self) -> range:
        """All slices of the model."""
        return range(len(self._layout.slices))

    def ranges(self, slices: Collection[int], *, spoken: bool | None = None) -> list[tuple[int, int]]:
        """The ranges (start, stop) of the flat vector that this process holds of these slices, in order. `spoken`:
        True: only the ranges that this process writes for the peer; False: only the ranges of parameters that another
        rank writes; None: all. Every process holds all buffers."""
        found: list[tuple[int, int]] = []
        for extent, pieces in self._touched(slices):
            for _, start, stop in pieces if spoken in (None, extent.speaks) else ():
                if found and found[-1][1] == start:
                    found[-1] = found[-1][0], stop
                else:
                    found.append((start, stop))
        if spoken is None or (spoken and self._speaks):
            places = [self._layout.slices[index] for index in sorted(self._apart(slices)[1])]
            found += [(place.start, place.stop) for place in places]
        return found

    def _apart(self, slices: Iterable[int]) -> tuple[list[int], list[int]]:
        """The slices of parameters, and those of buffers."""
        found: tuple[list[int], list[int]] = [], []
        for index in slices:
            found[self._layout.slices[index].kind != PARAMETER].append(index)
        return found

    def _through(
        self, slices: Collection[int], *, fetch: bool = False, store: bool = False, spoken: bool = False
    ) -> Iterator[tuple[Tensor, Span]]:
        """Yield this process's values in these slices, piece by piece, each piece with its span. A piece is flat, lies
        in host memory, and has the parameter's dtype. `fetch`, `store`: as in `Staging.through`. `spoken`: only the
        values that this process, and no other rank, writes for the peer."""
        devices: dict[torch.device, list[tuple[Extent, list[tuple[int, int, int]]]]] = {}
        for extent, pieces in self._touched(slices):
            if extent.speaks or not spoken:
                devices.setdefault(extent.values().device, []).append((extent, pieces))
        for device, touched in devices.items():
            if device not in self._stagings:
                self._stagings[device] = staging_for(device)
            staging, strided = self._stagings[device], list[tuple[Tensor, Tensor]]()
            chunks = _chunks(touched, strided)
            yield from chunks if staging is None else staging.through(chunks, fetch=fetch, store=store)
            if store:
                for tensor, dense in strided:
                    tensor.copy_(dense)

    def _touched(self, slices: Collection[int]) -> Iterator[tuple[Extent, list[tuple[int, int, int]]]]:
        """Yield each extent that has elements in these slices, together with a list of these elements as pieces (slice,
        start, stop), in flat order."""
        pieces: dict[int, list[tuple[int, int, int]]] = {}
        for index in sorted(slices):
            place = self._layout.slices[index]
            position = max(0, bisect_left(self._starts, place.start + 1) - 1)
            while position < len(self._held) and self._starts[position] < place.stop:
                extent = self._held[position]
                a, b = max(extent.start, place.start), min(extent.stop, place.stop)
                if a < b:  # other ranks' elements may lie between two extents
                    pieces.setdefault(position, []).append((index, a, b))
                position += 1
        for position, found in pieces.items():
            yield self._held[position], found


def _chunks(
    touched: list[tuple[Extent, list[tuple[int, int, int]]]], strided: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Span]]:
    """Yield the pieces in `touched` as flat views of the parameters' memory, none longer than CHUNK_BYTES. A parameter
    that isn't contiguous is first copied into a dense tensor, and both tensors are appended to `strided`."""
    for extent, pieces in touched:
        values = extent.values()
        dense = values.contiguous()
        if not values.is_contiguous():
            strided.append((values, dense))
        flat, longest = dense.view(-1), CHUNK_BYTES // dense.element_size()
        for index, start, stop in pieces:
            for a in range(start, stop, longest):
                b = min(a + longest, stop)
                yield flat[a - extent.start : b - extent.start], Span(index, slice(a, b))


def with_global_values(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """A copy of the model's state_dict in which `values` take the place of the parameters and buffers with the same
    names. A tied one is replaced under all its names, and so is an entry that a hook of the state_dict has made of it,
    for instance in another dtype. The names are those without torch.compile's prefix. An entry that is no tensor, such
    as a module's extra state, is kept as it is, and so are the versions by which modules read their own entries."""
    tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    named = {plain_name(name): tensor for name, tensor in tensors}
    by_identity = {id(tensor): values[name] for name, tensor in named.items() if name in values}
    by_name = {name: by_identity[id(tensor)] for name, tensor in named.items() if id(tensor) in by_identity}
    own = model.state_dict(keep_vars=True)
    state = like_state_dict(own)
    for full, value in own.items():
        name = plain_name(full)
        if not isinstance(value, Tensor):
            state[name] = value
        elif (replaced := by_identity.get(id(value))) is not None:
            state[name] = replaced
        elif (replaced := by_name.get(name)) is not None and replaced.shape == value.shape:
            state[name] = replaced.to(device=value.device, dtype=value.dtype)
        else:
            state[name] = value.detach().clone()
    return state


def like_state_dict(own: Mapping[str, Any]) -> dict[str, Any]:
    """An empty state_dict with the versions of a model's own one, by which its modules read their entries. Their names,
    too, are those without torch.compile's prefix."""
    state = OrderedDict[str, Any]()
    versions = {plain_name(f"{module}.").removesuffix("."): said for module, said in _versions(own).items()}
    vars(state)["_metadata"] = versions
    return state


def _versions(own: Mapping[str, Any]) -> Mapping[str, Any]:
    return getattr(own, "_metadata", None) or {}
