"""Forms: how values are written in a header. A form is the type by which msgspec checks what came, and two functions
that convert a value to plain numbers, text, bytes and lists, and back.

Law: pure. Whatever passes the type is converted, or raises `Unfit`. A dataclass is the list of its fields, in order; at
its end, fields with their default values are left out. A hash is written as bytes; a peer as None if it is the sender,
as its place in a roll if the roll has it, as the 32 bytes of its key, or as text
after a zero byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, Any

import base58
import msgspec
from msgspec import Meta

from p2p_diloco.core.plan import Member
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import Version
from p2p_diloco.net.signing import PEER_ID

ITEMS_MAX = 12_000
"""The longest list: a roll has at most so many members."""
TEXT_MAX, NAME_MAX = 1024, 66


NOWHERE = Version(0, 0, 0, "")


class Unfit(Exception):
    """Raised when a value of the right type can't be meant. Its text is the reason."""


class Unplaced(Unfit):
    """Raised when a value can't be read because the roll lacks a member."""


class Roll:
    """The members of one version, who are named by their places in it. An empty one has no places, so everybody is
    spelled out."""

    def __init__(self, members: Mapping[str, Member] = MappingProxyType({})) -> None:
        self.members = members

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The members, sorted."""
        return tuple(sorted(self.members))

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each peer."""
        return {name: place for place, name in enumerate(self.names)}


NOBODY = Roll()


@dataclass(frozen=True, slots=True)
class About:
    """What a header takes as known. `peer`: its sender. `roll`: of the version that the message is about, which has the
    `base` of all contributions to this `fragment`. `rules`: of the run."""

    peer: str
    rules: Rules
    roll: Roll = NOBODY
    fragment: int = 0
    base: Version = NOWHERE


@dataclass(frozen=True, slots=True)
class Form:
    type: Any
    write: Callable[[Any, About], Any]
    read: Callable[[Any, About], Any]


def same(value: Any, about: About) -> Any:
    """The value as it is."""
    return value


# -- numbers and text


def whole(most: int = 2**40, least: int = 0) -> Form:
    """A whole number."""
    return Form(Annotated[int, Meta(ge=least, le=most)], same, same)


def number(most: float, least: float = 0.0) -> Form:
    """A finite number. One without a fraction is written as a whole number, which takes fewer bytes."""
    return Form(Annotated[float, Meta(ge=least, le=most)], lambda value, _: _shortest(value), same)


