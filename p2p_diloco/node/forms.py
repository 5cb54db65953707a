"""Forms: how values are written in a message or a history. A form is the type by which msgspec checks what came, and
two functions that convert a value to plain numbers, text, bytes and lists, and back. `Forms` makes that of a dataclass
from the types of its fields.

Law: pure. Whatever passes the type is converted, or raises `Refusal`. A dataclass is the list of its fields, in order;
at its end, fields with their default values are left out. In a message, a hash is written as bytes; a peer as the 32
bytes of its key, or as text after a zero byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import base58
import msgspec
from msgspec import Meta

from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State
from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.signing import PEER_ID

ITEMS_MAX = 12_000
"""The longest list: a roll has at most so many members."""
TEXT_MAX, NAME_MAX = 1024, 66


NOWHERE = Version(0, 0, 0, "")


@contextmanager
def refusing(kind: type[Any]) -> Iterator[None]:
    """If the block refuses a message of this kind, let the reason name the kind."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(f"the {kind.__name__} is refused: {refusal.reason}") from None


@dataclass(frozen=True, slots=True)
class About:
    """What a header takes as known: the run's `rules`, and the `fragment` and the `base` that the message is about,
    which its contributions have in common."""

    rules: Rules
    fragment: int = 0
    base: Version = NOWHERE


def same(value: Any, about: About) -> Any:
    """The value as it is."""
    return value


Convert = Callable[[Any, About], Any]


@dataclass(frozen=True, slots=True)
class Form:
    type: Any
    write: Convert = same
    read: Convert = same


# -- numbers and text


def whole(most: int, least: int = 0) -> Form:
    """A whole number."""
    return Form(Annotated[int, Meta(ge=least, le=most)])


def number(most: float) -> Form:
    """A number that is not negative. One without a fraction is written as a whole number, which takes fewer bytes."""
    return Form(Annotated[float, Meta(ge=0.0, le=most)], lambda value, _: _shortest(value))


