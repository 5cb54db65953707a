"""The demo: its formulas, its processes, and the whole of it with real peers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from p2p_diloco.cli import processes as processes_module
from p2p_diloco.cli.demo import demo
from p2p_diloco.cli.demo.facts import (
    JoinCost,
    Row,
    commit_times,
    curve,
    held_out,
    join_cost,
    next_commit_s,
    ring_bytes,
    start_wait_s,
    usual_round_s,
)
from p2p_diloco.cli.demo.play import QUICK
from p2p_diloco.cli.demo.stage import Player, Stage
from p2p_diloco.cli.processes import Child, Children, Lines
from p2p_diloco.core.election import assign
from p2p_diloco.errors import ConfigError, P2PDilocoError

# -- formulas


def rows(*steps: tuple[float, int, int], val_loss: float | None = None) -> list[Row]:
    """Rows of (time, step, epoch)."""
    return [Row(when, step, step, epoch, 2.0, val_loss) for when, step, epoch in steps]


@pytest.mark.parametrize("peers", [2, 3, 7])
def test_a_ring_sends_what_the_formula_says(peers: int) -> None:
    """A reduce-scatter and an all-gather, passed on piece by piece, send 2·P·b·(K−1)/K bytes a peer."""
    pieces, sent, each = 420 // peers, 0, 2
    for _ in ("reduce-scatter", "all-gather"):
        for _turn in range(peers - 1):
            sent += pieces * each
    assert ring_bytes(420, each, peers) == sent


def test_commits_are_seen_by_the_change_of_epoch() -> None:
    """The epoch that a peer came in with is no commit that it saw; each later one counts once."""
    seen = rows((1.0, 1, 4), (2.0, 2, 5), (3.0, 3, 5), (7.0, 4, 6))
    assert commit_times(seen) == {5: 2.0, 6: 7.0}
    assert usual_round_s(seen, until=10.0) == 5.0
    assert usual_round_s(seen, until=7.0) is None


def test_the_next_commit_is_the_last_survivors() -> None:
    """The time is known only once all survivors have a commit; an earlier commit doesn't count."""
    fast, slow = rows((1.0, 1, 1), (2.0, 2, 2), (9.0, 3, 3)), rows((1.0, 1, 2), (9.5, 2, 3))
    assert next_commit_s([fast, slow], 2, since=8.0) == 1.5
    assert next_commit_s([fast, slow[:1]], 2, since=8.0) is None


def test_the_founders_first_round_is_a_wait_for_others() -> None:
    """The founder's wait is reported separately from later waiting; a peer that joins later has none."""
    assert start_wait_s(rows((1.0, 19, 0), (8.5, 20, 1), (9.0, 21, 1)), 20) == 7.5
    assert start_wait_s(rows((1.0, 1, 3), (8.5, 2, 4)), 20) == 0.0


def test_the_held_out_curve_joins_all_peers() -> None:
    """Outer steps that only one peer has judged (one died, one came late) are there; shared ones once, also where a
    peer has made inner steps since."""
    early, late = rows((1.0, 20, 1), (2.0, 40, 2), val_loss=2.0), rows((3.0, 43, 2), (4.0, 60, 3), val_loss=1.0)
    losses = held_out([early, late])
    assert losses == {1: 2.0, 2: 1.5, 3: 1.0}
    assert curve(losses, 20) == ((20.0, 2.0), (40.0, 1.5), (60.0, 1.0))


@pytest.mark.parametrize(
    ("losses", "cost"),
    [
        ({2: 2.5, 4: 2.0, 6: 2.25, 8: 2.3, 10: 2.1, 12: 1.9}, JoinCost(2.0, 2.3, pytest.approx(0.3), 7)),
        ({5: 2.0, 6: 1.75, 8: 2.25, 10: 2.0}, JoinCost(2.0, 2.25, 0.25, 5)),  # lower at first, then higher
        ({4: 2.0, 6: 2.25, 8: 2.5}, JoinCost(2.0, 2.5, 0.5, None)),
        ({4: 2.0, 6: 2.0, 8: 1.9}, JoinCost(2.0, 2.0, 0.0, 0)),
        ({6: 2.0, 8: 1.9}, None),
        ({2: 2.5, 5: 2.0}, None),
        ({}, None),
    ],
)
def test_the_cost_of_a_join_is_told_by_the_losses_around_it(losses: dict[int, float], cost: JoinCost | None) -> None:
    """A peer came in at outer step 5: the last loss until then, the highest one afterwards, and when it was back.
    What is judged at outer step 5 itself is none of the newcomer's doing."""
    assert join_cost(losses, 5) == cost


