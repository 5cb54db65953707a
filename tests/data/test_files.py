"""Files are cut into slices that can be read by themselves: together their samples are those of the whole file."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from p2p_diloco.data import files
from p2p_diloco.data.files import cut_files
from p2p_diloco.errors import ConfigError


def in_slices(folder: Path, paths: list[Path], slice_bytes: int) -> list[list[Any]]:
    """The samples of each slice, read from a file with the slice's bytes alone."""
    manifest, pieces = cut_files(paths, slice_bytes, lambda text: None)
    found = []
    for one, piece in zip(manifest.slices, pieces, strict=True):
        content = piece.read()
        assert one.is_hash_of(content)
        assert one.nbytes == len(content)
        alone = folder / "alone"
        alone.write_bytes(content)
        found.append(list(files.FORMATS[manifest.form].read(alone)))
        assert len(found[-1]) == one.samples
    return found


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("slice_bytes", [1, 7, 64, 10_000])
def test_text_is_cut_at_the_ends_of_lines(tmp_path: Path, end: str, slice_bytes: int) -> None:
    lines = ["", "eins", "zwölf", "", "x" * 50, *map(str, range(40)), "last"]
    (tmp_path / "a.txt").write_text("\n".join(lines) + end)
    found = in_slices(tmp_path, [tmp_path / "a.txt"], slice_bytes)
    assert [line for one in found for line in one] == lines
    assert (len(found) == 1) == (slice_bytes == 10_000)


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("slice_bytes", [1, 5_000, 10**6])
def test_a_tar_file_is_cut_between_samples(tmp_path: Path, form: int, slice_bytes: int) -> None:
    """A sample's files stay together, also those with names so long that the format needs a header of its own."""
    names = ["d.x/0001", "d.x/0002", "n" * 150, "0004"]
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        tar.addfile(tarfile.TarInfo("folder"))
        for number, name in enumerate(names):
            add(tar, f"{name}.jpg", bytes([number]) * 2000)
            add(tar, f"{name}.seg.png", b"p")
    found = in_slices(tmp_path, [tmp_path / "a.tar"], slice_bytes)
    whole = [{"jpg": bytes([number]) * 2000, "seg.png": b"p"} for number in range(4)]
    assert [sample for one in found for sample in one if "jpg" in sample] == whole
    assert len(found) == {1: 5, 5_000: 3, 10**6: 1}[slice_bytes]


def test_a_safetensors_file_is_a_slice_with_a_sample_a_row(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(12.0).view(3, 4), "y": torch.tensor([1, 2, 3], dtype=torch.bfloat16)}
    for name in ("b", "a"):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    found = in_slices(tmp_path, [tmp_path], 1)
    assert [len(one) for one in found] == [3, 3]
    assert torch.equal(found[1][2]["x"], tensors["x"][2])
    assert found[0][1]["y"].dtype is torch.bfloat16


def test_the_manifest_is_the_same_wherever_the_files_lie(tmp_path: Path) -> None:
    """Names, contents and the length of slices decide; folders above, and the order of the paths, don't."""
    for place in ("here", "there"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "sub" / "b.txt").write_text("b\n")
        (tmp_path / place / "a.txt").write_text("a\n" * 9)

    def identity(*paths: str, slice_bytes: int = 4) -> str:
        return cut_files([tmp_path / path for path in paths], slice_bytes, lambda text: None)[0].identity

    first = identity("here")
    assert identity("there") == first
    assert identity("there", slice_bytes=9) != first
    assert identity("here/a.txt", "here/sub/b.txt") == identity("there/sub/b.txt", "there/a.txt") != first
    (tmp_path / "there" / "a.txt").write_text("c\n" * 9)
    assert identity("there") != first


def test_links_in_a_tar_file_have_no_content(tmp_path: Path) -> None:
    """Also those that lead nowhere: neither cutting nor reading fails."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "one.txt", b"1")
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("two.txt")
            link.type, link.linkname = kind, "/nowhere"
            tar.addfile(link)
        add(tar, "three.txt", b"3")
    assert in_slices(tmp_path, [path], 1 << 20) == [[{"txt": b"1"}, {"txt": b"3"}]]


def test_a_sparse_file_in_a_tar_file_is_not_unfolded(tmp_path: Path) -> None:
    """A made one of 2 kB could ask for any memory. Who serves one is told; who gets one reads it as nothing."""
    path = tmp_path / "a.tar"
    sparse = tarfile.TarInfo("big.bin")
    sparse.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**36), "GNU.sparse.numblocks": "1"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(sparse)
        add(tar, "one.txt", b"1")
    with pytest.raises(ConfigError, match=r"a.tar has the sparse file big.bin"):
        cut_files([path], 1 << 20, lambda text: None)
    assert files.FORMATS["tar"].read(path) == [{"txt": b"1"}]


def test_a_link_out_of_a_served_folder_is_refused(tmp_path: Path) -> None:
    """It would serve a file that nobody has named. A link within the folder is served."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    (folder / "b.txt").symlink_to("a.txt")
    assert len(cut_files([folder], 4, lambda text: None)[0].slices) == 2
    (tmp_path / "secret.txt").write_text("s\n")
    (folder / "c.txt").symlink_to("../secret.txt")
    with pytest.raises(ConfigError, match=r"c.txt is a link to a file outside of the folder"):
        cut_files([folder], 4, lambda text: None)


def test_files_that_are_no_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*names: str) -> str:
        with pytest.raises(ConfigError) as raised:
            cut_files([tmp_path / name for name in names], 4, lambda text: None)
        return str(raised.value)

    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.txt").write_text("a\n")
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    (tmp_path / "no.tar").write_text("text")
    (tmp_path / "no.safetensors").write_text("text")
    save_file({"x": torch.zeros(2), "y": torch.zeros(3)}, tmp_path / "unlike.safetensors")
    (tmp_path / "empty").mkdir()
    assert "isn't there" in refused("none")
    assert "has no files" in refused("empty")
    (tmp_path / "nothing.txt").touch()
    assert "nothing.txt is empty; name files with data" in refused("nothing.txt")
    assert "a.txt is the name of two files" in refused("a.txt", "b")
    assert "several formats (tar, text)" in refused("a.txt", "no.tar")
    assert "zero.txt is no text" in refused("zero.txt")
    assert "can't be read as a tar file" in refused("no.tar")
    assert "can't be read as safetensors" in refused("no.safetensors")
    assert "first dimension of one length" in refused("unlike.safetensors")
    monkeypatch.setattr(files, "SLICE_BYTES_MAX", 8)
    (tmp_path / "long.txt").write_text("x" * 100)
    assert "can't be cut into slices that are short enough" in refused("long.txt")
    monkeypatch.setattr(files, "SLICES_MAX", 1)
    (tmp_path / "many.txt").write_text("123\n" * 3)
    assert "makes 2 slices" in refused("many.txt")
