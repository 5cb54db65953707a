"""The demo's output: during the run and at its end."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from p2p_diloco.cli.demo import _png
from p2p_diloco.cli.demo.facts import JoinCost, KillOutcome, NewcomerOutcome, Outcome, PeerOutcome, Row
from p2p_diloco.cli.demo.play import QUICK
from p2p_diloco.cli.demo.report import NO_PNG, report
from p2p_diloco.cli.demo.screen import Screen, progress
from p2p_diloco.cli.demo.stage import Player, Stage
from p2p_diloco.cli.processes import Lines
from p2p_diloco.observe.plot import Moment

# -- the screen


def player(name: str, steps: int, epoch: int, val_loss: float | None = None, killed: bool = False) -> Player:
    rows = [Row(0.0, step, step, epoch, 2.1, val_loss) for step in range(1, steps + 1)]
    child: Any = SimpleNamespace(name=name, status=None, killed=killed)
    return Player(child, Lines(Path("none")), rows=rows)


@pytest.fixture
def stage() -> Stage:
    """Three peers at outer step 3, and much to tell."""
    children: Any = SimpleNamespace(folder=Path("out"))
    stage = Stage(QUICK, children, lambda stage: None)
    stage.everyone = [player("alice", 65, 3, 2.25), player("bob", 50, 2, 2.4, killed=True), player("carol", 0, 0)]
    stage.moments = [Moment(50, "bob killed")]
    stage.story = [(float(n), f"happening {n} " + 10 * "and more ") for n in range(12)]
    return stage


def console_of(height: int) -> Console:
    return Console(file=StringIO(), force_terminal=True, width=80, height=height, legacy_windows=False)


@pytest.mark.parametrize(("height", "plotted"), [(12, False), (40, True)])
def test_the_live_view_fits_the_terminal(stage: Stage, height: int, plotted: bool) -> None:
    """The table always, the plot if there is room for one that can be read."""
    console = console_of(height)
    with Screen(console) as screen:
        screen.show(stage)
        assert screen._live is not None
        lines = console.render_lines(screen._live.get_renderable(), pad=False)
    text = ["".join(segment.text for segment in line) for line in lines]
    assert len(text) <= height
    assert "outer step 3 of 20" in text[0]
    assert any("bob" in line and "killed" in line for line in text)
    assert any("●" in line for line in text) == plotted


def test_the_whole_story_stays_on_the_terminal(stage: Stage) -> None:
    """Every sentence is there once and in full, with the last table; the curves are left to the report."""
    console = console_of(40)
    with Screen(console) as screen:
        screen.show(stage)
        screen.show(stage)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert [told.count(f"happening {n} ") for n in range(12)] == [1] * 12
    assert told.count("and more") == 12 * 10
    assert "●" not in told[told.rindex("p2p_diloco demo") :]


def test_without_a_terminal_each_sentence_is_a_line(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, with its time; the data's stdout stays empty."""
    story, stage.story = stage.story, stage.story[:1]
    with Screen() as screen:
        screen.show(stage)
        stage.story = story
        screen.show(stage)
    out, err = capsys.readouterr()
    assert [line.split()[2] for line in err.splitlines()] == [str(n) for n in range(12)]
    assert err.startswith("0:00 happening 0")
    assert out == ""


def test_progress_is_one_line(stage: Stage) -> None:
    """A peer without steps is named with what it does."""
    assert progress(stage) == "outer step 3 of 20: alice 65 steps, held-out 2.250; bob killed; carol starting"


# -- the report

PEER = PeerOutcome("alice", "finished", 400, 20, 9.0, 7.5, 12_000_000, 11_000_000, 232_000_000, "abc")
OUTCOME = Outcome(
    schema_version=1, seconds=60.0, cores=2, sync_every=20, epochs=20, parameters=217_664, bytes_per_parameter=2,
    data_parallel_bytes_per_step=580_437, peers=(PEER, replace(PEER, name="bob", fate="killed", digest="")),
    digest="abc", digests_equal=True, kill=KillOutcome("bob", 5, True, 1.5, 1.2),
    newcomer=NewcomerOutcome("dave", 12, 9.5, 8), join_cost=JoinCost(2.0, 2.3, 0.3, 6),
    steps=400, warm_start=100, swarm_loss=2.04, alone_loss=2.17,
    swarm_curve=((40.0, 2.4), (400.0, 2.04)), alone_curve=((40.0, 2.5), (400.0, 2.17)), folder="out", plot=None,
)  # fmt: skip


def test_the_report_says_what_was_measured() -> None:
    """The figures, what they are compared with, and where to get the PNG without matplotlib."""
    lines = report(OUTCOME, [], 80)
    assert max(len(line) for line in lines) <= 80
    text = " ".join(" ".join(lines).split())
    for part in (
        "the run 2.040, one peer alone 2.170: 0.130 nats a byte better",
        "bob, elected to average the next round, half-way from outer step 5 to 6",
        "1.5 s after the kill; a round took 1.2 s as a rule",
        "cost of joining held-out loss rose by 0.300 (15.0%) after dave joined, back after 6 rounds",
        "in the run 9.5 s after its start, at outer step 12; contributed to 8 rounds",
        "yes, on alice: abc",
        "232.0 MB 19x",
        "2·P·b·(K-1)/K",
        NO_PNG,
    ):
        assert part in text


def test_the_report_hides_no_failure() -> None:
    """A worse loss, unequal digests and a newcomer that came too late are said as plainly as success."""
    peers = (PEER, replace(PEER, name="carol", digest="def"))
    late = NewcomerOutcome("dave", None, None, 0)
    bad = replace(OUTCOME, swarm_loss=2.3, digest="", digests_equal=False, peers=peers, newcomer=late)
    text = "\n".join(report(bad, [], 100))
    for part in ("0.130 nats a byte WORSE", "NO: alice abc, carol def", "came too late"):
        assert part in text


@pytest.mark.parametrize(
    ("cost", "told"),
    [
        (JoinCost(2.0, 1.9, 0.0, 0), "held-out loss did not rise after dave joined"),
        (JoinCost(2.0, 2.1, 0.1, None), "rose by 0.100 (5.0%) after dave joined, and WAS NOT BACK when the run ended"),
        (None, "unknown: held-out loss was not measured both before and after dave joined"),
    ],
)
def test_the_cost_of_joining_is_said_in_plain_words(cost: JoinCost | None, told: str) -> None:
    """The cost is shown also if it is zero, lasts to the end or is unknown; it is not shown if no peer joined."""
    assert told in "\n".join(report(replace(OUTCOME, join_cost=cost), [], 110))
    unjoined = replace(OUTCOME, join_cost=None, newcomer=NewcomerOutcome("dave", None, None, 0))
    assert "cost of joining" not in "\n".join(report(unjoined, [], 110))


def test_without_matplotlib_there_is_no_png(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That is no error."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert _png(OUTCOME, [], tmp_path) is None
