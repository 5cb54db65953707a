"""A checkpoint is whole or it doesn't count."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.errors import CheckpointError
from p2p_diloco.tensors import checkpoint
from p2p_diloco.tensors.checkpoint import pack, unpack


def tensors(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    flat = torch.arange(10.0) * value
    return {
        "theta": {"all": flat},
        "outer": {"m.0": flat[:4], "m.1": flat[4:], "count": torch.tensor([3.0])},
        "inner": {
            "step": torch.tensor(7.0),
            "bf16": flat.bfloat16(),
            "bytes": torch.arange(5, dtype=torch.uint8),
            "long": torch.tensor([1 << 60]),
            "mask": torch.tensor([True, False]),
            "turned": torch.arange(6.0).view(2, 3).t(),
            "none": torch.empty(0, 3),
        },
        "nothing": {},
    }


def save(root: Path, epoch: int, keep: int = 3, **manifest: object) -> Path:
    return checkpoint.save(root, epoch, tensors(epoch), manifest, keep)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_what_was_saved_is_loaded_to_the_bit(tmp_path):
    """Every dtype, views of one vector, transposed, scalar and empty tensors, an empty group, and the
    manifest.
    """
    path = save(tmp_path, 4, run={"sync_every": 500}, versions=[[0, 1, "ab"]])
    assert path == tmp_path / "checkpoint-4" == checkpoint.latest(tmp_path)
    loaded, manifest = checkpoint.load(path)
    expected = tensors(4)
    assert loaded.keys() == expected.keys()
    for stem, group in expected.items():
        assert loaded[stem].keys() == group.keys()
        for name, tensor in group.items():
            assert loaded[stem][name].dtype == tensor.dtype
            assert torch.equal(loaded[stem][name], tensor)
    assert manifest["epoch"] == 4
    assert manifest["run"] == {"sync_every": 500}
    assert manifest["versions"] == [[0, 1, "ab"]]
    assert names(tmp_path) == ["checkpoint-4"]
    again = safetensors.torch.load((path / "outer.safetensors").read_bytes())  # any tool can read them
    assert torch.equal(again["m.1"], torch.arange(10.0)[4:] * 4)


def test_tensors_lie_aligned_in_their_files(tmp_path):
    """Also after single bytes and an odd header, so that other tools may map them into memory."""
    raw = (save(tmp_path, 2) / "inner.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    sizes = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8, "BOOL": 1}
    for entry in json.loads(raw[8 : 8 + length]).values():
        assert entry["data_offsets"][0] % sizes[entry["dtype"]] == 0


@pytest.mark.parametrize(
    ("saved", "keep", "kept"),
    [
        ([{"epoch": epoch} for epoch in (8, 9, 10, 11)], 2, [11, 10]),
        ([{"epoch": 20}, {"epoch": 5}], 1, [5]),
        ([{"epoch": 10}, {"epoch": 20}, {"epoch": 11, "generation": 1}], 2, [11, 20]),
        ([{"epoch": e, "samples": s} for e, s in ((600, 6000), (110, 44000), (114, 45600))], 2, [114, 110]),
        ([{"epoch": 10, "generation": 0}, {"epoch": 3, "generation": 0, "samples": 0}], 3, [3, 10]),
        ([{"epoch": 3, "generation": 0, "samples": 0}, {"epoch": 4, "generation": 1}], 3, [4, 3]),
    ],
)
def test_the_newest_are_kept(tmp_path, saved, keep, kept):
    """A later generation is newer whatever its epoch, then more samples are, then a higher epoch; so neither the epochs
    of an older state nor those of a lineage that was left behind win or push others out. What was just saved is never
    pruned, and nothing that isn't a checkpoint is touched."""
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for manifest in saved:
        save(tmp_path, keep=keep, **manifest)
    assert names(tmp_path) == sorted(["checkpoint-1", "notes.txt", *(f"checkpoint-{epoch}" for epoch in kept)])
    assert [checkpoint.epoch_of(path) for path in checkpoint.whole(tmp_path)] == kept


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path, monkeypatch):
    """The older one of the same epoch is still found, and is gone after the next save."""
    save(tmp_path, 3, note="first")

    def killed(self: Path, target: Path) -> Path:
        if self.name.startswith("."):
            raise KeyboardInterrupt
        os.rename(self, target)
        return Path(target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 3, note="second")
    monkeypatch.undo()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.load(found)[1]["note"] == "first"
    save(tmp_path, 3, note="third")
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert checkpoint.load(found)[1]["note"] == "third"
    assert names(tmp_path) == ["checkpoint-3"]
    save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["checkpoint-4"]


def test_a_kill_after_the_renames_of_a_replacement_leaves_the_new_one_first(tmp_path):
    """Both of one epoch are there and whole."""
    shutil.copytree(save(tmp_path, 3, note="first"), tmp_path / "checkpoint-3.replaced")
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-3"


def truncate(path: Path) -> None:
    with (path / "outer.safetensors").open("r+b") as file:
        file.truncate(20)


