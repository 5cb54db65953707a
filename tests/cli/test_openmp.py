"""How the threads of a peer that trains wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.cli import carry_out, join
from p2p_diloco.cli.join import CHOSEN, sleeping_threads

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"


def test_threads_sleep_unless_the_user_has_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """One line says what was set; a choice of the user stands, and nothing is said."""
    caplog.set_level("INFO")
    assert sleeping_threads({"PATH": "/bin"}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert len(caplog.records) == 1
    assert [sleeping_threads({name: "1"}) for name in CHOSEN] == [{}] * len(CHOSEN)
    assert len(caplog.records) == 1


def test_a_command_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of `join` finds it in its environment."""
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(join, "check_initial_peers", lambda *_: None)
    told = tmp_path / "told"
    command = ["sh", "-c", f"printf %s \"$OMP_WAIT_POLICY\" > '{told}'"]
    assert carry_out(["join", "--initial-peers", ADDRESS, "--", *command]) == 0
    assert told.read_text() == "PASSIVE"
