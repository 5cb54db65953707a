"""The layout: each parameter's and buffer's place in the flat vector, the fragments and the slices.

Law: names, shapes and offsets only; no tensor is read or written here. The flat vector lists the trainable parameters
fragment by fragment, then the buffers (`tensors.buffers`) in the same order of fragments. Slices are ranges of it, each
within one fragment and of one kind, cut once, when the run is founded. All peers use the founder's layout, which
travels on the wire.

    kind         elements                                   the global value after a commit
    parameter    trainable parameters                       the outer optimizer's
    mean         floating-point buffers                     the mean of the peers' values
    greatest     integer buffers, such as counters          the greatest of the peers' values
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Literal, TypedDict, cast, get_args

import msgspec
from torch import Tensor, nn

from p2p_diloco.core.schedule import fragment_due, fragment_interval
from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors import partition

FragmentLayout = Literal["contiguous", "strided"]
Kind = Literal["parameter", "mean", "greatest"]
"""What a slice consists of (above)."""
PARAMETER, MEAN, GREATEST = KINDS = cast(tuple[Kind, Kind, Kind], get_args(Kind))

_Name = Annotated[str, msgspec.Meta(max_length=4096)]
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_Kind = Annotated[int, msgspec.Meta(ge=0, lt=len(KINDS))]
_Spec = tuple[_Name, tuple[_Size, ...], _Name]


class _Wire(TypedDict):
    """A layout on the wire (`Layout.to_wire`)."""

    params: tuple[_Spec, ...]
    fragments: tuple[tuple[_Size, ...], ...]
    slices: tuple[tuple[_Size, _Size, _Size, _Kind], ...]
    buffers: tuple[_Spec, ...]
    homes: tuple[_Size, ...]


_COMPILED = "_orig_mod."
"""What torch.compile puts before the names of a module's parameters."""


