"""Checkpoints: safetensors files and a manifest in `checkpoint-<epoch>/`.

Law: an incomplete checkpoint is never used. All files are written into a hidden folder and flushed to disk, the
manifest last; then one rename gives the folder its name. The manifest holds the length and hash of every file, which
reveal a truncated or altered one. No pickle. Only one process at a time may save into a root.

    checkpoint-<epoch>/
        <stem>.safetensors ...      one for each group of tensors
        manifest.json               format, epoch, files: {name: {bytes, xxh3}}, seal, and the caller's entries; of
                                    two checkpoints, generation, samples and epoch say, in this order, which is newer
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from p2p_diloco.errors import CheckpointError
from p2p_diloco.tensors.flat import as_bytes

FORMAT = 4
"""Version of the format above and of the outer state's digests. A reader refuses any other."""
MANIFEST = "manifest.json"
_FOLDER = re.compile(r"checkpoint-(\d+)(?P<old>\.replaced)?")
_UNFINISHED = ".checkpoint-unfinished"
_STEM = re.compile(r"[A-Za-z0-9_-]+")
_CHUNK = 1 << 22
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of dtypes in safetensors."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Write the tensors into a new safetensors file, one after another. Return the file's length and hash. `dtypes`:
    the dtypes to which tensors are cast, by the tensors' names; all other tensors keep theirs. Raises `CheckpointError`
    for a dtype that the format lacks, and OSError."""
    cast = {name: (dtypes or {}).get(name, tensor.dtype) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (-cast[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        if cast[name] not in _DTYPES:
            key = f"{path.stem}.{name}"
            raise CheckpointError(f"can't be saved as {cast[name]}", key=key, mend="cast it first")
        start, end = end, end + tensors[name].numel() * cast[name].itemsize
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _DTYPES[cast[name]], "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    pieces = (as_bytes(tensors[name].cpu().to(cast[name])) for name in order)
    return write_file(path, chain([len(head).to_bytes(8, "little") + head], pieces))


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, object]:
    """Write the pieces into a new file, flush it to disk, and return its length and hash."""
    hasher, length = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            hasher.update(piece)
            length += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": length, "xxh3": hasher.hexdigest()}


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


Age = tuple[int, int, int, bool]
"""Generation, samples (-1: unknown) and epoch, compared in this order like versions; then False for a folder named
`.replaced`, which is older than its replacement."""

_log = logging.getLogger(__name__)


def save(
    root: Path,
    epoch: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    manifest: Mapping[str, object],
    keep: int,
) -> Path:
    """Write the checkpoint `checkpoint-<epoch>` under `root`, and return its path. Remove all checkpoints but the
    newest `keep`.

    `tensors`: by file stem, then by name; any dtype, device and strides. `manifest`: further entries, as JSON; its
    `generation`, then its `samples`, and only then the epoch decide which of two checkpoints is newer. A checkpoint of
    the same epoch is replaced, whatever its lineage. Raises `CheckpointError` if the checkpoint can't be written (e.g.
    the disk is full); older checkpoints are then unchanged.
    """
    root = Path(root)
    unfinished, final = root / _UNFINISHED, root / f"checkpoint-{epoch}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        files = {
            f"{stem}.safetensors": write_tensors(unfinished / f"{stem}.safetensors", group)
            for stem, group in tensors.items()
        }
        content = json.loads(json.dumps({**manifest, "format": FORMAT, "epoch": epoch, "files": files}))
        sealed = json.dumps({**content, "seal": _seal(content)}, indent=1)
        write_file(unfinished / MANIFEST, [sealed.encode()])
        sync_folder(unfinished)
        _put_in_place(unfinished, final)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"can't be written: {error.strerror or error}",
            key="checkpoint",
            value=final,
            mend="free some space or choose another checkpoint_dir; older checkpoints, if there are any, are untouched",
        ) from error
    _prune(root, final, keep)
    return final


def latest(root: Path) -> Path | None:
    """Return the newest complete checkpoint under `root`; None if there is none. Broken newer ones are logged."""
    return next(whole(root), None)


def whole(root: Path) -> Iterator[Path]:
    """Yield the complete checkpoints under `root`, newest first. Each one is verified just before it is yielded; a
    broken one is logged and skipped."""
    for folder, manifest in _manifests(Path(root), lambda error: _log.warning("skipped: %s", error)):
        try:
            _check_files(folder, manifest)
        except CheckpointError as error:
            _log.warning("skipped: %s", error)
        else:
            yield folder


def epoch_of(path: Path) -> int:
    """Return the epoch in the name of a checkpoint's folder; -1 for another name."""
    found = _FOLDER.fullmatch(path.name)
    return -1 if found is None else int(found[1])


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
    """Return a checkpoint's tensors, by file stem and name, and its manifest. Raises `CheckpointError` if the
    checkpoint is broken."""
    path = Path(path)
    manifest = _read_manifest(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in _check_files(path, manifest):
        try:
            tensors[name.removesuffix(".safetensors")] = safetensors.torch.load_file(path / name)
        except (OSError, SafetensorError) as error:
            raise _broken(path, f"{name} can't be read: {error}") from error
    return tensors, manifest


def _put_in_place(unfinished: Path, final: Path) -> None:
    """Rename the folder `unfinished` to `final`. If there is an older checkpoint of that name, first rename that one,
    because a folder can't be renamed onto another."""
    aside = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if not (final / MANIFEST).is_file():
            raise FileExistsError(0, "a folder of that name exists and is no checkpoint")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    unfinished.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _prune(root: Path, newest: Path, keep: int) -> None:
    """Remove all checkpoints except `newest` and the `keep` - 1 newest of the others. Folders that can't be read
    stay."""
    others = [folder for folder, _ in _manifests(root, lambda error: None) if folder != newest]
    for folder in others[keep - 1 :]:
        try:
            gone = folder.rename(root / _UNFINISHED)  # a partly removed checkpoint must not look like a broken one
            shutil.rmtree(gone)
        except OSError as error:
            _log.warning("the old checkpoint %s could not be removed: %s", folder, error)


def _manifests(root: Path, broken: Callable[[CheckpointError], None]) -> list[tuple[Path, dict[str, object]]]:
    """Return the checkpoints under `root` with their manifests, newest first. Call `broken` with the error of each
    checkpoint whose manifest can't be read."""
    found: list[tuple[Path, dict[str, object]]] = []
    for folder in root.iterdir() if root.is_dir() else ():
        if _FOLDER.fullmatch(folder.name) and folder.is_dir():
            try:
                found.append((folder, _read_manifest(folder)))
            except CheckpointError as error:
                broken(error)
    return sorted(found, key=lambda entry: _age(*entry), reverse=True)


def _age(folder: Path, manifest: Mapping[str, object]) -> Age:
    """Return the key by which checkpoints are sorted, oldest first."""
    generation, samples, epoch = (manifest.get(key) for key in ("generation", "samples", "epoch"))
    assert isinstance(epoch, int), "checked when the manifest was read"
    return (
        generation if isinstance(generation, int) else 0,
        samples if isinstance(samples, int) else -1,
        epoch,
        not folder.name.endswith(".replaced"),
    )


def _read_manifest(folder: Path) -> dict[str, object]:
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise _broken(folder, f"it has no {MANIFEST}") from None
    except OSError as error:
        raise _broken(folder, f"{MANIFEST} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _broken(folder, f"{MANIFEST} is truncated or no JSON") from error
    match content:
        case {"format": int(version)} if version != FORMAT:
            raise _broken(folder, f"it has format {version}, and this version reads format {FORMAT}")
        case {"format": int(), "epoch": int(), "files": dict(), "seal": str(seal)}:
            pass
        case _:
            raise _broken(folder, f"{MANIFEST} is not a manifest of p2p_diloco")
    manifest: dict[str, object] = {key: value for key, value in content.items() if key != "seal"}
    if seal != _seal(manifest):
        raise _broken(folder, f"{MANIFEST} has been altered")
    return manifest


def _check_files(folder: Path, manifest: Mapping[str, object]) -> list[str]:
    """Compare the files of a checkpoint with its manifest, and return their names. Raises `CheckpointError` if a file
    differs."""
    files = manifest["files"]
    assert isinstance(files, dict), "checked when the manifest was read"
    for name, expected in files.items():
        stem = name.removesuffix(".safetensors")
        if stem == name or not _STEM.fullmatch(stem) or not isinstance(expected, dict):
            raise _broken(folder, f"{MANIFEST} is not a manifest of p2p_diloco")
        try:
            length = (folder / name).stat().st_size
            if length != expected.get("bytes"):
                raise _broken(folder, f"{name} has {length} bytes instead of {expected.get('bytes')}")
            with (folder / name).open("rb") as file:
                hasher = xxhash.xxh3_128()
                while chunk := file.read(_CHUNK):
                    hasher.update(chunk)
        except OSError as error:
            raise _broken(folder, f"{name} can't be read: {error.strerror or error}") from error
        if hasher.hexdigest() != expected.get("xxh3"):
            raise _broken(folder, f"{name} has been altered: its hash differs")
    return list(files)


def _seal(content: Mapping[str, object]) -> str:
    """Return a hash of the manifest's own content in canonical form."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _broken(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(f"can't be used: {why}", key="checkpoint", value=folder, mend="choose another")


# -- nested state dicts as tensors and JSON. A value that is no plain data is refused when it is saved, never when it is
# loaded. Types survive: integer keys, tuples, floats to the bit.

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
