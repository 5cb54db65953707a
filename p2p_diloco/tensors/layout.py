"""The layout: each parameter's place in the flat vector, the fragments and the shards.

Law: names, shapes and offsets only; no tensor is read or written here. The flat vector lists the trainable parameters
fragment by fragment, so that a fragment is one contiguous range. Shards are slices of a fragment, cut once, when the
run is founded. All peers use the founder's layout, which travels on the wire.

Only trainable parameters are exchanged. Buffers (running statistics, counters, masks) describe a peer's own data, many
are integers, and their mean is no gradient. Each peer keeps its own; a BatchNorm's statistics follow the global
parameters within some steps. The global parameters are evaluated with local buffers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

from torch import nn

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors import partition

T = TypeVar("T")

FragmentLayout = Literal["contiguous", "strided"]

_LONGEST_NAME = 4096
"""The most characters of a parameter's name in a layout from the wire."""


_COMPILED = "_orig_mod."
"""What torch.compile puts before the names of a module's parameters."""


def plain_name(name: str) -> str:
    """The name that a parameter or buffer of a compiled model has in the model before compilation."""
    return name.replace(_COMPILED, "")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are exchanged, by name, in the model's order.

    A tied parameter comes once, under its first name. Buffers and parameters that are frozen or empty are left out. A
    compiled model, or one with compiled parts, has the names of the model before compilation.
    Raises `ConfigError` if no parameter is left.
    """
    found = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not found:
        raise ConfigError(
            "has no trainable parameter",
            key="model",
            value=type(model).__name__,
            mend="set requires_grad on the parameters to train, before the peer is made",
        )
    return found


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter of a layout. `dtype` is torch's name without "torch.", e.g. "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def specs_of(model: nn.Module) -> tuple[ParamSpec, ...]:
    """Return the specs of the parameters in `trainable(model)`, in the same order."""
    return tuple(
        ParamSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in trainable(model).items()
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice [start, stop) of the flat vector, in elements, within one fragment."""

    index: int
    fragment: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat vector of a run. `params`: in the model's order; `fragments`: for each fragment the indices of its
    parameters in `params`, in flat order."""

    params: tuple[ParamSpec, ...]
    fragments: tuple[tuple[int, ...], ...]
    shards: tuple[Shard, ...]
    _offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _ranges: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the parameters' offsets. Raises ValueError for an inconsistent layout (a parameter that occurs twice,
        a gap between shards)."""
        order = [index for fragment in self.fragments for index in fragment]
        if sorted(order) != list(range(len(self.params))) or not all(self.fragments):
            raise ValueError(
                "the fragments of a layout must hold each parameter exactly once, and no fragment may be empty"
            )
        ends = list(accumulate((self.params[index].numel for index in order), initial=0))
        offsets = dict(zip(order, ends, strict=False))
        object.__setattr__(self, "_offsets", tuple(offsets[index] for index in range(len(self.params))))
        cuts = list(accumulate((len(fragment) for fragment in self.fragments), initial=0))
        ranges = tuple((ends[a], ends[b]) for a, b in pairwise(cuts))
        object.__setattr__(self, "_ranges", ranges)
        self._check_shards()

    @classmethod
    def build(
        cls,
        specs: Sequence[ParamSpec],
        num_fragments: int = 1,
        fragment_layout: FragmentLayout = "contiguous",
        shard_elements: int | None = None,
    ) -> Layout:
        """Cut `specs` into fragments and shards. Raises `ConfigError` for numbers that don't fit the model.

        shard_elements: the most elements of a shard; None: chosen for each fragment (`partition.spread`).
        """
        for key, value in (("num_fragments", num_fragments), ("shard_elements", shard_elements)):
            if value is not None and value < 1:
                raise ConfigError("must be at least 1", key=key, value=value, mend=f"raise {key}")
        sizes = [spec.numel for spec in specs]
        match fragment_layout:
            case "contiguous":
                fragments = partition.contiguous(sizes, num_fragments)
            case "strided":
                fragments = partition.strided([spec.name for spec in specs], sizes, num_fragments)
            case _:
                raise ConfigError(
                    "is unknown",
                    key="fragment_layout",
                    value=fragment_layout,
                    mend="use contiguous or strided",
                )
        shards: list[Shard] = []
        start = 0
        for number, fragment in enumerate(fragments):
            stop = start + sum(sizes[index] for index in fragment)
            if shard_elements is None:
                limit = 1 + max(0, partition.SHARDS_MAX - num_fragments) * (stop - start) // sum(sizes)
                count = partition.spread(stop - start, limit)
            else:
                count = -(-(stop - start) // shard_elements)
            for a, b in partition.slices(start, stop, count):
                shards.append(Shard(len(shards), number, a, b))
            start = stop
        return cls(tuple(specs), fragments, tuple(shards))

    @property
    def numel(self) -> int:
        """The number of elements of the flat vector."""
        return self._ranges[-1][1]

    def offset(self, param_index: int) -> int:
        """Return the parameter's first index in the flat vector."""
        return self._offsets[param_index]

    def shards_of(self, fragment: int) -> tuple[Shard, ...]:
        """Return the shards of a fragment, in flat order."""
        return tuple(shard for shard in self.shards if shard.fragment == fragment)

    def arrange(self, named: Mapping[str, T]) -> list[T]:
        """Return the values of `named`, whose keys are the parameters' names, in flat order."""
        return [named[self.params[index].name] for fragment in self.fragments for index in fragment]

    def fingerprint(self) -> str:
        """Return a hash of the parameters' names and shapes, in the model's order.

        The dtype and the fragments are left out: a peer may train in another precision, and the run decides on
        fragments.
        """
        text = repr([(spec.name, spec.shape) for spec in self.params])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def difference(self, other: Sequence[ParamSpec]) -> list[str]:
        """Return one line for each parameter that differs between the run and a model (`other`); none if the model fits
        the run."""
        ours = {spec.name: spec for spec in self.params}
        theirs = {spec.name: spec for spec in other}
        lines = [
            f"{name}: {_shape(spec)} in the run, {_shape(theirs[name]) if name in theirs else 'missing'} here"
            for name, spec in ours.items()
            if name not in theirs or theirs[name].shape != spec.shape
        ]
        lines += [f"{name}: not in the run, {_shape(spec)} here" for name, spec in theirs.items() if name not in ours]
        if not lines:
            for mine, its in zip(self.params, other, strict=True):
                if mine.name != its.name:
                    lines.append(f"{mine.name}: in the run's order it stands where this model has {its.name}")
                    break
        return lines

    def to_wire(self) -> dict[str, object]:
        """Encode the layout as lists, integers and strings; `from_wire` decodes it."""
        return {
            "params": [[spec.name, list(spec.shape), spec.dtype] for spec in self.params],
            "fragments": [list(fragment) for fragment in self.fragments],
            "shards": [[shard.fragment, shard.start, shard.stop] for shard in self.shards],
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, object]) -> Layout:
        """Decode a layout that `to_wire` encoded. Raises ValueError for anything else."""
        try:
            params = tuple(
                ParamSpec(_text(name), tuple(_size(n) for n in _items(shape)), _text(dtype))
                for name, shape, dtype in map(_items, _items(wire["params"]))
            )
            fragments = tuple(tuple(_size(i) for i in _items(members)) for members in _items(wire["fragments"]))
            shards = tuple(
                Shard(index, *(_size(n) for n in _items(shard))) for index, shard in enumerate(_items(wire["shards"]))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a layout: {error}") from error
        if len({spec.name for spec in params}) != len(params) or not all(spec.numel for spec in params):
            raise ValueError("not a layout: a parameter is named twice or is empty")
        return cls(params, fragments, shards)

    def _check_shards(self) -> None:
        expected = 0
        for index, shard in enumerate(self.shards):
            start, stop = self._ranges[shard.fragment] if shard.fragment < len(self._ranges) else (0, 0)
            if shard.index != index or shard.start != expected or not start <= shard.start < shard.stop <= stop:
                raise ValueError(
                    f"shard {index} of the layout doesn't begin where the shard before it ends, or exceeds its fragment"
                )
            expected = shard.stop
        if not self.shards or expected != self.numel:
            raise ValueError("the shards of a layout must cover the flat vector")


class FragmentPlan:
    """The plan of fragments: which parameters are sent together, and at which inner step. The plan of a run is
    `peer.plan`."""

    def __init__(
        self,
        model: nn.Module,
        num_fragments: int = 1,
        sync_every: int = 500,
        layout: FragmentLayout = "contiguous",
    ) -> None:
        """Make the plan for `model`. Raises `ConfigError` unless `sync_every` (steps) is a multiple of
        `num_fragments`."""
        self._plan(Layout.build(specs_of(model), num_fragments, layout), sync_every)

    @classmethod
    def of(cls, layout: Layout, sync_every: int) -> FragmentPlan:
        """Return the plan of a run with this layout."""
        plan = cls.__new__(cls)
        plan._plan(layout, sync_every)
        return plan

    def _plan(self, layout: Layout, sync_every: int) -> None:
        count = len(layout.fragments)
        if sync_every < 1 or sync_every % count:
            below = sync_every // count * count
            near = " or ".join(str(n) for n in (below, below + count) if n > 0)
            raise ConfigError(
                f"must be a multiple of num_fragments={count}",
                key="sync_every",
                value=sync_every,
                mend=f"use {near}",
            )
        self.interval = sync_every // count
        """Inner steps from the sending of one fragment to the sending of the next one."""
        self.fragments = [[layout.params[index].name for index in members] for members in layout.fragments]
        """The names of the parameters of each fragment."""
        self.fragment_of = {name: number for number, names in enumerate(self.fragments) for name in names}
        """The fragment of each parameter, by name."""

    def due(self, step: int) -> int | None:
        """Return the fragment to send after inner step `step` (the first step is 1); None if no fragment is due
        then."""
        if step < 1 or step % self.interval:
            return None
        return (step // self.interval - 1) % len(self.fragments)


def _shape(spec: ParamSpec) -> str:
    return "x".join(map(str, spec.shape)) or "scalar"


def _items(value: object) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise TypeError(f"expected a name of at most {_LONGEST_NAME} characters")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 48:
        raise TypeError(f"expected a size or an index, found {value!r:.40}")
    return value
