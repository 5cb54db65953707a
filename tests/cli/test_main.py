"""The command line as a user meets it: one sentence and the documented code for every mistake."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer

from p2p_diloco import __version__
from p2p_diloco.cli import app as app_module
from p2p_diloco.cli import carry_out
from p2p_diloco.errors import ConfigError, ConfigMismatch, GaveUpWaiting, NoBootstrapReached, P2PDilocoError
from p2p_diloco.standard_streams import JOINED_FILE

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
TO, EXPORT = ["join", "--initial-peers", ADDRESS], ["export", "--out", "model"]
SHOW = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]


def ours(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("P2P_DILOCO_")}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ours(dict(os.environ)):
        monkeypatch.delenv(name)


def mistakes() -> list[tuple[list[str], int, str]]:
    return [
        (["jion"], 2, "No such command 'jion'"),
        (["join", "--no-such-flag"], 2, "--no-such-flag"),
        (["join"], 2, "--initial-peers names no address"),
        (["set", "--initial-peers", ADDRESS], 2, "there is nothing to set; give e.g. --outer-lr"),
        (["set", "--initial-peers", ADDRESS, "--outer-lr", "0.5"], 2, "--identity-path names no key to sign with"),
        (
            ["set", "--initial-peers", ADDRESS, "--outer-lr", "1", "--identity-path", "/no/such/key"],
            3,
            "--identity-path=/no/such/key can't be read",
        ),
        (["bootstrap", "--initial-peers", "nowhere"], 2, "--initial-peers=nowhere is no multiaddr"),
        ([*TO, "--sync-every", "2", "--num-fragments", "3"], 3, "--sync-every=2 is less than"),
        ([*TO, "--width", "3", "--heads", "2"], 3, "--width=3 is not a multiple of heads=2"),
        ([*TO, "--checkpoint-dir", "/dev/null/x"], 3, "--checkpoint-dir=/dev/null/x can't be written"),
        ([*TO, "--logs", "loud", "--", "true"], 2, "--logs=loud is not known"),
        ([*TO, "--"], 2, "-- names no command"),
        (["join", "python", "train.py"], 2, "'python' is neither an option nor an address; leave it out, or put --"),
        ([*TO, "python", "train.py"], 2, "'python' is neither an option nor an address; leave it out, or put --"),
        ([*TO, "--steps", "5", "--", "true"], 2, "--steps is for the built-in trainer"),
        (["bootstrap", "--host", "example.org"], 2, "--host=example.org is no IP address"),
        (["bootstrap", "--host", "203.0.113.7"], 3, "--host=203.0.113.7 is no address of this machine"),
        (["bootstrap", "--identity-path", "/dev/null/x"], 3, "--identity-path=/dev/null/x can't be written"),
        (["bootstrap", "--host-maddrs", ADDRESS], 2, "names a peer"),
        (["bootstrap", "--initial-peers", ADDRESS], 4, "nothing listens there"),
        (TO, 4, "nothing listens there"),
        ([*TO, "--from-checkpoint", "/", "--", "true"], 3, "--from-checkpoint=/ holds no complete checkpoint"),
        (
            [*TO, "--host-maddrs", "/ip4/203.0.113.7/tcp/0", "--", "true"],
            3,
            "--host-maddrs=/ip4/203.0.113.7/tcp/0 is",
        ),
        ([*TO, "--role", "observer"], 2, "--role=observer trains nothing; read the model with"),
        ([*EXPORT, "--format", "onnx"], 2, "--format=onnx is not known; choose safetensors, hf, torch"),
        ([*EXPORT, "--dtype", "int8"], 2, "--dtype=int8 is not known; choose keep, float32, bfloat16, float16"),
        (EXPORT, 2, "--initial-peers names no address of a peer"),
        ([*EXPORT, "--checkpoint", "c", "--run-id", "r"], 2, "--run-id is for a run; leave it out, or leave out --ch"),
        ([*EXPORT, "--checkpoint", "c"], 3, "c holds no complete checkpoint; name another folder"),
        ([*EXPORT, "--initial-peers", ADDRESS], 4, "can't be reached"),
        ([*EXPORT, "--invite", "none.invite"], 3, "--invite=none.invite"),
        (["status", "--initial-peers", ADDRESS, "--baseline", "/no/such/file"], 3, "--baseline=/no/such/file can't be"),
        (["dashboard", "--initial-peers", ADDRESS, "--baseline", "/dev/null"], 3, "--baseline=/dev/null has no line"),
    ]


@pytest.mark.parametrize(("arguments", "code", "told"), mistakes(), ids=lambda part: str(part)[-60:])
def test_a_mistake_is_one_sentence_and_its_code(
    arguments: list[str],
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing on stdout, one line on stderr that names what is wrong, and the documented exit code. Nothing is
    written."""
    monkeypatch.chdir(tmp_path)
    assert carry_out(arguments) == code
    assert list(tmp_path.iterdir()) == []
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_further_ranks_of_torchrun_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun `join` itself is no sharded group: it says so at once, and doesn't hang."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    assert carry_out([*TO, "--", "true"]) == 3
    assert "write torchrun after the --" in capsys.readouterr().err


Raising = Callable[[BaseException], None]


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> Raising:
    """What any command raises from now on."""

    def set_up(error: BaseException) -> None:
        monkeypatch.setattr(app_module, "app", Mock(side_effect=error))

    return set_up


