"""Errors: one tree, one sentence each, the same on both sides of a channel."""

from __future__ import annotations

import msgpack
import pytest

from p2p_diloco import errors
from p2p_diloco.errors import (
    AddressError,
    CheckpointError,
    ConfigError,
    ConfigMismatch,
    GaveUpWaiting,
    ModelMismatch,
    NoBootstrapReached,
    NodeDied,
    P2PDilocoError,
    RankDied,
    Refused,
    UsageError,
    from_wire,
)

EVERY_KIND = [
    P2PDilocoError("broke"),
    UsageError("is unknown", key="--foo", value="x"),
    AddressError("is no multiaddr", key="initial_peers", value="x", mend="write it like /ip4/..."),
    ConfigError("must be at least 1", key="sync_every", value=0, mend="choose e.g. 500"),
    CheckpointError("has no manifest", key="from_checkpoint", value="/a"),
    NoBootstrapReached("did not answer", key="initial_peers", value=["/a", "/b"]),
    Refused("doesn't know you", key="run_id", value="main"),
    ConfigMismatch([("sync_every", 500, 100), ("nesterov", True, False)], run_id="main"),
    ModelMismatch(["w: [2, 2] in the run, [2, 3] here"], run_id="main"),
    GaveUpWaiting("no peer came", key="wait_timeout", value=300.0, mend="wait longer"),
    NodeDied("the node ended"),
    RankDied("rank 1 of this peer has ended"),
]


@pytest.mark.parametrize("error", EVERY_KIND, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_channel(error: P2PDilocoError) -> None:
    """The trainer gets the node's error: same class, same sentence, same fields."""
    back = from_wire(msgpack.unpackb(msgpack.packb(error.to_wire())))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_every_kind_is_tried_above_and_drawn() -> None:
    """Names and exit codes in the docstring's drawing are those of the classes."""
    kinds = set(errors._tree(P2PDilocoError))
    assert {type(error) for error in EVERY_KIND} == kinds
    for kind in kinds:
        (line,) = [line for line in (errors.__doc__ or "").splitlines() if f" {kind.__name__} " in f" {line} "]
        assert f"exit {kind.exit_code}" in line


def test_a_sentence_names_key_value_and_mend() -> None:
    """A user learns what is wrong, with which value, and what to do, on one line."""
    error = ConfigError("must be\n at least 1", key="sync_every", value=0, mend="choose e.g. 500")
    assert str(error) == "sync_every=0 must be at least 1; choose e.g. 500"


def test_keys_can_be_spelled_otherwise() -> None:
    """Where a user writes settings in another way, the sentence can, too; the error itself is unchanged."""
    for error in EVERY_KIND:
        before = str(error)
        assert error.spelled(str) == before == str(error)
        assert not error.key or error.spelled(str.upper).startswith(error.key.upper())


def test_a_mismatch_shows_both_values() -> None:
    """A refused joiner sees the run's value beside its own, for each key, and a readable part of a long list."""
    mismatch = ConfigMismatch([("sync_every", 500, 100), ("nesterov", True, False)], run_id="main")
    assert "sync_every (the run's 500 / yours 100), nesterov (the run's on / yours off)" in str(mismatch)
    assert "SYNC_EVERY (the run's 500" in mismatch.spelled(str.upper)
    long = ModelMismatch([f"layer {index}" for index in range(100)], run_id="main")
    assert "layer 7 and 92 more" in str(long)
    assert "layer 8" not in str(long)
    assert len(long.differences) == 100


@pytest.mark.parametrize("wire", [{}, {"error": "NoSuchError"}, {"error": "ModelMismatch"}, {"error": 3, "wrong": 4}])
def test_an_unreadable_error_is_still_an_error(wire: dict[str, object]) -> None:
    """Anything that arrives over the channel becomes an error that can be raised and shown."""
    assert type(from_wire(wire)) is P2PDilocoError


def test_lists_in_lists_are_shown_so_far() -> None:
    """A damaged file may have any number of them."""
    deep: list[object] = []
    for _ in range(10_000):
        deep = [deep]
    assert str(ConfigError("is no number", key="successors", value=deep)) == "successors=... is no number"
