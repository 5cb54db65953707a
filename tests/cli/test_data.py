"""`data` checks what it is given before it loads anything heavy."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_diloco.cli.app import app
from p2p_diloco.errors import ConfigError, NoBootstrapReached, UsageError
from p2p_diloco.net.certificates import RunKey

PEER = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
HERE, FAR = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}"


def refused(*arguments: str) -> BaseException:
    result = CliRunner().invoke(app, ["data", *arguments])
    assert result.exception is not None
    return result.exception


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").write_text("a\n")
    return "my text.txt"


def test_data_for_other_machines_needs_an_invitation(text: str) -> None:
    """Or the wish that everyone reads it."""
    error = refused(text, "--as", "text", "--initial-peers", FAR)
    assert isinstance(error, UsageError)
    assert str(error).startswith("--invite is missing, and other machines can reach this run; give it, or --open")


def test_an_invitation_must_let_its_holder_train(text: str, tmp_path: Path) -> None:
    key = RunKey(b"k" * 32)
    grant, seed = key.grant("observer", "eve", 2**33)
    from p2p_diloco.net.invitation import Invitation

    (tmp_path / "eve.invite").write_text(Invitation("main", (FAR,), grant, seed, key.secret).pack())
    (tmp_path / "eve.invite").chmod(0o600)
    error = refused(text, "--as", "text", "--invite", "eve.invite")
    assert isinstance(error, ConfigError)
    assert "invite=eve allows to watch the run, not to join it" in str(error)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--as=my text can't be the name of a data set"),
        (("--as", "a/b"), "--as=a/b can't be"),
        (("--as", "text", "--slice-bytes", "0"), "--slice-bytes=0 is no number of bytes"),
        (("--as", "text", "--slice-bytes", "1G"), "--slice-bytes=1G is no number of bytes from 1 to 134,217,728"),
        (("nothing", "--as", "text"), "PATH=nothing isn't there"),
    ],
)
def test_wrong_arguments_are_named(
    text: str, arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2p_diloco.cli.reach.check_initial_peers", lambda addresses: None)
    assert told in str(refused(text, *arguments, "--initial-peers", HERE))


def test_nobody_is_there(text: str) -> None:
    assert isinstance(refused(text, "--as", "text", "--initial-peers", HERE), NoBootstrapReached)