class Misused(Exception):
    """What any version of typer raises when it can't read a command line: only the method is common to them."""

    def format_message(self) -> str:
        return "No such option: --x."


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (GaveUpWaiting("nobody came", key="wait_timeout", value=3), 7, ": --wait-timeout=3 nobody came"),
        (NoBootstrapReached("can't be reached", key="initial_peers"), 4, ": --initial-peers can't be reached"),
        (ConfigError("may not be set", key="outer_options.foreach"), 3, ": outer_options.foreach may not be set"),
        (ConfigError("is wrong", key="run.toml: sync_every"), 3, ": run.toml: sync_every is wrong"),
        (
            ConfigMismatch([("sync_every", 4, 8), ("codec", "fp32", "bf16")], run_id="main"),
            5,
            ": --run-id=main differs from this peer's settings in --sync-every (the run's 4 / yours 8), --codec (",
        ),
        (P2PDilocoError("broke"), 1, "broke"),
        (RuntimeError("three\nlines\nlong"), 1, "a fault in p2p-diloco itself (RuntimeError: three lines long)"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            ": the output can't be written (no space left on device)",
        ),
        (OSError(errno.EDQUOT, "Over quota", "/a/b"), 1, ": /a/b can't be written (over quota); make room there"),
        (Misused(), 2, ": No such option: --x\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda part: type(part).__name__,
)
def test_whatever_is_raised_becomes_a_code(
    raised: BaseException, code: int, told: str, raising: Raising, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors become sentences and exit codes in one place: settings are written as flags, and a fault of ours is told
    as such."""
    raising(raised)
    assert carry_out([]) == code
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


def test_a_reader_that_has_gone_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """`p2p-diloco status | head -1` ends without a word."""
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    nobody = io.StringIO()
    monkeypatch.setattr(app_module, "app", app)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # typer replaces both
    monkeypatch.setattr(sys, "stderr", nobody)
    assert carry_out([]) == 0
    assert nobody.closed


def test_debug_shows_where(raising: Raising, capsys: pytest.CaptureFixture[str]) -> None:
    """With --debug the traceback comes before the sentence; after -- the flag is the command's."""
    raising(RuntimeError("broke"))
    assert carry_out(["join", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert carry_out(["join", "--", "x", "--debug"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_version_and_help_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Requested output is data on stdout, with exit code 0."""
    assert carry_out(["--version"]) == 0
    assert capsys.readouterr().out == f"p2p-diloco {__version__}\n"
    for arguments in ([], ["--help"], ["join", "--help"], ["status", "-h"]):
        assert carry_out(arguments) == 0
        assert "Usage: p2p-diloco" in capsys.readouterr().out


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("P2P_DILOCO_")}
    return subprocess.run(
        [sys.executable, "-m", "p2p_diloco", *arguments],
        env={**clean, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.real
def test_a_command_gets_the_settings(tmp_path: Path) -> None:
    """Flags, variables and file reach the command as variables, in every spelling of the list."""
    file = tmp_path / "run.toml"
    file.write_text("sync_every = 40\nnum_fragments = 4\n")
    second = ADDRESS.replace("/tcp/9", "/udp/9/quic-v1")  # which can't be checked before the command starts
    result = run(
        "join", "--initial_peers", ADDRESS, second, "--config", str(file), "--no-nesterov", "--", *SHOW,
        P2P_DILOCO_NUM_FRAGMENTS="8",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert ours(json.loads(result.stdout)) == {
        JOINED_FILE: json.loads(result.stdout)[JOINED_FILE],
        "P2P_DILOCO_INITIAL_PEERS": f"{ADDRESS} {second}",
        "P2P_DILOCO_SYNC_EVERY": "40",
        "P2P_DILOCO_NUM_FRAGMENTS": "8",
        "P2P_DILOCO_NESTEROV": "false",
        "P2P_DILOCO_RUN_ID": "main",
    }


@pytest.mark.real
def test_help_is_there_without_docstrings() -> None:
    """Python drops docstrings at the second level of optimisation, which some images set."""
    result = run("join", "--help", PYTHONOPTIMIZE="2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--sync-every" in result.stdout


@pytest.mark.real
def test_a_command_that_never_joins_is_told() -> None:
    """With its exit code, the run's name and the mend. Its exit code is kept. None if a signal has ended it."""
    address = ADDRESS.replace("/tcp/9", "/udp/9/quic-v1")
    result = run("join", "--initial-peers", address, "--", sys.executable, "-c", "raise SystemExit(5)")
    assert result.returncode == 5
    assert "the command ended with exit code 5 and never joined the run main" in result.stderr
    assert "Peer.from_env(model, optimizer)" in result.stderr
    result = run("join", "--initial-peers", address, "--", "sh", "-c", "kill -s TERM $$")
    assert result.returncode == 143
    assert "never joined" not in result.stderr


def test_an_invitation_among_the_arguments_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Other users see it in the list of processes; a variable or a file isn't seen."""
    assert carry_out(["join", "--invite", "x" * 400]) == 3
    assert "other users of this machine can read --invite" in capsys.readouterr().err
    assert carry_out(["join", "--invite", "there-is-none.invite"]) == 3
    assert "other users" not in capsys.readouterr().err


def test_filters_that_make_warnings_errors_are_not_for_commands() -> None:
    """A bootstrap ended: Hivemind, which it loads, warns. They are for the programs of users."""
    warns = "import warnings; from p2p_diloco import cli; cli.carry_out = lambda _: warnings.warn('old') or 0"
    command = [sys.executable, "-W", "error", "-c", f"{warns}; cli.main([])"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, "UserWarning: old" in done.stderr) == (0, True)
