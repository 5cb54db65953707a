"""Reads and writes the model's buffers that are exchanged, such as BatchNorm's running statistics.

Law: as in `local`, but on whole buffers: they are small, and every rank of a peer has all of them. What is sent are the
values themselves (`tensors.buffers`); rank 0's are the peer's. A buffer is looked up by its name each time, because a
model may replace it. A value that isn't finite, or is too large to be sent, stays at this peer: the global value is
sent and loaded in its place.

    mean        local ← θ + progress, which is measured as the `Blend` says (`progress`)
    greatest    local ← max(θ, local) if local has progress, else θ

So a mean keeps what it gained since it was sent. But two progresses may add up to more than there is: a variance that
two peers saw fall by 0.6 of 1 would be negative. A value that neither θ nor the local value has below 0 stays local.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from p2p_diloco.errors import UsageError
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors.layout import GREATEST, Layout, ParamSpec, kind_of, plain_name
from p2p_diloco.tensors.mean import MAGNITUDE_MAX


class LocalBuffers:
    """The buffers of a model that lie in the slices of a layout that hold buffers.

    `theta`, `base`: as in `LocalModel`. `values`: where the values that are sent are written, fp32; all [layout.numel].
    In each method `kept` has the slices whose loaded values are in `base`.
    """

    def __init__(self, model: nn.Module, layout: Layout, theta: Tensor, base: Tensor, values: Tensor) -> None:
        self._model, self._layout = model, layout
        self._theta, self._base, self._values = theta, base, values
        self._places = layout.places[len(layout.params) :]
        self._first = self._places[0][1] if self._places else layout.numel
        # Δ of the values that were last sent
        self._sent = torch.zeros(layout.numel - self._first, dtype=torch.float32, device="cpu")
        self._names = {plain_name(name): name for name, _ in model.named_buffers()} if self._places else {}

    def write_theta(self) -> None:
        """Copy the buffers into θ."""
        for spec, start in self._places:
            self._theta[start : start + spec.numel].copy_(self._buffer(spec).reshape(-1))

    def write_values(self, slices: Collection[int], kept: Collection[int], *, speaks: bool) -> None:
        """Remember what this process has gained in these slices. If it `speaks` for the peer, also write the values
        that are to be sent."""
        for index in slices:
            start, stop = self._span(index)
            exact, local = self._loaded(index, kept), self._locals(index)
            loaded = self._as_loaded(index, exact)
            local = torch.where(_is_sound(local), local, loaded)
            self._sent[start - self._first : stop - self._first] = loaded - local
            if speaks:  # values that were only rounded when they were loaded are sent as they were
                self._values[start:stop] = torch.where(local == loaded, exact, local)

    def merge(self, blends: Mapping[int, Blend], kept: Collection[int]) -> None:
        """Load the new θ of these slices. The `Blend` of a slice says what becomes of the local progress in it."""
        for index, blend in blends.items():
            start, stop = self._span(index)
            # they are never mixed: what was trained since the sending stays, and without a base there is nothing since
            nothing = blend is Blend.NONE or (blend is Blend.MIX and index not in kept)
            self._load(index, self._theta[start:stop] if nothing else self._with_progress(index, blend, kept))

    def _with_progress(self, index: int, blend: Blend, kept: Collection[int]) -> Tensor:
        start, stop = self._span(index)
        theta, sent = self._theta[start:stop], self._sent[start - self._first : stop - self._first]
        local = self._locals(index)
        if blend is Blend.SENT:
            progress = -sent
        else:
            progress = local - self._as_loaded(index, self._loaded(index, kept))
            if blend is not Blend.ALL:
                progress = progress + sent
        if self._layout.slices[index].kind == GREATEST:
            return torch.where(progress == 0, theta, torch.maximum(theta, local))
        new = theta + progress
        new = torch.where((new < 0) & (theta >= 0) & (local >= 0), local, new)
        return torch.where(_is_sound(new), new, theta)

    def global_values(self, kept: Collection[int]) -> dict[str, Tensor]:
        """A copy of the global values by name, as the model loaded them last, each in its buffer's dtype and on its
        device."""
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        slices = [place.index for place in self._layout.slices if place.start >= self._first]
        flat = torch.cat([none, *(self._loaded(index, kept) for index in slices)])
        found = {}
        for spec, start in self._places:
            buffer = self._buffer(spec)
            values = flat[start - self._first :][: spec.numel].view(spec.shape)
            found[spec.name] = values.to(device=buffer.device, dtype=buffer.dtype, copy=True)
        return found

    def keep_values(self, theta: Tensor) -> None:
        """Let go of the shared memory. From now on the global values are those in `theta` [layout.numel], and only
        `global_values` may be called."""
        self._theta = self._base = theta
        self._values = torch.empty(0, dtype=torch.float32, device="cpu")

    # -- where the values are

    def _span(self, index: int) -> tuple[int, int]:
        place = self._layout.slices[index]
        return place.start, place.stop

    def _loaded(self, index: int, kept: Collection[int]) -> Tensor:
        """The global values of a slice that the model loaded last."""
        start, stop = self._span(index)
        return (self._base if index in kept else self._theta)[start:stop]

    def _pieces(self, index: int) -> Iterator[tuple[ParamSpec, slice, slice]]:
        """Yield each buffer that lies in a slice: its specification, and its elements there as a range of the buffer
        and as a range of the slice."""
        start, stop = self._span(index)
        for spec, first in self._places:
            a, b = max(start, first), min(stop, first + spec.numel)
            if a < b:
                yield spec, slice(a - first, b - first), slice(a - start, b - start)

    def _locals(self, index: int) -> Tensor:
        """The model's own values in a slice, fp32. The values on one device are copied to the host together."""
        parts = [self._buffer(spec).reshape(-1)[own].to(torch.float32) for spec, own, _ in self._pieces(index)]
        return joined(parts)

    def _as_loaded(self, index: int, values: Tensor) -> Tensor:
        """Global values of a slice, rounded to the dtypes in which the model has loaded them."""
        parts = [values[there].to(self._buffer(spec).dtype).to(torch.float32) for spec, _, there in self._pieces(index)]
        return torch.cat(parts)

    def _load(self, index: int, values: Tensor) -> None:
        on_devices: dict[torch.device, Tensor] = {}
        for spec, own, there in self._pieces(index):
            buffer = self._buffer(spec)
            if buffer.device not in on_devices:
                on_devices[buffer.device] = values.to(buffer.device)
            new = on_devices[buffer.device][there]
            if buffer.is_contiguous():
                buffer.view(-1)[own].copy_(new)
            else:
                dense = buffer.contiguous().view(-1)
                dense[own] = new.to(buffer.dtype)
                buffer.copy_(dense.view(buffer.shape))

    def _buffer(self, spec: ParamSpec) -> Tensor:
        """The buffer as it is now.

        Raises:
            UsageError: it is gone, or has another shape or kind than when the run was entered.
        """
        module, _, name = self._names.get(spec.name, spec.name).rpartition(".")
        found = getattr(self._model.get_submodule(module), name, None)
        if not isinstance(found, Tensor):
            raise _changed(spec, "is gone")
        now = ParamSpec.of(spec.name, found)
        if now.shape != spec.shape or kind_of(now) != kind_of(spec):
            raise _changed(spec, f"is {tuple(now.shape)} of {now.dtype} now")
        return found.detach()


def _changed(spec: ParamSpec, how: str) -> UsageError:
    was = f"was {spec.shape} of {spec.dtype} when the run was entered, and {how}"
    mend = "let a buffer keep its shape, register it with persistent=False, or found the run with buffers=local"
    return UsageError(was, key="buffer", value=spec.name, mend=mend)


def _is_sound(values: Tensor) -> Tensor:
    """For each value whether other peers accept it: finite and not too large."""
    return values.abs() <= MAGNITUDE_MAX  # NaN compares as false


def joined(parts: list[Tensor]) -> Tensor:
    """The flat tensors one after another, in host memory. Neighbours on one device are joined there first."""
    runs: list[list[Tensor]] = []
    for part in parts:
        if runs and runs[-1][0].device == part.device:
            runs[-1].append(part)
        else:
            runs.append([part])
    return torch.cat([torch.cat(run).to("cpu") for run in runs])
