"""`export` before it reads anything: flags that contradict each other, folders in use or without checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_diloco.cli import main
from p2p_diloco.cli.export import _observer

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooW" + "A" * 44


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and the sentence of a command that fails; it prints no data."""
    with pytest.raises(SystemExit) as ended:
        main(["export", *arguments])
    told = capsys.readouterr()
    assert told.out == ""
    return int(ended.value.code or 0), told.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--format", "onnx"], 2, "--format=onnx is not known; choose safetensors, hf, torch"),
        (["--dtype", "int8"], 2, "--dtype=int8 is not known; choose keep, float32, bfloat16, float16"),
        ([], 2, "--initial-peers names no address of a peer"),
        (["--checkpoint", "c", "--run-id", "r"], 2, "--run-id is for a run; leave it out, or leave out --checkpoint"),
        (["--checkpoint", "c"], 3, "--checkpoint=c holds no complete checkpoint; name another folder"),
        (["--initial-peers", ADDRESS], 4, "can't be reached"),
        (["--invite", "none.invite"], 3, "--invite=none.invite"),
    ],
)
def test_what_can_not_be_exported_is_one_sentence(
    arguments: list[str],
    code: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the exit code of its kind; nothing is written."""
    monkeypatch.chdir(tmp_path)
    got, told = refused(capsys, "--out", "model", *arguments)
    assert got == code, told
    assert sentence in told
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_before_the_run_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No time is spent on a model that can't be written."""
    (tmp_path / "config.json").write_text("{}")
    code, told = refused(capsys, "--out", str(tmp_path), "--initial-peers", ADDRESS)
    assert code == 3
    assert f"--out={tmp_path} has config.json already; choose another folder, or replace them with --force" in told


def test_a_peers_ports_and_identity_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may run beside a peer whose settings are in the environment."""
    for key, value in {"IDENTITY_PATH": "id.key", "DIRECT_PORT": "4001", "CHECKPOINT_DIR": "saved"}.items():
        monkeypatch.setenv(f"P2P_DILOCO_{key}", value)
    monkeypatch.setenv("P2P_DILOCO_RUN_ID", "r")
    local = _observer({"initial_peers": [ADDRESS]}, None)
    assert (local.run_id, local.initial_peers, local.role, local.client_mode) == ("r", (ADDRESS,), "observer", True)
    assert (local.identity_path, local.direct_port, local.checkpoint_dir) == (None, 0, None)
