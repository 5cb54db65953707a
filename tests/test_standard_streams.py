"""Processes that were started without some of the standard streams; and what a command of `join` and its peer
tell each other."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p_diloco.standard_streams import JOINED_FILE, show_log, tell_joined

OPENS = """
import os, sys
from p2p_diloco.standard_streams import keep_taken
keep_taken()
opened = os.open(os.devnull, os.O_RDONLY)
found = [os.get_inheritable(number) for number in range(3)]
os.write(int(sys.argv[1]), repr((opened > 2, found)).encode())
"""
TRAINS = """
import os, sys, torch
from p2p_diloco import Peer, RunConfig
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Peer(model, optimizer, config=RunConfig(sync_every=1, stop_after_epochs=1)) as peer:
    while not peer.finished:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
os.write(int(sys.argv[1]), b"trained")
"""


def said(script: str, closed: Sequence[int]) -> str:
    """What a script writes to the descriptor that it is given, if it is started with these descriptors closed."""

    def close() -> None:
        for number in closed:
            os.close(number)

    ours, theirs = os.pipe()
    try:
        command = [sys.executable, "-c", script, str(theirs)]
        subprocess.run(command, pass_fds=[theirs], preexec_fn=close, stdin=subprocess.DEVNULL, timeout=100)
    finally:
        os.close(theirs)
    with os.fdopen(ours) as file:
        return file.read()


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_what_is_opened_later_is_no_standard_stream(closed: tuple[int, ...]) -> None:
    """A closed stream becomes /dev/null, which child processes inherit; files opened later have higher numbers."""
    assert said(OPENS, closed) == "(True, [True, True, True])"


@pytest.mark.real
@pytest.mark.timeout(240)
def test_a_peer_trains_without_standard_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel to the node survives the start of the node, whose standard streams are others."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert said(TRAINS, (0,)) == "trained"


def test_letters_that_an_encoding_lacks_become_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that prints a name, or lines of a table, would end with an error otherwise."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    shows = "from p2p_diloco.standard_streams import make_usable; make_usable(); print('Zo\\u00eb \\u2500')"
    done = subprocess.run([sys.executable, "-c", shows], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "Zo? ?\n")


# -- a program that `join` started

OURS = logging.getLogger("p2p_diloco")


def forget_logging() -> None:
    """As in a program that has set up none; each test's end restores the loggers."""
    logging.getLogger().handlers[:] = []
    OURS.handlers[:] = []
    OURS.setLevel(logging.NOTSET)


def test_the_peer_leaves_the_file_that_join_looks_for(tmp_path: Path) -> None:
    """Once in the run. Outside a command of `join`, and where no file can be made, nothing happens."""
    tell_joined({})
    tell_joined({JOINED_FILE: "/nowhere/at/all"})
    tell_joined({JOINED_FILE: str(tmp_path / "joined")})
    assert [path.name for path in tmp_path.iterdir()] == ["joined"]


def test_a_command_without_logging_shows_our_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """From INFO on, on stderr; it stops when the command sets up logging later, so that no line comes twice."""
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    forget_logging()
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
    forget_logging()
    if environment:
        logging.basicConfig(stream=io.StringIO(), level=logging.ERROR)
    show_log(environment)
    assert OURS.handlers == []
    assert OURS.level == logging.NOTSET
