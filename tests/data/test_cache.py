"""The cache is bounded, whole, and prefers what was used last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2p_diloco.data.manifest import Cache, Slice, hash_of


def content(number: int) -> bytes:
    return bytes([number]) * 100


def slice_of(number: int) -> Slice:
    return Slice("a", 100, 1, hash_of(content(number)))


def used(cache: Cache, number: int, at: float) -> None:
    path = cache.find(slice_of(number))
    assert path is not None
    os.utime(path, (at, at))


def put(cache: Cache, number: int) -> Path:
    return cache.put(slice_of(number), memoryview(content(number)))


def held(cache: Cache) -> list[int]:
    return [number for number in range(40) if (cache.folder / slice_of(number).hash.hex()).exists()]


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "folder", 400)
    for number in range(4):
        put(cache, number)
        used(cache, number, 1000.0 + number)
    used(cache, 0, 2000.0)
    assert put(cache, 4).read_bytes() == content(4)
    assert held(cache) == [0, 3, 4]  # a sixteenth of the bound is made free, too: one more file had to go


def test_the_folder_is_bounded_though_two_peers_share_it(tmp_path: Path) -> None:
    """The second one may exceed the bound by a sixteenth."""
    caches = [Cache(tmp_path, 1600), Cache(tmp_path, 1600)]
    for number in range(40):
        put(caches[number % 2], number)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1600 * (1 + 1 / 16)
    assert len(held(caches[0])) >= 14


def test_a_later_start_finds_what_is_whole(tmp_path: Path) -> None:
    """A file that was damaged meanwhile is removed, and counts as missing. With a lower bound it makes room."""
    first = Cache(tmp_path, 1000)
    for number in range(1, 7):
        put(first, number)
    (tmp_path / slice_of(2).hash.hex()).write_bytes(b"damaged")
    later = Cache(tmp_path, 1000)
    assert later.find(slice_of(1)) == tmp_path / slice_of(1).hash.hex()
    assert later.find(slice_of(2)) is None
    assert later.find(slice_of(9)) is None
    assert held(later) == [1, 3, 4, 5, 6]
    assert len(held(Cache(tmp_path, 300))) == 2


def test_what_a_full_disk_does_not_take_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, 1000)

    def full(self: Path, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        put(cache, 1)
    assert not list(tmp_path.iterdir())
