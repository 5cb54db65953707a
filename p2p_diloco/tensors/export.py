"""Writes a run's global parameters as a model that other programs load.

Law: every file is complete under its name or absent. Files are written into a hidden folder, flushed to disk and then
moved; an earlier file is replaced only if the caller allows it.

    safetensors   model.safetensors; a tied parameter once, its further names in the metadata, as the library's
                  `load_model` expects
    torch         model.pt, a state_dict with all names; `torch.load(..., weights_only=True)` reads it
    hf            config.json and model.safetensors, for `from_pretrained`; above `part_bytes` in several files
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2p_diloco.errors import ConfigError, listed, reason
from p2p_diloco.tensors.card import ModelCard
from p2p_diloco.tensors.checkpoint import sync_folder, write_file, write_tensors
from p2p_diloco.tensors.layout import Layout

PART_BYTES = 5 * 10**9
"""The most bytes of tensors in one file of the format hf."""
CONFIG = "config.json"
_OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|model\.pt|(generation_)?config\.json"
)
"""The names of files that an export writes."""
_UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class Exported:
    """A model to be written. `tensors`: by name, in the model's order, a tied parameter once; `dtypes`: the dtypes that
    trained parameters have in the run, by name; `tied`: for each further name of a tied parameter its first name;
    `files`: the text of configuration files, by file name; `missing`: the names of entries whose values are unknown."""

    tensors: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    tied: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(self.tensors[name].numel() for name in self.dtypes)


def assemble(layout: Layout, theta: Tensor, card: ModelCard | None) -> Exported:
    """Arrange the global parameters and buffers `theta` [layout.numel] as the entries of a state_dict, each buffer in
    its own dtype. Without a card, these are all entries."""
    card = card or ModelCard()
    trained: dict[str, Tensor] = {}
    for spec, start in layout.places:
        trained[spec.name] = theta[start : start + spec.numel].view(spec.shape)
    for spec in layout.buffers:
        trained[spec.name] = trained[spec.name].to(getattr(torch, spec.dtype))
    values = {**card.rest, **trained}
    untied = [name for name in card.names if name not in card.tied]
    tensors = {name: values[name] for name in (*untied, *trained) if name in values}
    tied = {name: first for name, first in card.tied.items() if first in tensors and name not in tensors}
    missing = tuple(name for name in card.names if name not in tensors and name not in tied)
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in layout.params}
    return Exported(tensors, dtypes, tied, card.files, missing)


def check_folder(folder: Path, *, replace: bool) -> None:
    """Check, before anything is written, that an export may go to this folder. `replace`: it may replace files of an
    earlier export.

    Raises:
        ConfigError: the folder has files of an earlier export and `replace` is False, or it can't be a folder.
    """
    try:
        found = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        wrong = f"can't be a folder for the model ({reason(error)})"
        raise ConfigError(wrong, key="--out", value=folder, mend="choose another") from None
    ours = sorted(name for name in found if _OURS.fullmatch(name))
    if ours and not replace:
        mend = "choose another folder, or replace them with --force"
        raise ConfigError(f"has {', '.join(ours[:3])} already", key="--out", value=folder, mend=mend)


def write(
    folder: Path,
    model: Exported,
    form: str,
    dtype: str,
    told: Mapping[str, str],
    *,
    replace: bool,
    part_bytes: int = PART_BYTES,
) -> dict[str, int]:
    """Write the model in one of the forms above; return the lengths of its files in bytes, by name. `dtype`: the dtype
    for the trained parameters, or `keep`; other values keep their dtype. `told`: further metadata, such as the run's
    epoch.

    Raises:
        ConfigError: the form needs something of the model that is unknown, or the folder can't be written.
    """
    kept = model.dtypes
    dtypes = dict(kept) if dtype == "keep" else dict.fromkeys(kept, getattr(torch, dtype))
    files = _config_files(model, dtypes) if form == "hf" else {}
    check_folder(folder, replace=replace)
    unfinished = folder / _UNFINISHED
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was interrupted
        unfinished.mkdir(parents=True)
        if form == "torch":
            _write_state_dict(unfinished / "model.pt", model, dtypes)
        else:
            metadata = {**model.tied, **told, "format": "pt"}
            limit = part_bytes if form == "hf" else None
            _write_parts(unfinished, model.tensors, dtypes, metadata, limit)
            for name, text in files.items():
                write_file(unfinished / name, [text.encode()])
        return _put_in_place(unfinished, folder)
    except OSError as error:
        wrong = f"can't be written ({reason(error)})"
        raise ConfigError(wrong, key="--out", value=folder, mend="free some space or choose another folder") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_state_dict(path: Path, model: Exported, dtypes: Mapping[str, torch.dtype]) -> None:
    """Write a state_dict. Each tensor has memory of its own, except that the names of a tied parameter share it."""
    state = {
        name: tensor.detach().to(dtypes.get(name, tensor.dtype), copy=True) for name, tensor in model.tensors.items()
    }
    state |= {name: state[first] for name, first in model.tied.items()}
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _write_parts(
    folder: Path,
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    metadata: Mapping[str, str],
    part_bytes: int | None,
) -> None:
    """Write the tensors into one file, or into several with an index if they have more than `part_bytes`."""
    sizes = {n: t.numel() * dtypes.get(n, t.dtype).itemsize for n, t in tensors.items()}
    parts: list[list[str]] = [[]]
    for name, size in sizes.items():
        if part_bytes is not None and parts[-1] and sum(sizes[n] for n in parts[-1]) + size > part_bytes:
            parts.append([])
        parts[-1].append(name)
    of: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_tensors(folder / name, {n: tensors[n] for n in part}, dtypes, metadata)
        of |= dict.fromkeys(part, name)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": of}
        write_file(folder / "model.safetensors.index.json", [json.dumps(index, indent=2).encode() + b"\n"])


def _config_files(model: Exported, dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """The configuration files. config.json names the dtype in which the model is saved, if all parameters have one.

    Raises:
        ConfigError: the form hf needs something of the model that is unknown.
    """
    if CONFIG not in model.files:
        raise ConfigError(
            f"needs the model's {CONFIG}, which only models of Transformers have: no peer of this run has told one",
            key="--format",
            value="hf",
            mend="use --format safetensors, which writes any model",
        )
    if model.missing:
        raise ConfigError(
            f"needs values that the run does not have: {listed(model.missing, 3)}",
            key="--format",
            value="hf",
            mend="use --format safetensors, and load it into a model that has them",
        )
    try:
        config: dict[str, Any] = json.loads(model.files[CONFIG])
    except (ValueError, RecursionError):
        config = {}
    if type(config) is not dict or not config:
        mend = "use --format safetensors"
        raise ConfigError(f"needs a {CONFIG}, and the run's can't be read", key="--format", value="hf", mend=mend)
    if len(kinds := set(dtypes.values())) == 1:
        config.pop("torch_dtype", None)
        config["dtype"] = str(kinds.pop()).removeprefix("torch.")
    return {**model.files, CONFIG: json.dumps(config, indent=2, sort_keys=True) + "\n"}


def _put_in_place(unfinished: Path, folder: Path) -> dict[str, int]:
    """Move the written files into the folder, and remove the other files of an earlier export. Return their lengths in
    bytes, by name."""
    names = sorted(path.name for path in unfinished.iterdir())
    for path in [path for path in folder.iterdir() if _OURS.fullmatch(path.name) and path.name not in names]:
        path.unlink()
    for name in names:
        (unfinished / name).replace(folder / name)
    sync_folder(folder)
    return {name: (folder / name).stat().st_size for name in names}