def _shortest(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def text(most: int = TEXT_MAX) -> Form:
    """Text of at most so many characters."""
    return Form(Annotated[str, Meta(max_length=most)], same, same)


def octets(*lengths: int) -> Form:
    """Bytes of one of these lengths."""
    if len(lengths) == 1:
        return Form(Annotated[bytes, Meta(min_length=lengths[0], max_length=lengths[0])], same, same)
    return Form(Annotated[bytes, Meta(max_length=max(lengths))], same, lambda value, _: _of_length(value, lengths))


def _of_length(value: bytes, lengths: tuple[int, ...]) -> bytes:
    if len(value) not in lengths:
        raise Unfit(f"a field has {len(value)} bytes, not {' or '.join(map(str, lengths))}")
    return value


def octets_to(most: int) -> Form:
    """At most so many bytes."""
    return Form(Annotated[bytes, Meta(max_length=most)], same, same)


def digest(length: int, *, may_lack: bool = False) -> Form:
    """A hash of this many bytes, in a message its hexadecimal digits."""
    raw = octets(0, length) if may_lack else octets(length)
    return Form(raw.type, lambda value, _: bytes.fromhex(value), lambda value, about: raw.read(value, about).hex())


def digests(length: int) -> Form:
    """Several hashes of this many bytes, one after the other."""

    def read(value: bytes, about: About) -> tuple[str, ...]:
        if len(value) % length:
            raise Unfit(f"a list of hashes has {len(value)} bytes")
        return tuple(value[at : at + length].hex() for at in range(0, len(value), length))

    kind = Annotated[bytes, Meta(max_length=length * ITEMS_MAX)]
    return Form(kind, lambda value, _: bytes.fromhex("".join(value)), read)


FLAG = Form(bool, same, same)

# -- peers

_KEY_BYTES, _ID = 32, b"\x00\x24\x08\x01\x12\x20"


def _write_peer(peer: str, about: About) -> Any:
    return None if peer == about.peer else _write_named(peer, about)


def _write_named(peer: str | None, about: About) -> Any:
    if peer is None:
        return None
    place = about.roll.places.get(peer)
    return _spelled(peer) if place is None else place


def _read_peer(value: Any, about: About) -> str:
    return about.peer if value is None else str(_read_named(value, about))


def _read_named(value: Any, about: About) -> str | None:
    if value is None:
        return None
    if isinstance(value, int):
        if value >= len(about.roll.names):
            raise Unplaced(f"it names the member {value} of a roll of {len(about.roll.names)}")
        return about.roll.names[value]
    return _name_of(value)


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
        raise Unfit("a name is no text") from None


_Peer = Annotated[int, Meta(ge=0, lt=ITEMS_MAX)] | Annotated[bytes, Meta(max_length=NAME_MAX)] | None
PEER = Form(_Peer, _write_peer, _read_peer)
NAMED = Form(_Peer, _write_named, _read_named)
"""As PEER, but None is None."""

# -- lists and dataclasses


def several(form: Form, most: int = ITEMS_MAX) -> Form:
    """A tuple of values of one form."""
    read, write = form.read, form.write
    return Form(
        Annotated[tuple[form.type, ...], Meta(max_length=most)],  # type: ignore[name-defined]
        lambda values, about: [write(value, about) for value in values],
        lambda values, about: tuple([read(value, about) for value in values]),
    )


def pair(*forms: Form) -> Form:
    """A tuple with one value of each form."""
    return Form(
        tuple[tuple(form.type for form in forms)],  # type: ignore[misc]
        lambda values, about: [form.write(value, about) for form, value in zip(forms, values, strict=True)],
        lambda values, about: tuple([form.read(value, about) for form, value in zip(forms, values, strict=True)]),
    )


def maybe(form: Form) -> Form:
    """A value of this form, or None."""
    return Form(
        form.type | None,
        lambda value, about: None if value is None else form.write(value, about),
        lambda value, about: None if value is None else form.read(value, about),
    )


def row(kind: type[Any], forms: dict[str, Form], tag: int | None = None) -> Form:
    """A dataclass: the list of its fields that have a form, after the `tag` if there is one. The others have their
    defaults when the list is read, or are empty text."""
    fields = [field for field in dataclasses.fields(kind) if field.name in forms]
    assert forms.keys() == {field.name for field in fields}, f"a {kind.__name__} has no such field"
    absent = {
        field.name: ""
        for field in dataclasses.fields(kind)
        if field.name not in forms and field.default is dataclasses.MISSING
    }
    nobody = About("", Rules(run="", fragments=()))
    wire: list[Any] = []
    names = [field.name for field in fields]
    for field in fields:
        form = forms[field.name]
        if field.default is dataclasses.MISSING:
            wire.append((field.name, form.type))
        else:
            default = msgspec.convert(form.write(field.default, nobody), form.type)
            wire.append((field.name, form.type, default))
    struct = msgspec.defstruct(
        kind.__name__, wire, array_like=True, frozen=True, forbid_unknown_fields=True, tag=tag, gc=False
    )
    get = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),) if names else ()
    used = [forms[name] for name in names]
    defaults = [field.default for field in fields]

    def write(value: Any, about: About) -> list[Any]:
        found = get(value)
        count = len(found)
        while count and found[count - 1] == defaults[count - 1]:
            count -= 1
        head = [] if tag is None else [tag]
        return [*head, *[form.write(one, about) for form, one in zip(used, found[:count], strict=False)]]

    def read(value: Any, about: About) -> Any:
        found = get(value)
        return kind(
            **absent, **{name: form.read(one, about) for name, form, one in zip(names, used, found, strict=True)}
        )

    return Form(struct, write, read)
