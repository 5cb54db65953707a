"""What a command of `join` and its peer tell each other."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2p_diloco.wrapped import JOINED_FILE, show_log, tell_joined

OURS = logging.getLogger("p2p_diloco")


@contextmanager
def no_logging() -> Iterator[None]:
    """A block in which the program has set up no logging."""
    root = logging.getLogger()
    before, ours, level = root.handlers[:], OURS.handlers[:], OURS.level
    root.handlers[:], OURS.handlers[:] = [], []
    OURS.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        root.handlers[:], OURS.handlers[:] = before, ours
        OURS.setLevel(level)


def test_the_peer_leaves_the_file_that_join_looks_for(tmp_path: Path) -> None:
    """Once in the run. Outside a command of `join`, and where no file can be made, nothing happens."""
    tell_joined({})
    tell_joined({JOINED_FILE: "/nowhere/at/all"})
    tell_joined({JOINED_FILE: str(tmp_path / "joined")})
    assert [path.name for path in tmp_path.iterdir()] == ["joined"]


def test_a_command_without_logging_shows_our_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """From INFO on, on stderr; it stops when the command sets up logging later, so that no line comes twice."""
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    with no_logging():
        show_log({JOINED_FILE: "x"})
        OURS.info("one")
        OURS.debug("two")
        logging.basicConfig(stream=(own := io.StringIO()), level=logging.INFO)
        OURS.info("three")
    assert " INFO p2p_diloco: one\n" in err.getvalue()
    assert "two" not in err.getvalue()
    assert "three" not in err.getvalue()
    assert own.getvalue().count("three") == 1


@pytest.mark.parametrize("environment", [{}, {JOINED_FILE: "x"}])
def test_logging_of_the_command_stays_as_it_is(environment: dict[str, str]) -> None:
    """Outside a command of `join`, and where the command has set up logging, nothing is changed."""
    with no_logging():
        if environment:
            logging.basicConfig(stream=io.StringIO(), level=logging.ERROR)
        show_log(environment)
        assert OURS.handlers == []
        assert OURS.level == logging.NOTSET
