"""Converts dataclasses to plain values (lists, numbers, text) and back; a field's type says which values are valid.

Law: any input gives a value of the requested type or an `Unfit`. Only dataclasses can be sent. No pickle. A dataclass
is written as the list of its fields, in order. The last fields may be marked `UNWRITTEN`; such a field is left out if
it is empty. Only the outermost dataclass of a record (`Record`) is written as a map of its fields by name, so that
versions of this package with other fields can read it too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

Reader = Callable[[object], Any]
"""A function that converts a plain value to one of its type, or raises `Unfit`."""

T = TypeVar("T")

_INT_MAX = 2**63 - 1
_TEXT_MAX, _BYTES_MAX = 1024, 2**20
_ITEMS_MAX = 1 << 20


class Unfit(Exception):
    """Raised when a value doesn't have the required type. Its text ends a sentence that begins with "a field is"; if
    raised by `Record.read`, its text is a reason by itself."""


# -- to plain values

_NAMES: dict[type[Any], tuple[str, ...]] = {}
"""The cache of `names`."""
_UNWRITTEN: dict[type[Any], frozenset[str]] = {}
"""The cache of `_unwritten`."""


def names(kind: type[Any]) -> tuple[str, ...]:
    """The names of a dataclass's fields, in order, without `payload`. Raises TypeError for any other type."""
    if kind not in _NAMES:
        if not dataclasses.is_dataclass(kind):
            raise TypeError(f"a {kind.__name__} can't be written as plain values: it is no dataclass")
        _NAMES[kind] = tuple(f.name for f in dataclasses.fields(kind) if f.name != "payload")
    return _NAMES[kind]


def _unwritten(kind: type[Any]) -> frozenset[str]:
    """The fields that a dataclass's plain values leave out while they are empty. They must be its last fields."""
    if kind not in _UNWRITTEN:
        _UNWRITTEN[kind] = frozenset(f.name for f in dataclasses.fields(kind) if f.metadata.get("unwritten"))
    return _UNWRITTEN[kind]


def to_plain(value: object) -> Any:
    """Convert a value to lists, numbers and text. A mapping becomes a list of its pairs, sorted by key, so that equal
    mappings have equal bytes."""
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return [[key, to_plain(item)] for key, item in sorted(value.items())]
    if dataclasses.is_dataclass(value):
        written = names(type(value))
        while written and written[-1] in _unwritten(type(value)) and not getattr(value, written[-1]):
            written = written[:-1]
        return [to_plain(getattr(value, name)) for name in written]
    return value


# -- from plain values


def reader(hint: Any, scalars: Mapping[Any, Reader] | None = None) -> Reader:
    """Make the function that reads plain values of the type `hint`. `scalars` holds the functions that read numbers and
    text, by default `SCALARS`."""
    scalars = SCALARS if scalars is None else scalars
    if hint in scalars:
        return scalars[hint]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass_reader(hint, scalars)
    match get_origin(hint), get_args(hint):
        case (origin, (kind, other)) if origin in (Union, UnionType) and other is NoneType:
            read = reader(kind, scalars)
            return lambda value: None if value is None else read(value)
        case (origin, (item, last)) if origin is tuple and last is Ellipsis:
            return _list_reader(reader(item, scalars))
        case (origin, items) if origin is tuple:
            return _row_reader([reader(item, scalars) for item in items])
        case (origin, (key, item)) if origin is Mapping:
            return _mapping_reader(_list_reader(_row_reader([reader(key, scalars), reader(item, scalars)])))
    raise TypeError(f"a {hint} can't be read from plain values")


def from_plain(kind: type[T], value: object) -> T:
    """Convert a plain value, made by `to_plain`, back to the type `kind`. Raises ValueError for any other value."""
    try:
        found: T = _reader_of(kind)(value)  # type: ignore[arg-type]
    except Unfit as error:
        raise ValueError(f"no {kind.__name__}: a field is {error}") from None
    return found


@lru_cache
def _reader_of(kind: type[Any]) -> Reader:
    return reader(kind)