def flip(path: Path) -> None:
    raw = bytearray((path / "theta.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "theta.safetensors").write_bytes(raw)


def edit(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"epoch": 9', '"epoch": 90'))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda p: (p / "manifest.json").unlink(), "it has no manifest.json"),
        (lambda p: (p / "manifest.json").write_text('{"format": 1, "ep'), "manifest.json is truncated or no JSON"),
        (lambda p: (p / "manifest.json").write_text("[" * 10**6), "manifest.json is truncated or no JSON"),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json is not a manifest of p2p_diloco"),
        (lambda p: (p / "manifest.json").write_text('{"format": 2}'), "it has format 2, and this version reads form"),
        (edit, "manifest.json has been altered"),
        (lambda p: (p / "theta.safetensors").unlink(), "theta.safetensors can't be read: No such file"),
        (truncate, r"outer.safetensors has 20 bytes instead of \d+"),
        (flip, "theta.safetensors has been altered"),
    ],
)
def test_damage_is_refused_in_a_sentence_and_passed_over_with_a_warning(tmp_path, caplog, damage, why):
    """The one before is found instead, and the log says what was skipped and why."""
    save(tmp_path, 8)
    damaged = save(tmp_path, 9)
    damage(damaged)
    with pytest.raises(CheckpointError, match=rf"^checkpoint=\S*checkpoint-9 can't be used: {why}.*; choose another$"):
        checkpoint.load(damaged)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-8"
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "checkpoint-9" in record.getMessage()


@pytest.mark.parametrize("name", ["../outside.safetensors", "a\ud800.safetensors", "theta", ""])
def test_a_manifest_names_the_files_of_a_checkpoint_alone(name, tmp_path):
    """None outside of its folder, and none that can't be. A folder from elsewhere may say anything, with a seal that
    fits."""
    path = save(tmp_path, 1)
    content = json.loads((path / "manifest.json").read_text())
    del content["seal"]
    content["files"] = {name: {"bytes": 0, "xxh3": ""}}
    (path / "manifest.json").write_text(json.dumps({**content, "seal": checkpoint._seal(content)}))
    with pytest.raises(CheckpointError, match="not a manifest of p2p_diloco"):
        checkpoint.load(path)


def test_nothing_there_is_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match=r"it has no manifest.json"):
        checkpoint.load(tmp_path / "nowhere")


def test_a_full_disk_is_reported_and_keeps_older_checkpoints(tmp_path):
    """A write that fails half-way, as the kernel fails it: the older one is whole, no rest is left."""
    older = save(tmp_path, 1)
    large = {"theta": {"all": torch.zeros(1 << 16)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint-2 can't be written: .*; free some space"):
            checkpoint.save(tmp_path, 2, large, {}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert names(tmp_path) == ["checkpoint-1"]
    checkpoint.load(older)


def test_a_folder_of_someone_elses_is_not_replaced(tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "model.bin").write_text("mine")
    with pytest.raises(CheckpointError, match="a folder of that name exists and is no checkpoint"):
        save(tmp_path, 3)
    assert names(tmp_path) == ["checkpoint-3"]
    assert (tmp_path / "checkpoint-3" / "model.bin").read_text() == "mine"


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    """Files first, then the manifest, then the folder, then the rename, then the root."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append("rename")
        return rename(self, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("names of open files are read from /proc")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    checkpoint.save(tmp_path, 1, {"theta": {"all": torch.zeros(2)}}, {}, keep=1)
    assert done == ["theta.safetensors", "manifest.json", ".checkpoint-unfinished", "rename", tmp_path.name]


def test_a_dtype_that_has_no_name_in_a_file_is_refused_by_the_tensors_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"inner.z can't be saved as torch.complex128"):
        checkpoint.save(tmp_path, 1, {"inner": {"z": torch.zeros(1, dtype=torch.complex128)}}, {}, keep=1)
    save(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-2"]


# -- state dicts

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equal, with equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def there_and_back(obj: object) -> object:
    tensors, structure = pack(obj)
    return unpack({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(structure)))


@settings(max_examples=60, deadline=None)
@given(nested)
def test_plain_data_comes_back_as_it_was(obj):
    """Types too: integer keys, tuples, infinities, True that isn't 1; and NaN."""
    assert same(there_and_back(obj), obj)
    assert math.isnan(there_and_back([math.nan])[0])


def test_tensors_are_named_by_their_path_and_never_collide():
    one, two = torch.zeros(1), torch.ones(1)
    tensors, structure = pack({"a.b": one, "a": {"b": two}, "c": [torch.ones(2)]})
    assert set(tensors) == {"a.b", "a.b~", "c.0"}
    assert same(unpack(tensors, structure), {"a.b": one, "a": {"b": two}, "c": [torch.ones(2)]})
    assert list(pack(one)[0]) == ["value"]


@pytest.mark.parametrize("thing", [{1, 2}, b"bytes", object(), torch.eye(2).to_sparse()])
def test_what_isnt_plain_data_is_refused_by_its_place(thing):
    with pytest.raises(CheckpointError, match=rf"^optimizer.0 can't be saved: it is a {type(thing).__name__}"):
        pack({"optimizer": [thing]})


@pytest.mark.parametrize("structure", [{"tensor": "gone"}, {"what": 1}, {"dict": [[1]]}, {"float": "1"}, [1]])
def test_a_structure_that_doesnt_fit_is_refused(structure):
    with pytest.raises(CheckpointError, match="doesn't fit its tensors"):
        unpack({}, {"list": [structure]})
