"""Forms: how dataclasses are written in a message, a record or a history. A dataclass is the list of its fields, in
order; all else stays as it is. What comes is checked by msgspec, with types that `Forms` makes of the dataclasses.

Law: pure. Any plain value gives a dataclass whose fields have the types and the bounds that its form says, or an error
of msgspec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from p2p_diloco.core.state import State


class Forms:
    """Writes dataclasses, and reads them. `scalar`: the type of a value that is neither a dataclass nor made of other
    ones, by its own type and its field, such as "Version.epoch". `left_out`: fields that are not written; read, they
    have their defaults, or are empty text. `tagged`: the dataclasses whose lists begin with their names. `listed`: the
    type of a list, by the type of its items and its field. `told`: what is written of certain fields instead of their
    values, by name."""

    def __init__(
        self,
        scalar: Callable[[Any, str], Any],
        left_out: Collection[str] = (),
        tagged: Collection[type[Any]] = (),
        listed: Callable[[Any, str], Any] = lambda item, field: tuple[item, ...],  # type: ignore[valid-type]
        told: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    ) -> None:
        self._scalar, self._left_out, self._tagged, self._listed, self._told = scalar, left_out, tagged, listed, told
        self._structs: dict[type[Any], type[msgspec.Struct]] = {}  # by dataclass
        self._writers: dict[type[Any], Callable[[Any], list[Any]]] = {}  # by dataclass
        self._kinds: dict[type[Any], tuple[type[Any], tuple[str, ...], dict[str, str]]] = {}  # by type: the way back

    def of(self, hint: Any, field: str = "") -> Any:
        """The type by which msgspec checks what is to become a value of this type, in this field."""
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self._structs.get(hint) or self._struct(hint)
        parts, origin = get_args(hint), get_origin(hint)
        if origin not in (Union, UnionType, Mapping, tuple):
            return self._scalar(hint, field)
        inner = tuple(self.of(part, field) for part in parts if part is not ...)
        if origin is Mapping:
            return dict[inner]  # type: ignore[misc, valid-type]
        if origin is not tuple:
            return Union[inner]  # noqa: UP007
        return self._listed(inner[0], field) if ... in parts else tuple[inner]  # type: ignore[valid-type]

    def _struct(self, kind: type[Any]) -> type[msgspec.Struct]:
        hints = get_type_hints(kind, localns={"State": State}, include_extras=True)
        fields = {f"{kind.__name__}.{field.name}": field for field in dataclasses.fields(kind)}
        names = {field.name: at for at, field in fields.items() if not {at, field.name} & {*self._left_out}}
        empty = {f.name: "" for f in fields.values() if f.name not in names and f.default is dataclasses.MISSING}
        struct = msgspec.defstruct(
            kind.__name__,
            [(name, self.of(hints[name], field)) for name, field in names.items()],
            array_like=True,
            frozen=True,
            forbid_unknown_fields=True,
            tag=kind.__name__ if kind in self._tagged else None,
            gc=False,
        )
        values: Callable[[Any], tuple[Any, ...]] = (
            attrgetter(*names) if len(names) > 1 else lambda one: tuple(getattr(one, name) for name in names)
        )
        self._structs[kind], self._kinds[struct] = struct, (kind, tuple(names), empty)
        tag = [kind.__name__] if kind in self._tagged else []
        writes = [self._told.get(name, self.write) for name in names]
        self._writers[kind] = lambda one: [*tag, *[write(v) for write, v in zip(writes, values(one), strict=True)]]
        return struct

    def write(self, value: Any) -> Any:
        """The value as numbers, text, bytes, and lists and maps of these. A dataclass must be part of a type that `of`
        has been asked for."""
        if (writer := self._writers.get(type(value))) is not None:
            return writer(value)
        if isinstance(value, tuple | list):
            return [self.write(one) for one in value]
        if isinstance(value, Mapping):
            return {key: self.write(one) for key, one in value.items()}
        return value

    def read(self, value: Any, text: Callable[[str], str] = str) -> Any:
        """Make dataclasses of what msgspec has decoded as one of the types. `text` is called with each text that is not
        in a map."""
        if (found := self._kinds.get(type(value))) is not None:
            kind, names, empty = found
            return kind(**{name: self.read(getattr(value, name), text) for name in names}, **empty)
        if isinstance(value, tuple):
            return tuple([self.read(one, text) for one in value])
        if isinstance(value, dict):
            return {key: self.read(one, text) if type(one) in self._kinds else one for key, one in value.items()}
        return text(value) if isinstance(value, str) else value