class Record(Generic[T]):
    """Converts a dataclass to a map of its fields by name, and back. When a map is read, names that are no fields are
    ignored, and a field that is missing or has another type gets its default."""

    def __init__(self, kind: type[T], scalars: Mapping[Any, Reader] | None = None) -> None:
        hints = get_type_hints(kind)
        self._kind = kind
        self._readers = {name: reader(hints[name], scalars) for name in names(kind)}
        fields = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        self._defaults = {name: default for name, default in fields.items() if default is not dataclasses.MISSING}

    def write(self, value: T) -> dict[str, Any]:
        """Encode a value as a map of those fields whose values differ from their defaults."""
        fields = {name: getattr(value, name) for name in self._readers}
        return {
            name: field if isinstance(field, Mapping) else to_plain(field)  # a field that is a map stays a map
            for name, field in fields.items()
            if name not in self._defaults or field != self._defaults[name]
        }

    def read(self, value: object) -> T:
        """Read a map that `write` made, in this version of the package or in another.

        Raises:
            Unfit: the value is no map, or a field without a default is missing or has another type.
        """
        if not isinstance(value, dict):
            raise Unfit("not a map")
        fields = {}
        for name, read in self._readers.items():
            try:
                fields[name] = read(value[name])
            except (KeyError, Unfit):
                if name not in self._defaults:
                    raise Unfit(f"the field {name} is missing or invalid") from None
        return self._kind(**fields)


def _dataclass_reader(kind: type[Any], scalars: Mapping[Any, Reader]) -> Reader:
    hints = get_type_hints(kind)
    row = _row_reader([reader(hints[name], scalars) for name in names(kind)], len(_unwritten(kind)))
    everything = [f.name for f in dataclasses.fields(kind)]
    at = everything.index("payload") if "payload" in everything else None

    def read(value: object) -> Any:
        fields = row(value)
        try:
            return kind(*fields) if at is None else kind(*fields[:at], None, *fields[at:])
        except ValueError as error:
            raise Unfit(str(error)) from None

    return read


def _row_reader(readers: list[Reader], unwritten: int = 0) -> Reader:
    """Make the function that reads a list with one item for each reader. The last `unwritten` items may be missing."""
    least = len(readers) - unwritten

    def read(value: object) -> tuple[Any, ...]:
        if type(value) is not list or not least <= len(value) <= len(readers):
            raise Unfit(f"no list of {least} values")
        return tuple([read(item) for read, item in zip(readers, value, strict=False)])

    return read


def _list_reader(read_item: Reader) -> Reader:
    def read(value: object) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > _ITEMS_MAX:
            raise Unfit("no list, or too long")
        return tuple(map(read_item, value))

    return read


def _mapping_reader(read_pairs: Reader) -> Reader:
    def read(value: object) -> dict[Any, Any]:
        pairs = read_pairs(value)
        if len(mapping := dict(pairs)) != len(pairs):
            raise Unfit("a mapping with a key that comes twice")
        return mapping

    return read


def read_int(value: object) -> int:
    """Check that a value is a whole number of at least -1, and return it. (-1 is the generation of a peer that holds no
    state.)"""
    if type(value) is not int or not -1 <= value <= _INT_MAX:
        raise Unfit("no whole number, or out of range")
    return value


def read_float(value: object) -> float:
    """Check that a value is a finite number, and return it as a float."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise Unfit("no finite number")
    return float(value)


def read_text(value: object) -> str:
    """Check that a value is text of bounded length, and return it."""
    if type(value) is not str or len(value) > _TEXT_MAX:
        raise Unfit("no text, or too long")
    return value


def read_bool(value: object) -> bool:
    """Check that a value is True or False, not a number, and return it."""
    if type(value) is not bool:
        raise Unfit("neither true nor false")
    return value


def read_bytes(value: object) -> bytes:
    """Check that a value is bytes of bounded length, and return it."""
    if type(value) is not bytes or len(value) > _BYTES_MAX:
        raise Unfit("no bytes, or too long")
    return value


SCALARS: dict[Any, Reader] = {
    int: read_int,
    float: read_float,
    str: read_text,
    bool: read_bool,
    bytes: read_bytes,
}
