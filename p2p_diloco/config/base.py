"""The base class of all settings: it reads values from text, and turns pydantic's errors into one sentence.

Law: only pydantic and the standard library are imported; no file, clock, environment or network is touched.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticKnownError
from typing_extensions import Self

from p2p_diloco.addresses import split_addresses
from p2p_diloco.errors import ConfigError, shown

Seconds = Annotated[float, Field(gt=0)]

WRONG = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "is not known",
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "int_type": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "bool_parsing": "is neither on nor off",
    "bool_type": "is neither on nor off",
    "string_pattern_mismatch": "is not a name that can be used",
}
"""What is wrong, in words, for each of pydantic's error types. Limits such as {ge} are filled in."""
MENDS = {
    "literal_error": "choose {expected}",
    "bool_parsing": "choose true or false",
    "bool_type": "choose true or false",
    "string_pattern_mismatch": "use up to 64 letters, digits, dots, dashes and underscores, starting with a letter or "
    "digit",
}
"""The mend for some of pydantic's error types; `_explained` chooses the mend for all others."""


class Settings(BaseModel):
    """A group of settings, which can't be changed once made. Unknown settings are refused, and each error is one
    sentence. The text below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Convert a text from a flag, a variable or a file to the type of the field. A text may stand for None, a list,
        a table or a path. Addresses may be objects of the multiaddr package."""
        annotation = cls.model_fields[cast(str, info.field_name)].annotation
        if isinstance(value, (str, Path)) and _has_bytes(str(value)):
            key, mend = cast(str, info.field_name), "use a name in UTF-8, and a locale that has it (LC_ALL=C.UTF-8)"
            raise ConfigError("is no UTF-8 text in this locale", key=key, value=ascii(str(value)), mend=mend)
        if not isinstance(value, str):
            return _plain(value, bare_type(annotation))
        if is_optional(annotation) and value.strip().lower() in ("", "none", "unset"):
            return None
        match bare_type(annotation):
            case t if t is tuple:
                return split_addresses(value)
            case t if t is dict:
                return _table(cast(str, info.field_name), value)
            case t if t is Path:
                return Path(value.strip()).expanduser()
            case _:
                return value.strip()

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_sentence(cls, values: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return read(values)
        except ValidationError as error:
            raise _explained(cls, error.errors()[0]) from None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were set explicitly, with their values. The fields left out have their defaults."""
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}

    def _refuse(self, key: str, wrong: str, mend: str) -> NoReturn:
        """Raise ConfigError, because the value of the field `key` can't be used."""
        raise ConfigError(wrong, key=key, value=getattr(self, key), mend=mend)


def is_optional(annotation: object) -> bool:
    """Whether a field may be unset, which means that its type allows None."""
    return type(None) in get_args(annotation)


def bare_type(annotation: object) -> object:
    """The type of a field without its limits and without None: tuple, dict, bool, int, float, str, Path or Literal."""
    if get_origin(annotation) in (Union, types.UnionType):
        return bare_type(next(arg for arg in get_args(annotation) if arg is not type(None)))
    if get_origin(annotation) is Annotated:
        return bare_type(get_args(annotation)[0])
    return get_origin(annotation) or annotation


@cache
def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The description of each field, as one line: the text below the field. It is read from the source, which costs
    milliseconds, because only flags and documentation need it. Empty if the package was installed without its source.
    """
    try:
        code = inspect.getsource(sys.modules[model.__module__])
    except OSError:
        return {}
    (source,) = (
        node for node in ast.parse(code).body if isinstance(node, ast.ClassDef) and node.name == model.__name__
    )
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(source.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def unknown_setting(
    key: str, value: object, known: Collection[str], spelled: Callable[[str], str] = str
) -> ConfigError:
    """The error for a key that is no setting. It suggests a similar setting. Keys are shown as `spelled(key)`."""
    close = get_close_matches(key, known, n=1)
    mend = f"did you mean {spelled(close[0])}?" if close else "leave it out"
    return ConfigError("is not a setting", key=spelled(key), value=value, mend=mend)


def _plain(value: Any, kind: object) -> Any:
    """A value from a program for a field of this kind: objects of the multiaddr package become text. Raises
    PydanticKnownError for True or False in place of a number; pydantic itself reads numbers of NumPy and torch."""
    if kind is tuple and value is not None:
        several = isinstance(value, Iterable) and not isinstance(value, Mapping)  # a single Multiaddr is a mapping
        return tuple(str(item) for item in value) if several else (str(value),)
    if isinstance(value, bool) and kind in (int, float):
        raise PydanticKnownError("int_type" if kind is int else "float_type")
    return value


def _has_bytes(text: str) -> bool:
    """Whether a text from the command line or the file system has bytes that its encoding lacks (PEP 383)."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _table(key: str, text: str) -> object:
    """Read a table from JSON. Flags and environment variables give tables in this form."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        mend = 'write it like {"betas": [0.9, 0.95]}'
        raise ConfigError("is not JSON", key=key, value=text, mend=mend) from None


def _explained(model: type[BaseModel], error: ErrorDetails) -> ConfigError:
    """Turn an error of pydantic into a ConfigError that names the key, the value and the mend."""
    key = str(error["loc"][0]) if error["loc"] else ""
    kind, value, limits = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown_setting(key, value, tuple(model.model_fields))
    default = model.model_fields[key].get_default(call_default_factory=True) if key else None
    usual = "leave it out or correct it" if default in (None, (), {}) else f"choose e.g. the default, {shown(default)}"
    wrong = WRONG[kind].format(**limits) if kind in WRONG else f"can't be used ({error['msg'].lower()})"
    mend = MENDS[kind].format(**limits).replace("'", "") if kind in MENDS else usual
    return ConfigError(wrong, key=key, value=value, mend=mend)
