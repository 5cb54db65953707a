"""`replay`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p_diloco.cli import carry_out
from tests.history.recorded import RecordedWorld

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in which p0 dies after 7 s."""
    folder = tmp_path_factory.mktemp("histories")
    world = RecordedWorld(folder, 1)
    world.run(7.0)
    world.crash("p0")
    world.run(20.0)
    return folder


@pytest.fixture
def replay(histories: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Replay:
    """The command on these histories."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*flags: str) -> tuple[int, str, str]:
        code = carry_out(["replay", str(histories), *flags])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


def test_the_story(replay: Replay) -> None:
    """Fewer than 30 lines of at most 80 columns, with the death and what followed; and as one JSON object."""
    code, told, _ = replay()
    lines = told.splitlines()
    assert code == 0
    assert "run r: 3 histories" in lines[0]
    assert len(lines) < 30
    assert max(map(len, lines)) <= 80
    assert "p0 dies: its history ends without a goodbye" in told
    story = json.loads(replay("--json")[1])
    assert story["peers"] == ["p0", "p1", "p2"]
    assert [line["kind"] for line in story["lines"]].count("death") == 1
    assert [one["epoch"] for one in story["rounds"]] == list(range(1, len(story["rounds"]) + 1))


def test_a_round(replay: Replay) -> None:
    """How long it took, the causes, which fill that time, and when the others had the result."""
    code, told, _ = replay("--round", "4")
    first, _, _, *hops, last = told.splitlines()
    took = float(first.split(" took ")[1].split(" s")[0])
    spent = [(float(until), float(since)) for since, _, until, *_ in map(str.split, hops)]
    assert code == 0
    assert (spent[0][1], spent[-1][0]) == (0.0, pytest.approx(took, abs=0.01))
    assert "inner steps" in told
    assert last.startswith("the others had the result later: ")


def test_events(replay: Replay) -> None:
    """Every event, in order; with --peer those of one peer alone."""
    _, told, _ = replay("--events")
    _, alone, _ = replay("--events", "--peer", "p1")
    assert {line.split()[1] for line in told.splitlines()} == {"p0", "p1", "p2"}
    assert alone.splitlines() == [line for line in told.splitlines() if line.split()[1] == "p1"]


def test_check(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is 0 if every effect is as recorded, and 1 if the core does something else today."""
    code, told, _ = replay("--check")
    assert code == 0
    assert told.count("led to the recorded effects") == told.count("\n") == 3
    from p2p_diloco.core.roster import Roster

    monkeypatch.setattr(Roster, "failed", lambda self, peer: False)
    code, told, _ = replay("--check")
    assert code == 1
    assert "the next one has another effect than recorded: " in told


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--round", "99"), 2, "--round=99 is not in the histories; choose 1 to "),
        (("--round", "1", "--check"), 2, "exclude each other"),
        (("--peer", "p1"), 2, "--peer=p1 needs --events"),
        (("--events", "--peer", "px"), 2, "--peer=px has no history here; choose p0, p1, p2"),
        (("--run-id", "other"), 3, "has no history of the run other; runs there: r"),
        (("/nowhere",), 3, "is no history"),
    ],
)
def test_what_cannot_be_done(replay: Replay, flags: tuple[str, ...], code: int, says: str) -> None:
    """One sentence that says why, and what to do."""
    found, _, told = replay(*flags)
    assert found == code
    assert says in told
    assert len(told.splitlines()) == 1
