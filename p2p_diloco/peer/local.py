"""The model's parameters beside the global ones: loading, carrying progress over, pseudo-gradients.

Law: plain arithmetic on this process's memory, in fp32; only the thread that trains may call it. θ is read,
never written, and only while the node lets it be read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from p2p_diloco.core.events import Carry
from p2p_diloco.tensors.flat import gather, pseudo_gradient, scatter
from p2p_diloco.tensors.layout import Layout, trainable
from p2p_diloco.tensors.mean import MAGNITUDE_MAX


class LocalModel:
    """A model's trainable parameters, in the flat order of a layout.

    `theta`, `delta`: [layout.numel] fp32; the global parameters, and the pseudo-gradients that were last
    sent.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, theta: Tensor, delta: Tensor, merge_alpha: float = 0.0
    ) -> None:
        self._layout, self._theta, self._delta, self._alpha = layout, theta, delta, merge_alpha
        self._named: dict[str, nn.Parameter] = trainable(model)
        self._params = layout.arrange(self._named)
        self._starts = [layout.offset(index) for fragment in layout.fragments for index in fragment]
        self._base = torch.zeros(layout.numel)

    def write_theta(self) -> None:
        """Offer the model's parameters as the global ones, before the run begins; nothing is trained yet."""
        gather(self._params, self._theta)
        self._base.copy_(self._theta)

    def merge(self, loads: Mapping[int, Carry], mixed: Collection[int] = ()) -> None:
        """Load shards of θ, and carry over what was trained on top of the old ones, as each one's `Carry`
        says; into those that are `mixed`, a share `merge_alpha` of the local values (Streaming DiLoCo, arXiv
        2501.18512).
        """
        for param, start, pieces in self._touched(loads):
            afresh = all(loads[shard] is Carry.DROP and shard not in mixed for shard, _, _ in pieces)
            if afresh and self._whole(param, pieces):
                self._load(param, start)
                continue
            local = torch.empty(param.numel())
            gather([param], local)
            for shard, a, b in pieces:
                values = local[a - start : b - start]
                if shard in mixed:
                    torch.lerp(self._theta[a:b], values, self._alpha, out=values)
                else:
                    self._carry(values, slice(a, b), loads[shard])
            scatter(local, [param])
            for _, a, b in pieces:
                self._base[a:b] = self._theta[a:b].to(param.dtype)  # as it was loaded

    def _load(self, param: nn.Parameter, start: int) -> None:
        """The global values of a whole parameter, and nothing of the local ones."""
        place = slice(start, start + param.numel())
        scatter(self._theta[place], [param])
        if param.dtype == torch.float32:
            self._base[place] = self._theta[place]
        else:
            gather([param], self._base[place])  # as it was loaded

    def _whole(self, param: nn.Parameter, pieces: list[tuple[int, int, int]]) -> bool:
        return sum(b - a for _, a, b in pieces) == param.numel()

    def _carry(self, local: Tensor, place: slice, carry: Carry) -> None:
        """New, and what the carry keeps of the old; for one slice of a parameter."""
        if carry is Carry.DROP:
            local.copy_(self._theta[place])
            return
        local.sub_(self._base[place])  # what was trained
        match carry:
            case Carry.SUBTRACT:
                local.add_(self._delta[place])
            case Carry.RESTORE:
                local.sub_(self._delta[place])
        local.add_(self._theta[place])

    def _touched(self, shards: Collection[int]) -> Iterator[tuple[nn.Parameter, int, list[tuple[int, int, int]]]]:
        """Each parameter that has elements in these shards, where it begins, and the pieces (shard, start,
        stop).
        """
        pieces: dict[int, list[tuple[int, int, int]]] = {}
        for index in sorted(shards):
            shard = self._layout.shards[index]
            position = bisect_left(self._starts, shard.start + 1) - 1
            while position < len(self._params) and self._starts[position] < shard.stop:
                start = self._starts[position]
                a, b = max(start, shard.start), min(start + self._params[position].numel(), shard.stop)
                pieces.setdefault(position, []).append((index, a, b))
                position += 1
        for position, found in pieces.items():
            yield self._params[position], self._starts[position], found

    def write_delta(self, shards: Collection[int]) -> None:
        """Write these shards' pseudo-gradients, base − local, where the node reads them."""
        for param, start, pieces in self._touched(shards):
            stop = start + param.numel()
            whole = self._whole(param, pieces)
            out = self._delta[start:stop] if whole else torch.empty(param.numel())
            pseudo_gradient(self._base[start:stop], [param], out)
            for _, a, b in () if whole else pieces:
                self._delta[a:b] = out[a - start : b - start]

    def may_be_sent(self, shards: Collection[int]) -> bool:
        """Whether these shards' pseudo-gradients, as last written, are finite and within `MAGNITUDE_MAX`."""
        for shard in (self._layout.shards[index] for index in shards):
            low, high = torch.aminmax(self._delta[shard.start : shard.stop])
            if not (low.item() >= -MAGNITUDE_MAX and high.item() <= MAGNITUDE_MAX):  # NaN compares as false
                return False
        return True

    def forget_deltas(self) -> None:
        """Take no contribution that was sent for a part of the local values any more."""
        self._delta.zero_()

    def global_values(self) -> dict[str, Tensor]:
        """A copy of the global parameters by name, each in its parameter's shape, dtype and place."""
        return {
            name: self._theta[start : start + p.numel()].view(p.shape).to(device=p.device, dtype=p.dtype, copy=True)
            for (name, p), start in zip(self._in_order(), self._starts, strict=True)
        }

    def _in_order(self) -> Iterator[tuple[str, nn.Parameter]]:
        names = self._layout.arrange({name: name for name in self._named})
        return zip(names, self._params, strict=True)


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
