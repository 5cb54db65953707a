"""Splits nested state dicts into tensors and JSON, and joins them again, without pickle.

Law: only plain data (dictionaries, lists, tuples, tensors, numbers, strings, booleans, None). Any other value is
refused when it is saved, by an error that names its path, never when it is loaded. Types survive: integer keys, tuples,
floats to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from p2p_diloco.errors import CheckpointError

Json = object
"""A value that `json.dumps` takes."""


def pack(obj: object) -> tuple[dict[str, Tensor], Json]:
    """Split `obj` (e.g. `optimizer.state_dict()`) into its tensors, named by their path, and JSON that refers to them.

    The tensors are not copied: write them before they change. Raises `CheckpointError` with the path for anything that
    isn't plain data.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(obj, "", tensors)


def is_plain(obj: object) -> bool:
    """Whether `pack` takes a value."""
    try:
        pack(obj)
    except CheckpointError:
        return False
    return True


def unpack(tensors: Mapping[str, Tensor], structure: Json) -> object:
    """Join what `pack` has split. Raises `CheckpointError` if tensors and structure don't fit together."""
    match structure:
        case None | bool() | int() | float() | str():
            return structure
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"float": ("nan" | "inf" | "-inf") as word}:
            return float(word)
        case {"list": list(items)}:
            return [unpack(tensors, item) for item in items]
        case {"tuple": list(items)}:
            return tuple(unpack(tensors, item) for item in items)
        case {"dict": list(pairs)} if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return {unpack(tensors, key): unpack(tensors, value) for key, value in pairs}
        case _:
            raise CheckpointError(
                f"has a structure that doesn't fit its tensors at {structure!r:.60}",
                key="checkpoint",
                mend="choose another checkpoint",
            )


def _pack(obj: object, path: str, tensors: dict[str, Tensor]) -> Json:
    match obj:
        case None | bool() | str():
            return obj
        case int():
            return int(obj)
        case float():
            return float(obj) if math.isfinite(obj) else {"float": str(float(obj))}
        case Tensor() if obj.layout == torch.strided:
            name = path or "value"
            while name in tensors:  # {"a.b": t} and {"a": {"b": t}} give the same path
                name += "~"
            tensors[name] = obj.detach()
            return {"tensor": name}
        case list():
            return {"list": [_pack(item, _at(path, index), tensors) for index, item in enumerate(obj)]}
        case tuple():
            return {"tuple": [_pack(item, _at(path, index), tensors) for index, item in enumerate(obj)]}
        case dict() if all(isinstance(key, (str, int, float, bool, type(None))) for key in obj):
            return {"dict": [[_pack(key, path, tensors), _pack(obj[key], _at(path, key), tensors)] for key in obj]}
        case _:
            raise CheckpointError(
                f"can't be saved: it is a {type(obj).__name__}",
                key=path or "state",
                mend="keep only dictionaries, lists, tuples, dense tensors, numbers, strings and None",
            )


def _at(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