# -- processes

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}])"


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    """Children that have little time to end."""
    monkeypatch.setattr(processes_module, "LEAVE_S", 0.2)
    with Children(tmp_path) as made:
        yield made


def started(children: Children, code: str, name: str = "child") -> Child:
    """A child that runs code, known to the children."""
    return children.start(name, [sys.executable, "-c", code])


def wait_until(condition: Any, within_s: float = 20.0) -> None:
    """Poll for something that other processes do."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more."""
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_only_whole_lines_are_read(tmp_path: Path) -> None:
    """A line that is being written waits for its end; none comes twice; a file that isn't there is empty."""
    lines = Lines(tmp_path / "x.jsonl")
    assert lines.new() == []
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a"')
    assert lines.new() == [{"a": 1}]
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write(": 2}\n")
    assert lines.new() == [{"a": 2}]


def test_a_kill_takes_the_whole_family(children: Children) -> None:
    """As after a power cut, no process that the killed one has started is left."""
    child = started(children, PARENT)
    wait_until(lambda: child.printed.new())
    family = [psutil.Process(child.process.pid), *psutil.Process(child.process.pid).children(recursive=True)]
    assert len(family) == 2
    child.kill()
    wait_until(lambda: gone(family))
    assert child.status == -signal.SIGKILL


