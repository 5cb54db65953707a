"""Addresses that are remembered: newest first, not too many, not for ever, and never an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco import remembered as module
from p2p_diloco.remembered import KEPT, KEPT_FOR_S, file_of, remember, remembered


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1e9]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    return now


def test_what_was_met_comes_back(clock: list[float]) -> None:
    """Of this run alone; the newest first; without those that are named anyway."""
    remember("r", ["/a", "/b"])
    clock[0] += 10
    remember("r", ["/c", "/a"])
    remember("other", ["/x"])
    assert remembered("r") == ["/a", "/c", "/b"]
    assert remembered("r", but=["/c"]) == ["/a", "/b"]
    assert remembered("never") == []


def test_memory_is_short(clock: list[float]) -> None:
    """So many addresses, and none older than a week."""
    for number in range(KEPT + 5):
        clock[0] += 1
        remember("r", [f"/{number}"])
    assert len(remembered("r")) == KEPT
    assert remembered("r")[0] == f"/{KEPT + 4}"
    clock[0] += KEPT_FOR_S - 5
    assert len(remembered("r")) == 5
    clock[0] += 10
    assert remembered("r") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"/a": "soon", "b": 1, "/c": null}'])
def test_a_file_that_is_no_memory_is_none(text: str) -> None:
    remember("r", ["/a"])
    file_of("r").write_text(text)
    assert remembered("r") == []
    remember("r", ["/a"])
    assert remembered("r") == ["/a"]


def test_a_place_that_can_not_be_written_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    remember("r", ["/a"])
    assert remembered("r") == []
