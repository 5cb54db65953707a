"""`export` before it reads anything: a folder in use, and settings of a peer beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.cli import carry_out
from p2p_diloco.cli.export import _observer

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooW" + "A" * 44


def test_a_folder_in_use_is_refused_before_the_run_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No time is spent on a model that can't be written."""
    (tmp_path / "config.json").write_text("{}")
    assert carry_out(["export", "--out", str(tmp_path), "--initial-peers", ADDRESS]) == 3
    told = f"--out={tmp_path} has config.json already; choose another folder, or replace them with --force"
    assert told in capsys.readouterr().err


def test_a_peers_ports_and_identity_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may run beside a peer whose settings are in the environment."""
    for key, value in {"IDENTITY_PATH": "id.key", "DIRECT_PORT": "4001", "CHECKPOINT_DIR": "saved"}.items():
        monkeypatch.setenv(f"P2P_DILOCO_{key}", value)
    monkeypatch.setenv("P2P_DILOCO_RUN_ID", "r")
    local = _observer({"initial_peers": [ADDRESS]}, None)
    assert (local.run_id, local.initial_peers, local.role, local.client_mode) == ("r", (ADDRESS,), "observer", True)
    assert (local.identity_path, local.direct_port, local.checkpoint_dir) == (None, 0, None)
