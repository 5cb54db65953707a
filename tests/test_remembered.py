"""Remembered addresses: newest first, limited in number and age, and never an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco import remembered as module
from p2p_diloco.remembered import KEPT, KEPT_FOR_S, file_of, remember, remembered

PEER = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"


def at(port: int) -> str:
    return f"/ip4/10.0.0.1/tcp/{port}/p2p/{PEER}"


A, B, C, X = (at(port) for port in (1, 2, 3, 4))
BOOT = "/ip4/10.0.0.9/tcp/9/p2p/12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8"
OTHER_BOOT = "/ip4/10.0.0.9/tcp/9/p2p/12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1e9]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    return now


def test_met_addresses_are_remembered(clock: list[float]) -> None:
    """Only of this run; the newest first; without those that are given anyway."""
    remember("r", [BOOT], [A, B])
    clock[0] += 10
    remember("r", [BOOT], [C, A])
    remember("other", [BOOT], [X])
    assert remembered("r", [BOOT]) == [A, C, B]
    assert remembered("r", [BOOT, C]) == [A, B]
    assert remembered("never", [BOOT]) == []


def test_addresses_lead_only_into_the_swarm_in_which_they_were_met(clock: list[float]) -> None:
    """Of two swarms with a run of one name, the other's addresses are never used; at another address, or as one of
    several initial peers, the same initial peer leads to its own."""
    remember("r", [BOOT], [A])
    clock[0] += 10
    remember("r", [OTHER_BOOT, C], [B])
    assert remembered("r", [BOOT]) == [A]
    assert remembered("r", [OTHER_BOOT]) == remembered("r", [X]) == [B]  # X and C are addresses of one peer
    assert remembered("r", [BOOT, OTHER_BOOT]) == [B, A]
    assert remembered("r", [BOOT.replace("/ip4/10.0.0.9", "/dns4/boot.example")]) == [A]
    assert remembered("r", []) == []


def test_only_its_owner_reads_the_file() -> None:
    """It tells where the peers of a private run are. A file that an earlier version wrote changes, too."""
    file_of("r").parent.mkdir(parents=True)
    file_of("r").write_text("{}")
    file_of("r").chmod(0o644)
    remember("r", [BOOT], [A])
    assert file_of("r").stat().st_mode & 0o777 == 0o600


def test_memory_is_short(clock: list[float]) -> None:
    """A limited number of addresses, and none older than a week."""
    for number in range(KEPT + 5):
        clock[0] += 1
        remember("r", [BOOT], [at(100 + number)])
    assert len(remembered("r", [BOOT])) == KEPT
    assert remembered("r", [BOOT])[0] == at(100 + KEPT + 4)
    clock[0] += KEPT_FOR_S - 5
    assert len(remembered("r", [BOOT])) == 5
    clock[0] += 10
    assert remembered("r", [BOOT]) == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"/a": "soon", "b": 1, "/c": null, "/garbage": 99999999999}', f'{{"x": {{"{A}": 1{"0" * 400}}}}}'],
)
def test_a_file_that_is_no_memory_is_none(text: str) -> None:
    remember("r", [BOOT], [A])
    file_of("r").write_text(text)
    assert remembered("r", [BOOT]) == []
    remember("r", [BOOT], [A])
    assert remembered("r", [BOOT]) == [A]


def test_without_a_folder_that_can_be_written_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user without an entry in the user database has no home folder."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(module.Path, "home", homeless)
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), None):
        monkeypatch.setenv("XDG_STATE_HOME", folder) if folder else monkeypatch.delenv("XDG_STATE_HOME")
        remember("r", [BOOT], [A])
        assert remembered("r", [BOOT]) == []