def plain_name(name: str) -> str:
    """The name that a parameter or buffer of a compiled model has in the model before compilation."""
    return name.replace(_COMPILED, "")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are exchanged, by name, in the model's order.

    A tied parameter comes once, under its first name. Parameters that are frozen or empty are left out. A compiled
    model, or one with compiled parts, has the names of the model before compilation.
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
    """A parameter or a buffer of a layout. `dtype` is torch's name without "torch.", e.g. "bfloat16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> ParamSpec:
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def specs_of(model: nn.Module) -> tuple[ParamSpec, ...]:
    """Return the specs of the parameters in `trainable(model)`, in the same order."""
    return tuple(ParamSpec.of(name, parameter) for name, parameter in trainable(model).items())


def kind_of(buffer: ParamSpec) -> Kind:
    """The kind of the slices to which a buffer belongs."""
    return MEAN if "float" in buffer.dtype else GREATEST


@dataclass(frozen=True, slots=True)
class SliceSpec:
    """A slice of a layout: the range [start, stop) of the flat vector, in elements, within one fragment and of one
    kind."""

    index: int
    fragment: int
    start: int
    stop: int
    kind: Kind = PARAMETER

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat vector of a run. `params`, `buffers`: in the model's order; `fragments`: for each fragment the indices
    of its parameters in `params`, in flat order; `homes`: for each buffer its fragment. In the flat vector the buffers
    of one fragment follow each other: those of the kind "mean", then those of the kind "greatest"."""

    params: tuple[ParamSpec, ...]
    fragments: tuple[tuple[int, ...], ...]
    slices: tuple[SliceSpec, ...]
    buffers: tuple[ParamSpec, ...] = ()
    homes: tuple[int, ...] = ()
    places: tuple[tuple[ParamSpec, int], ...] = field(init=False, repr=False, compare=False)
    """Every parameter and buffer with its first index in the flat vector, in flat order: the parameters come first."""

    def __post_init__(self) -> None:
        """Compute the places. Raises ValueError for an inconsistent layout (a parameter that occurs twice, a gap
        between slices)."""
        order = [index for fragment in self.fragments for index in fragment]
        if sorted(order) != list(range(len(self.params))) or not all(self.fragments):
            raise ValueError(
                "the fragments of a layout must hold each parameter exactly once, and no fragment may be empty"
            )
        if len(self.homes) != len(self.buffers) or not all(0 <= home < len(self.fragments) for home in self.homes):
            raise ValueError("each buffer of a layout must belong to one of its fragments")
        blocks = _blocks(self.params, self.fragments, self.buffers, self.homes)
        flat = [spec for _, _, specs in blocks for spec in specs]
        starts = tuple(accumulate((spec.numel for spec in flat), initial=0))[:-1]
        object.__setattr__(self, "places", tuple(zip(flat, starts, strict=True)))
        self._check_slices(blocks)

    @classmethod
    def build(
        cls,
        specs: Sequence[ParamSpec],
        num_fragments: int = 1,
        fragment_layout: FragmentLayout = "contiguous",
        slice_elements: int | None = None,
        buffers: Sequence[ParamSpec] = (),
    ) -> Layout:
        """Cut `specs` into fragments and slices. Raises `ConfigError` for numbers that don't fit the model.

        slice_elements: the most elements of a slice; None: chosen for each fragment (`partition.spread`). buffers: each
        goes to the fragment of the parameter that is nearest to it in the model (`partition.nearest`), into as few
        slices as possible.
        """
        for key, value in (("num_fragments", num_fragments), ("slice_elements", slice_elements)):
            if value is not None and value < 1:
                raise ConfigError("must be at least 1", key=key, value=value, mend=f"raise {key}")
        names, sizes = [spec.name for spec in specs], [spec.numel for spec in specs]
        match fragment_layout:
            case "contiguous":
                fragments = partition.contiguous(sizes, num_fragments)
            case "strided":
                fragments = partition.strided(names, sizes, num_fragments)
            case _:
                raise ConfigError(
                    "is unknown",
                    key="fragment_layout",
                    value=fragment_layout,
                    mend="use contiguous or strided",
                )
        fragment_of = {index: number for number, members in enumerate(fragments) for index in members}
        nearest = partition.nearest([spec.name for spec in buffers], names)
        homes = tuple(fragment_of[index] for index in nearest)
        slices: list[SliceSpec] = []
        start = 0
        for number, kind, members in _blocks(specs, fragments, buffers, homes):
            stop = start + sum(spec.numel for spec in members)
            if slice_elements is not None:
                count = -(-(stop - start) // slice_elements)
            elif kind == PARAMETER:
                limit = 1 + max(0, partition.SLICES_MAX - num_fragments) * (stop - start) // sum(sizes)
                count = partition.spread(stop - start, limit)
            else:
                count = -(-(stop - start) // partition.SLICE_ELEMENTS_MAX)
            for a, b in partition.slices(start, stop, count):
                slices.append(SliceSpec(len(slices), number, a, b, kind))
            start = stop
        return cls(tuple(specs), fragments, tuple(slices), tuple(buffers), homes)

    @property
    def numel(self) -> int:
        """The number of elements of the flat vector."""
        return self.slices[-1].stop

    def slices_of(self, fragment: int) -> tuple[SliceSpec, ...]:
        """Return the slices of a fragment, in flat order. Those of buffers are the last ones."""
        return tuple(place for place in self.slices if place.fragment == fragment)

    def fingerprint(self) -> str:
        """Return a hash of the names and shapes of parameters and buffers, in the model's order, and of the buffers'
        kinds.

        The dtype and the fragments are left out: a peer may train in another precision, and the run decides on
        fragments.
        """
        buffers = [(spec.name, spec.shape, kind_of(spec)) for spec in self.buffers]
        text = repr([*((spec.name, spec.shape) for spec in self.params), *buffers])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def difference(self, other: Layout) -> list[str]:
        """Return one line for each parameter or buffer that differs between the run and another layout; none if it fits
        the run."""
        ours, theirs = self._shown(), other._shown()
        lines = [
            f"{name}: {shown} in the run, {theirs.get(name, 'missing')} here"
            for name, shown in ours.items()
            if theirs.get(name) != shown
        ]
        lines += [f"{name}: not in the run, {shown} here" for name, shown in theirs.items() if name not in ours]
        for mine, its in zip(ours, theirs, strict=True) if not lines else ():
            if mine != its:
                lines.append(f"{mine}: in the run's order it stands where this model has {its}")
                break
        return lines

    def _shown(self) -> dict[str, str]:
        """The shape of each parameter and buffer, as text, by name. A buffer's text also has its kind."""
        shown = {spec.name: _shape(spec) for spec in self.params}
        return shown | {spec.name: f"{_shape(spec)} (buffer, {kind_of(spec)})" for spec in self.buffers}

    def to_wire(self) -> dict[str, object]:
        """Encode the layout as lists, integers and strings; `from_wire` decodes it."""
        return {
            "params": [[spec.name, list(spec.shape), spec.dtype] for spec in self.params],
            "fragments": [list(fragment) for fragment in self.fragments],
            "slices": [[place.fragment, place.start, place.stop, KINDS.index(place.kind)] for place in self.slices],
            "buffers": [[spec.name, list(spec.shape), spec.dtype] for spec in self.buffers],
            "homes": list(self.homes),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, object]) -> Layout:
        """Decode a layout that `to_wire` encoded. Raises ValueError for anything else."""
        try:
            told = msgspec.convert(wire, _Wire)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a layout: {error}") from error
        params, buffers = (tuple(ParamSpec(*spec) for spec in told[key]) for key in ("params", "buffers"))
        slices = tuple(
            SliceSpec(index, fragment, start, stop, KINDS[kind])
            for index, (fragment, start, stop, kind) in enumerate(told["slices"])
        )
        specs = (*params, *buffers)
        if len({spec.name for spec in specs}) != len(specs) or not all(spec.numel for spec in specs):
            raise ValueError("not a layout: a parameter or buffer is named twice or is empty")
        return cls(params, told["fragments"], slices, buffers, told["homes"])

    def _check_slices(self, blocks: Sequence[tuple[int, Kind, Sequence[ParamSpec]]]) -> None:
        ends = list(accumulate(sum(spec.numel for spec in specs) for _, _, specs in blocks))
        start = block = 0
        for index, place in enumerate(self.slices):
            fits = block < len(blocks) and (place.fragment, place.kind) == blocks[block][:2]
            if not fits or (place.index, place.start) != (index, start) or not start < place.stop <= ends[block]:
                raise ValueError(
                    f"slice {index} of the layout doesn't begin where the slice before it ends, or isn't within one "
                    "fragment and of one kind"
                )
            start = place.stop
            block += start == ends[block]
        if block != len(blocks) or not blocks:
            raise ValueError("the slices of a layout must cover the flat vector")


def _blocks(
    params: Sequence[ParamSpec],
    fragments: Sequence[Sequence[int]],
    buffers: Sequence[ParamSpec],
    homes: Sequence[int],
) -> list[tuple[int, Kind, list[ParamSpec]]]:
    """Return the flat vector's blocks of one fragment and one kind, in flat order: (fragment, kind, what the block
    consists of)."""
    blocks: list[tuple[int, Kind, list[ParamSpec]]] = [
        (number, PARAMETER, [params[index] for index in members]) for number, members in enumerate(fragments)
    ]
    apart: dict[tuple[int, Kind], list[ParamSpec]] = {}
    for spec, home in zip(buffers, homes, strict=True):
        apart.setdefault((home, kind_of(spec)), []).append(spec)
    in_order = sorted(apart, key=lambda block: (block[0], KINDS.index(block[1])))
    return blocks + [(home, kind, apart[home, kind]) for home, kind in in_order]


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
        """Make the plan for `model`. Raises `ConfigError` if `sync_every` (steps) is less than `num_fragments`."""
        self._plan(Layout.build(specs_of(model), num_fragments, layout), sync_every)

    @classmethod
    def of(cls, layout: Layout, sync_every: int) -> FragmentPlan:
        """Return the plan of a run with this layout."""
        plan = cls.__new__(cls)
        plan._plan(layout, sync_every)
        return plan

    def _plan(self, layout: Layout, sync_every: int) -> None:
        count = len(layout.fragments)
        if sync_every < count:
            wrong, mend = f"is less than the number of fragments, {count}", f"use at least {count}"
            raise ConfigError(wrong, key="sync_every", value=sync_every, mend=mend)
        self.sync_every = sync_every
        """Inner steps in which each fragment is sent once."""
        self.interval = fragment_interval(sync_every, count)
        """Inner steps from the sending of one fragment to the sending of the next one; sometimes one more, if
        `sync_every` isn't a multiple of the number of fragments."""
        self.fragments = [[layout.params[index].name for index in members] for members in layout.fragments]
        """The names of the parameters of each fragment."""
        self.fragment_of = {name: number for number, names in enumerate(self.fragments) for name in names}
        """The fragment of each parameter, by name."""

    def due(self, step: int) -> int | None:
        """Return the fragment to send after inner step `step` (the first step is 1); None if no fragment is due
        then."""
        return fragment_due(step, self.sync_every, len(self.fragments))


def _shape(spec: ParamSpec) -> str:
    return "x".join(map(str, spec.shape)) or "scalar"