def test_nothing_is_left_when_the_demo_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a process that ignores SIGTERM nor its children are left."""
    monkeypatch.setattr(processes_module, "LEAVE_S", 0.2)
    with Children(tmp_path) as children:
        child = started(children, PARENT)
        wait_until(lambda: child.printed.new())
        family = psutil.Process(child.process.pid).children(recursive=True)
        assert family
    assert child.status is not None
    wait_until(lambda: gone(family))


def test_nothing_is_left_when_the_demo_is_killed(tmp_path: Path) -> None:
    """A SIGKILL can't be caught: the system ends the others."""
    code = (
        "import sys, time; from pathlib import Path; from p2p_diloco.cli.processes import Children, module\n"
        f"children = Children(Path({str(tmp_path)!r}))\n"
        "child = children.start('idle', module('http.server', '0'))\n"
        "print(child.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        idle = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_until(lambda: gone([idle]))


def test_a_second_interrupt_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While processes have time to end, ^C takes it from them."""
    monkeypatch.setattr(processes_module, "LEAVE_S", 60.0)
    began = time.monotonic()
    children = Children(tmp_path)
    child = started(children, STUBBORN)
    wait_until(lambda: child.printed.new())
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        children.__exit__()
    assert child.status == -signal.SIGKILL
    assert time.monotonic() - began < 30


# -- the stage


@pytest.fixture
def stage(children: Children) -> Stage:
    return Stage(QUICK, children, lambda stage: None)


def player(stage: Stage, name: str, code: str) -> Player:
    """A player that runs code."""
    made = Player(started(stage.children, code, name), Lines(stage.children.folder / f"{name}.jsonl"))
    stage.everyone.append(made)
    return made


def test_a_death_ends_the_demo_with_a_sentence(stage: Stage) -> None:
    """It names the process, how it ended, its last words and its log; a peer that the demo has killed is no failure."""
    child = player(stage, "carol", "import sys; sys.exit('no memory left')").child
    wait_until(lambda: child.status is not None)
    with pytest.raises(P2PDilocoError, match=r"carol ended with status 1 \(no memory left\); its log is .*carol.log"):
        stage.until(lambda: False, "nothing")
    child.kill()
    stage.until(lambda: True, "nothing")


def test_a_demo_in_which_nothing_happens_ends(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting is bounded, and says what was waited for."""
    monkeypatch.setattr("p2p_diloco.cli.demo.stage.PATIENCE_S", 0.05)
    with pytest.raises(P2PDilocoError, match="waiting for the moon"):
        stage.until(lambda: False, "the moon")


def test_the_onlooker_repeats_the_election(stage: Stage) -> None:
    """Among the living alone, and only when all of them are known."""
    for name in ("a", "b"):
        player(stage, name, STUBBORN).rows = rows((0.0, 1, 1))
    assert stage.averages_next(1) is None
    (stage.children.folder / "status.out").write_text(
        '{"peers": [{"name": "a", "peer_id": "x"}, {"name": "b", "peer_id": "y"}]}\n'
    )
    stage.until(lambda: True, "a look")
    elected = [assign("demo", epoch, [0], {"x": 1.0, "y": 1.0})[0][0] for epoch in range(20)]
    assert [stage.averages_next(epoch) for epoch in range(20)] == [{"x": "a", "y": "b"}[peer] for peer in elected]
    assert set(elected) == {"x", "y"}
    stage.everyone[0].child.kill()
    assert {stage.averages_next(epoch) for epoch in range(20)} == {"b"}


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Logs of two demos in one folder would be taken for one."""
    (tmp_path / "old").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        demo(tmp_path, as_json=False, quick=True)


# -- the whole


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(420)
def test_the_quick_demo(tmp_path: Path) -> None:
    """Real peers: one is killed, the others commit again, a newcomer takes part, and all agree to the bit."""
    out = tmp_path / "out"
    played = subprocess.run(
        [sys.executable, "-m", "p2p_diloco", "demo", "--quick", "--json", "--out", str(out)],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert played.returncode == 0, played.stderr
    found = json.loads(played.stdout)
    assert json.loads((out / "summary.json").read_text()) == found
    peers = {peer["name"]: SimpleNamespace(**peer) for peer in found["peers"]}
    killed, newcomer = peers[found["kill"]["peer"]], peers[found["newcomer"]["peer"]]
    assert [peer.name for peer in peers.values() if peer.fate == "killed"] == [killed.name]
    survivors = [peer for peer in peers.values() if peer.fate == "finished" and peer is not newcomer]
    assert len(survivors) == 2
    assert found["epochs"] == QUICK.epochs
    assert found["kill"]["elected"]
    assert QUICK.kill_at <= found["kill"]["epoch"] < QUICK.epochs
    assert found["kill"]["next_commit_s"] > 0
    assert newcomer.rounds > 0
    assert found["newcomer"]["epoch"] > found["kill"]["epoch"]
    losses = {round(steps / QUICK.sync_every): loss for steps, loss in found["swarm_curve"]}
    cost = join_cost(losses, found["newcomer"]["epoch"])
    assert found["join_cost"] == (None if cost is None else asdict(cost))
    assert {peer.digest for peer in (*survivors, newcomer)} == {found["digest"]} != {""}
    assert found["digests_equal"]
    for peer in survivors:
        assert peer.rounds == QUICK.epochs
        assert peer.bytes_sent < peer.data_parallel_bytes / 5
    assert found["swarm_loss"] < found["alone_loss"]
    assert found["steps"] == found["alone_curve"][-1][0] == found["swarm_curve"][-1][0] == QUICK.steps
    assert "kill -9" in played.stderr
    if found["plot"] is None:
        with pytest.raises(ImportError):
            __import__("matplotlib")
    else:
        assert Path(found["plot"]).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.real
@pytest.mark.timeout(120)
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """^C while processes start: exit code 130, and none of them is left."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "p2p_diloco", "demo", "--quick", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as played:
        wait_until(lambda: (out / "alice.log").exists(), 60.0)
        family = psutil.Process(played.pid).children(recursive=True)
        assert len(family) > 2
        played.send_signal(signal.SIGINT)
        _, told = played.communicate(timeout=60)
    assert played.returncode == 130
    assert f"interrupted; what was written is in {out}" in told
    wait_until(lambda: gone(family))
