"""Checkpoints: safetensors files and a manifest in `checkpoint-<epoch>/`.

Law: a checkpoint is whole or it doesn't count. Everything is written into a hidden folder and flushed to the
disk, the manifest last; then one rename gives the folder its name. The manifest holds every file's length and
hash, so a torn, truncated or altered checkpoint is told from a whole one. No pickle. One process at a time
saves into a root.

    checkpoint-<epoch>/
        <stem>.safetensors ...      one for each group of tensors that the caller handed in
        manifest.json               format, epoch, files: {name: {bytes, xxh3}}, seal; and the caller's, of which
                                    generation and samples come before the epoch in what is newer
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from p2p_diloco.errors import CheckpointError
from p2p_diloco.tensors.packing import pack as pack
from p2p_diloco.tensors.packing import unpack as unpack
from p2p_diloco.tensors.raw import as_bytes

FORMAT = 2
"""Version of what is described above, digests of outer states included. A reader refuses any other."""

MANIFEST = "manifest.json"

_FOLDER = re.compile(r"checkpoint-(\d+)(?P<old>\.replaced)?")
_UNFINISHED = ".checkpoint-unfinished"
_OWN_KEYS = frozenset({"format", "epoch", "files", "seal"})
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
}
"""safetensors' names."""

Age = tuple[int, int, int, bool]
"""Generation, samples (-1: not told) and epoch, as versions compare; of one epoch the one that was not replaced."""

_log = logging.getLogger(__name__)


def save(
    root: Path,
    epoch: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    manifest: Mapping[str, object],
    keep: int,
) -> Path:
    """Write `checkpoint-<epoch>` under `root`, then remove all but the newest `keep`; return its path.

    `tensors`: by file stem, then by name; any dtype, device and stride. `manifest`: what else the caller
    wants back, as JSON; `generation` and `samples`, if they are there, come before the epoch in what counts as newest.
    A checkpoint of the same epoch is replaced, whatever lineage it is of. Raises `CheckpointError` where it can't be
    written (a full disk, say): what was there before is still there, untouched.
    """
    if keep < 1 or epoch < 0 or _OWN_KEYS & manifest.keys() or not all(map(_STEM.fullmatch, tensors)):
        raise ValueError(
            "keep must be 1 or more, epoch 0 or more, and stems and keys must not clash with our own"
        )
    root = Path(root)
    unfinished, final = root / _UNFINISHED, root / f"checkpoint-{epoch}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        files = {
            f"{stem}.safetensors": _write_tensors(unfinished, stem, group) for stem, group in tensors.items()
        }
        content = json.loads(json.dumps({**manifest, "format": FORMAT, "epoch": epoch, "files": files}))
        sealed = json.dumps({**content, "seal": _seal(content)}, indent=1)
        _write_file(unfinished / MANIFEST, [sealed.encode()])
        _sync_folder(unfinished)
        _put_in_place(unfinished, final)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"can't be written: {error.strerror or error}",
            key="checkpoint",
            value=final,
            mend="free some space or choose another checkpoint_dir; older checkpoints are untouched",
        ) from error
    _prune(root, final, keep)
    return final


def latest(root: Path) -> Path | None:
    """The newest whole checkpoint under `root`, or None. Newer ones that aren't whole are logged."""
    return next(whole(root), None)


def whole(root: Path) -> Iterator[Path]:
    """The whole checkpoints under `root`, newest first, each looked at when it is asked for. Others are logged."""
    found: list[tuple[Age, Path, dict[str, object]]] = []
    for folder in _folders(Path(root)):
        try:
            manifest = _read_manifest(folder)
        except CheckpointError as error:
            _log.warning("skipped: %s", error)
        else:
            found.append((_age(folder, manifest), folder, manifest))
    for _, folder, manifest in sorted(found, key=lambda entry: entry[0], reverse=True):
        try:
            _check_files(folder, manifest)
        except CheckpointError as error:
            _log.warning("skipped: %s", error)
        else:
            yield folder


