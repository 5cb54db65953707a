"""A manifest is a value that any bytes give, or refuse to."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_diloco.data.manifest import SLICE_BYTES_MAX, Manifest, Slice, hash_of

ONE = Slice("a.txt", 3, 1, hash_of(b"abc"))


def test_a_manifest_survives_the_wire() -> None:
    manifest = Manifest("text", (ONE, Slice("b.txt", 2, 2, hash_of(b"\n\n"))))
    assert Manifest.unpack(manifest.packed) == manifest
    assert Manifest.unpack(memoryview(manifest.packed)).identity == manifest.identity
    assert (manifest.nbytes, manifest.samples) == (5, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        ["text", []],
        ["gif", [["a", 3, 1, bytes(32)]]],
        ["text", [["a", 0, 1, bytes(32)]]],
        ["text", [["a", SLICE_BYTES_MAX + 1, 1, bytes(32)]]],
        ["text", [["a", 3, 4, bytes(32)]]],
        ["text", [["a", 3, 0, bytes(32)]]],
        ["text", [["a", 3, 1, bytes(31)]]],
        ["text", [["a", 3, 1, "x" * 32]]],
        ["text", [["a", True, 1, bytes(32)]]],
        ["text", [[b"a", 3, 1, bytes(32)]]],
        ["text", [["a" * 257, 3, 1, bytes(32)]]],
        ["text", [["a", 3, 1]]],
        ["text", 3],
        [["text"], [["a", 3, 1, bytes(32)]]],
        7,
    ],
)
def test_anything_else_is_no_manifest(wrong: Any) -> None:
    with pytest.raises(ValueError, match="no manifest"):
        Manifest.unpack(msgpack.packb(wrong))


@given(st.binary(max_size=60))
def test_any_bytes_give_a_manifest_or_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="no manifest"):
        Manifest.unpack(content)


def test_a_slice_knows_its_bytes() -> None:
    assert ONE.is_hash_of(b"abc")
    assert not ONE.is_hash_of(b"abd")
