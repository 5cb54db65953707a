"""What records in the DHT have in common: how they are packed and read.

Law: records come from strangers. Any bytes give a value of the requested type or a ValueError.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Measure = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""No loss, speed or time is larger; sums and means of such numbers are finite."""

packed = msgspec.msgpack.Encoder().encode


def read(kind: type[T], value: bytes) -> T:
    """Decode a value of this type from msgpack. Fields that its dataclass doesn't have are passed over. Raises
    ValueError for anything else."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def told(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, by name."""
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: content for field, content in fields if content != field.default}


def heard(kind: type[T], content: dict[str, Any]) -> T:
    """Make a dataclass of its fields by name, as another version of this package may write them: what is no field is
    passed over, and a field that is missing or has another type gets its default. Raises ValueError if it has none."""
    hints, fields = get_type_hints(kind, include_extras=True), {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        try:
            fields[field.name] = msgspec.convert(content[field.name], hints[field.name])
        except (KeyError, msgspec.ValidationError):
            if field.default is dataclasses.MISSING:
                raise ValueError(f"the field {field.name} is missing or invalid") from None
    return kind(**fields)
