"""A manifest is a value that any bytes give, or refuse to."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest

from p2p_diloco.data.manifest import SLICE_BYTES_MAX, Manifest, Slice, hash_of

ONE = Slice("a.txt", 3, 1, hash_of(b"abc"))


def test_a_manifest_survives_the_wire() -> None:
    manifest = Manifest("text", (ONE, Slice("b.txt", 2, 2, hash_of(b"\n\n"))))
    assert Manifest.unpack(manifest.packed) == manifest
    assert Manifest.unpack(memoryview(manifest.packed)).identity == manifest.identity
    assert (manifest.nbytes, manifest.samples) == (5, 3)
    with pytest.raises(ValueError, match="trailing characters"):
        Manifest.unpack(manifest.packed + b"\x90")


def with_one(*slice: Any) -> Any:
    return ["text", [[*slice]]]


@pytest.mark.parametrize(
    "wrong",
    [with_one("a", 0, 1, bytes(32)), with_one("a", SLICE_BYTES_MAX + 1, 1, bytes(32)), with_one("a", 3, 4, bytes(32)),
     with_one("a", 3, 0, bytes(32)), with_one("a", 3, 1, bytes(31)), with_one("a", 3, 1, "x" * 32),
     with_one("a", 3, 1, "A" * 43 + "="),  # 32 bytes as base64
     with_one("a", True, 1, bytes(32)), with_one(b"a", 3, 1, bytes(32)), with_one("a" * 257, 3, 1, bytes(32)),
     with_one("a", 3, 1), ["text", []], ["gif", [["a", 3, 1, bytes(32)]]], ["text", 3],
     [["text"], [["a", 3, 1, bytes(32)]]], 7],
)  # fmt: skip
def test_anything_else_is_no_manifest(wrong: Any) -> None:
    with pytest.raises(ValueError, match="no manifest"):
        Manifest.unpack(msgpack.packb(wrong))


@pytest.mark.parametrize(
    "begins",
    [
        b"\x92\xa4text\xdd" + (2**18).to_bytes(4, "big"),  # a list of slices
        b"\x92\xa4text\xdd" + (2**31).to_bytes(4, "big"),
        b"\x92\xa4text\x91\x94\xa1a\xdd" + (2**20).to_bytes(4, "big"),  # in place of a number
        b"\x92\xa4text\x91\x94\xdb" + (2**20).to_bytes(4, "big"),  # a long name
        b"\xdd" + (2**20).to_bytes(4, "big"),
    ],
)
def test_a_manifest_takes_no_more_memory_than_its_slices(begins: bytes) -> None:
    """A list without elements has one byte, and sixty as an object. None is made before it is known to fit."""
    packed = begins + b"\x90" * 2**20
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="no manifest"):
            Manifest.unpack(packed)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(packed)
    finally:
        tracemalloc.stop()
