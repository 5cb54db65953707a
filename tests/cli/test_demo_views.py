"""What the demo shows: while it goes on, and in the end."""

from __future__ import annotations

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from p2p_diloco.cli.demo import _png
from p2p_diloco.cli.demo import screen as screen_module
from p2p_diloco.cli.demo.facts import JoinCost, KillOutcome, NewcomerOutcome, Outcome, PeerOutcome
from p2p_diloco.cli.demo.report import NO_PNG, compared, report
from p2p_diloco.cli.demo.screen import Actor, Drawing, Happening, View, progress
from p2p_diloco.observe.plot import Moment

# -- the screen

ACTORS = (Actor("alice", "training", 3, 65, 2.1, 2.25), Actor("bob", "killed", 2, 50), Actor("carol", "starting"))
VIEW = View(
    elapsed_s=75.0, epoch=3, epochs=20, steps=400, folder="out", actors=ACTORS,
    curves=compared(((20.0, 2.4), (60.0, 2.25)), ()), moments=(Moment(50, "bob killed"),),
    happenings=tuple(Happening(float(n), f"happening {n} " + 10 * "and more ") for n in range(12)),
)  # fmt: skip


@pytest.mark.parametrize(("height", "plotted"), [(24, False), (40, True)])
def test_the_live_view_fits_the_terminal(height: int, plotted: bool) -> None:
    """As much as there is room for: the newest happenings always, each on one line, the plot if it can be read."""
    console = Console(file=StringIO(), force_terminal=True, width=80, height=height)
    live = Live(console=console, auto_refresh=False)
    Drawing(live).show(VIEW)
    lines = console.render_lines(live.get_renderable(), pad=False)
    text = ["".join(segment.text for segment in line) for line in lines]
    assert len(text) <= height
    assert "outer step 3 of 20" in text[0]
    assert any("bob" in line and "killed" in line for line in text)
    assert [line.split()[2] for line in text if "happening" in line] == [str(n) for n in range(4, 12)]
    assert any("●" in line for line in text) == plotted


def test_the_whole_demo_stays_on_the_terminal() -> None:
    """Once it is over, every happening is there in full; the curves are left to the report."""
    console = Console(file=StringIO(), force_terminal=True, width=80, height=24)
    live = Live(console=console, auto_refresh=False)
    drawing = Drawing(live)
    drawing.show(VIEW)
    drawing.leave()
    lines = console.render_lines(live.get_renderable(), pad=False)
    text = " ".join("".join(segment.text for segment in line).strip() for line in lines)
    assert all(f"happening {n} " in text for n in range(12))
    assert text.count("and more") == 12 * 10
    assert "●" not in text


def test_without_a_terminal_each_happening_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, with its time; the data's stdout stays empty."""
    shown = screen_module.Lines()
    shown.show(replace(VIEW, happenings=VIEW.happenings[:1]))
    shown.show(VIEW)
    out, err = capsys.readouterr()
    assert [line.split()[2] for line in err.splitlines()] == [str(n) for n in range(12)]
    assert err.startswith("0:00 happening 0")
    assert out == ""


def test_progress_is_one_line() -> None:
    """Who has no steps yet is named with what it does."""
    assert progress(VIEW) == "outer step 3 of 20: alice 65 steps, held-out 2.250; bob killed; carol starting"


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
        (None, "unknown: held-out loss was not judged both before and after dave joined"),
    ],
)
def test_the_cost_of_joining_is_said_in_plain_words(cost: JoinCost | None, told: str) -> None:
    """Also where there is none, where it lasted to the end, and where nobody knows; nothing where nobody joined."""
    assert told in "\n".join(report(replace(OUTCOME, join_cost=cost), [], 110))
    nobody = replace(OUTCOME, join_cost=None, newcomer=NewcomerOutcome("dave", None, None, 0))
    assert "cost of joining" not in "\n".join(report(nobody, [], 110))


def test_without_matplotlib_there_is_no_png(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That is no error."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert _png(OUTCOME, [], tmp_path) is None