def _shortest(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def octets(*lengths: int) -> Form:
    """Bytes of one of these lengths."""
    kind = Annotated[bytes, Meta(min_length=min(lengths), max_length=max(lengths))]
    return Form(kind, read=lambda value, _: _of_length(value, lengths))


def _of_length(value: bytes, lengths: tuple[int, ...]) -> bytes:
    if len(value) not in lengths:
        raise Refusal(f"a field has {len(value)} bytes, not {' or '.join(map(str, lengths))}")
    return value


def digest(length: int) -> Form:
    """A hash of this many bytes, in a message its hexadecimal digits; it may be empty."""
    raw = octets(0, length)
    return Form(raw.type, lambda value, _: bytes.fromhex(value), lambda value, about: raw.read(value, about).hex())


def digests(length: int) -> Form:
    """Several hashes of this many bytes, one after the other."""

    def read(value: bytes, about: About) -> tuple[str, ...]:
        if len(value) % length:
            raise Refusal(f"a list of hashes has {len(value)} bytes")
        return tuple(value[at : at + length].hex() for at in range(0, len(value), length))

    kind = Annotated[bytes, Meta(max_length=length * ITEMS_MAX)]
    return Form(kind, lambda value, _: bytes.fromhex("".join(value)), read)


# -- peers

_KEY_BYTES, _ID = 32, b"\x00\x24\x08\x01\x12\x20"


@lru_cache(maxsize=16384)
def _spelled(peer: str) -> bytes:
    """Return the key in a peer's id. Another name is written as text after a zero byte, or after two if it would be as
    long as a key."""
    if PEER_ID.fullmatch(peer) is not None:
        decoded = base58.b58decode(peer)
        if decoded.startswith(_ID) and len(decoded) == len(_ID) + _KEY_BYTES:
            return decoded[len(_ID) :]
    spelled = b"\0" + peer.encode()
    return b"\0" + spelled if len(spelled) == _KEY_BYTES else spelled


@lru_cache(maxsize=16384)
def _name_of(spelled: bytes) -> str:
    if len(spelled) == _KEY_BYTES:
        return base58.b58encode(_ID + spelled).decode()
    try:
        return spelled.lstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise Refusal("a name is no text") from None


PEER = Form(
    Annotated[bytes, Meta(max_length=NAME_MAX)],
    lambda peer, _: _spelled(peer),
    lambda spelled, _: _name_of(spelled),
)

# -- lists and dataclasses


class Forms:
    """Makes forms from types. `scalar`: the form of a value that is neither a dataclass nor made of other ones, by its
    type and the name of its field. `own`: the forms of certain types, and of fields by name. `left_out`: fields that
    are not written; read, they have their defaults, or are empty text. `tagged`: the dataclasses whose lists begin with
    their names."""

    def __init__(
        self,
        scalar: Callable[[Any, str], Form],
        own: dict[Any, Form],
        left_out: Collection[str],
        tagged: Collection[type[Any]] = (),
        most: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`most`: the longest list in a field, by its name."""
        self._scalar, self.own, self._left_out, self._tagged, self._most = scalar, own, left_out, tagged, most

    def of(self, hint: Any, name: str = "") -> Form:
        """The form of a type, in a field of this name."""
        if own := self.own.get(name) or self.own.get(hint):
            return own
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            self.own[hint] = self.row(hint, tag=hint.__name__ if hint in self._tagged else None)
            return self.own[hint]
        parts, origin = get_args(hint), get_origin(hint)
        if origin is Annotated:
            return self._scalar(hint, name)
        forms = [self.of(part, name) for part in parts if part not in (NoneType, ...)]
        if origin in (Union, UnionType):
            return maybe(forms[0]) if NoneType in parts else either(dict(zip(parts, forms, strict=True)))
        if origin is Mapping:
            key, item = forms
            return Form(
                dict[key.type, item.type],  # type: ignore[name-defined]
                lambda value, about: {key.write(k, about): item.write(v, about) for k, v in value.items()},
                lambda value, about: {key.read(k, about): item.read(v, about) for k, v in value.items()},
            )
        if origin is not tuple:
            return self._scalar(hint, name)
        return several(forms[0], self._most.get(name, ITEMS_MAX)) if ... in parts else pair(*forms)

    def row(self, kind: type[Any], tag: int | str | None = None, **own: Form) -> Form:
        """The form of a dataclass: the list of its fields, after the `tag` if there is one. `own`: the forms of fields
        that are unlike those of the same name and type elsewhere."""
        hints = get_type_hints(kind, localns={"State": State}, include_extras=True)
        fields = [field for field in dataclasses.fields(kind) if field.name in own or field.name not in self._left_out]
        forms = [own.get(field.name) or self.of(hints[field.name], field.name) for field in fields]
        absent = {
            field.name: ""
            for field in dataclasses.fields(kind)
            if field not in fields and field.default is dataclasses.MISSING
        }
        wire: list[Any] = []
        for field, form in zip(fields, forms, strict=True):
            default = field.default
            if default is not dataclasses.MISSING:
                wire.append((field.name, form.type, msgspec.convert(form.write(default, NO_RUN), form.type)))
            else:
                wire.append((field.name, form.type))
        struct = msgspec.defstruct(
            kind.__name__, wire, array_like=True, frozen=True, forbid_unknown_fields=True, tag=tag, gc=False
        )
        names, defaults = [field.name for field in fields], [field.default for field in fields]
        get: Callable[[Any], tuple[Any, ...]] = (
            attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
        )
        head = [] if tag is None else [tag]
        writes = [None if form.write is same else form.write for form in forms]

        def write(value: Any, about: About) -> list[Any]:
            found = get(value)
            count = len(found)
            while count and found[count - 1] == defaults[count - 1]:
                count -= 1
            pairs = zip(writes, found[:count], strict=False)
            return [*head, *[one if write is None else write(one, about) for write, one in pairs]]

        def read(value: Any, about: About) -> Any:
            found = zip(names, forms, get(value), strict=True)
            return kind(**absent, **{name: form.read(one, about) for name, form, one in found})

        return Form(struct, write, read)


def several(form: Form, most: int = ITEMS_MAX) -> Form:
    """A tuple of values of one form."""
    read, write = form.read, form.write
    return Form(
        Annotated[tuple[form.type, ...], Meta(max_length=most)],  # type: ignore[name-defined]
        same if write is same else lambda values, about: [write(value, about) for value in values],
        same if read is same else lambda values, about: tuple([read(value, about) for value in values]),
    )


def pair(*forms: Form) -> Form:
    """A tuple with one value of each form."""
    if all(form.write is form.read is same for form in forms):
        return Form(tuple[tuple(form.type for form in forms)])  # type: ignore[misc]
    return Form(
        tuple[tuple(form.type for form in forms)],  # type: ignore[misc]
        lambda values, about: [form.write(value, about) for form, value in zip(forms, values, strict=True)],
        lambda values, about: tuple([form.read(value, about) for form, value in zip(forms, values, strict=True)]),
    )


def maybe(form: Form) -> Form:
    """A value of this form, or None."""
    if form.write is form.read is same:
        return Form(form.type | None)
    return Form(
        form.type | None,
        lambda value, about: None if value is None else form.write(value, about),
        lambda value, about: None if value is None else form.read(value, about),
    )


def either(forms: dict[type[Any], Form]) -> Form:
    """One of these dataclasses, whose forms have tags."""
    reads = {form.type: form.read for form in forms.values()}
    return Form(
        Union[tuple(reads)],  # noqa: UP007
        lambda value, about: forms[type(value)].write(value, about),
        lambda value, about: reads[type(value)](value, about),
    )


NO_RUN = About(Rules(run="", fragments=()))
"""What is known of a message that is about no run."""