def epoch_of(path: Path) -> int:
    """The epoch that a checkpoint's folder is named after; -1: it is named otherwise."""
    found = _FOLDER.fullmatch(path.name)
    return -1 if found is None else int(found[1])


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, object]]:
    """A whole checkpoint's tensors, by file stem and name, and its manifest; else `CheckpointError`."""
    path = Path(path)
    manifest = _read_manifest(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in _check_files(path, manifest):
        try:
            tensors[name.removesuffix(".safetensors")] = safetensors.torch.load_file(path / name)
        except (OSError, SafetensorError) as error:
            raise _broken(path, f"{name} can't be read: {error}") from error
    return tensors, manifest


def _write_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """One safetensors file, streamed from the tensors themselves, with the file's length and hash.

    The library's writer would refuse slices of one flat vector and need every byte once more to hash it.
    Layout: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, then the data;
    wide types first, so that all lie aligned).
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"can't be saved as {tensor.dtype}", key=f"{stem}.{name}", mend="cast it first"
            )
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    pieces = (as_bytes(tensors[name].cpu()) for name in order)
    start_of_file = [len(head).to_bytes(8, "little") + head]
    return _write_file(folder / f"{stem}.safetensors", chain(start_of_file, pieces))


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, object]:
    """Write, flush to the disk, and return the length and hash."""
    hasher, length = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            hasher.update(piece)
            length += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": length, "xxh3": hasher.hexdigest()}


def _put_in_place(unfinished: Path, final: Path) -> None:
    """Rename into place. A folder can't be renamed over another, so an older one steps aside, still whole."""
    aside = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if not (final / MANIFEST).is_file():
            raise FileExistsError(0, "a folder of that name is there and is no checkpoint")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    unfinished.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _prune(root: Path, newest: Path, keep: int) -> None:
    """Remove our folders but `newest` and the keep - 1 that come next; what can't be read is left alone."""
    others: list[tuple[Age, Path]] = []
    for folder in _folders(root):
        try:
            others.append((_age(folder, _read_manifest(folder)), folder))
        except CheckpointError:
            continue
    others = sorted((entry for entry in others if entry[1] != newest), reverse=True)
    for _, folder in others[keep - 1 :]:
        try:
            gone = folder.rename(root / _UNFINISHED)  # half-removed, it must not look like a torn one
            shutil.rmtree(gone)
        except OSError as error:
            _log.warning("%s is old and could not be removed: %s", folder, error)


def _folders(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return [path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir()]


def _age(folder: Path, manifest: Mapping[str, object]) -> Age:
    """What sorts checkpoints."""
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
    except ValueError as error:
        raise _broken(folder, f"{MANIFEST} is torn or no JSON") from error
    match content:
        case {"format": int(version)} if version != FORMAT:
            raise _broken(folder, f"it has format {version}, and this version reads format {FORMAT}")
        case {"format": int(), "epoch": int(), "files": dict(), "seal": str(seal)}:
            pass
        case _:
            raise _broken(folder, f"{MANIFEST} is not one of ours")
    manifest: dict[str, object] = {key: value for key, value in content.items() if key != "seal"}
    if seal != _seal(manifest):
        raise _broken(folder, f"{MANIFEST} has been altered")
    return manifest


def _check_files(folder: Path, manifest: Mapping[str, object]) -> list[str]:
    """The names of the files, once each has been found to be what the manifest says."""
    files = manifest["files"]
    assert isinstance(files, dict), "checked when the manifest was read"
    for name, expected in files.items():
        if Path(name).name != name or not isinstance(expected, dict):
            raise _broken(folder, f"{MANIFEST} is not one of ours")
        try:
            length = (folder / name).stat().st_size
            if length != expected.get("bytes"):
                raise _broken(folder, f"{name} has {length} bytes of {expected.get('bytes')}")
            with (folder / name).open("rb") as file:
                hasher = xxhash.xxh3_128()
                while chunk := file.read(_CHUNK):
                    hasher.update(chunk)
        except OSError as error:
            raise _broken(folder, f"{name} can't be read: {error.strerror or error}") from error
        if hasher.hexdigest() != expected.get("xxh3"):
            raise _broken(folder, f"{name} has been altered: its hash is another")
    return list(files)


def _seal(content: Mapping[str, object]) -> str:
    """Hash of the manifest's own content, in one spelling."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _broken(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(f"can't be used: {why}", key="checkpoint", value=folder, mend="choose another")
