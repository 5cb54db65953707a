"""The demo: its formulas, its processes, its report, and the whole of it with real peers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from p2p_diloco.cli import processes as processes_module
from p2p_diloco.cli.demo import NO_PNG, QUICK, SYNC_EVERY, Player, Row, Stage, demo, next_commit_s, report
from p2p_diloco.cli.processes import Child, Children, Lines
from p2p_diloco.errors import ConfigError, P2PDilocoError

# -- formulas


def rows(*steps: tuple[float, int, int], val_loss: float | None = None) -> list[Row]:
    """Rows of (time, step, epoch)."""
    return [
        {"time": when, "step": step, "global_step": step, "epoch": epoch, "val_loss": val_loss}
        for when, step, epoch in steps
    ]


def test_the_next_commit_is_the_last_survivors() -> None:
    """The time is known only once all survivors have a commit; an earlier commit doesn't count, nor the epoch that a
    peer came in with."""
    fast, slow = rows((1.0, 1, 1), (2.0, 2, 2), (9.0, 3, 3)), rows((1.0, 1, 2), (9.5, 2, 3))
    assert next_commit_s([fast, slow], 2, since=8.0) == 1.5
    assert next_commit_s([fast, slow[:1]], 2, since=8.0) is None
    assert next_commit_s([rows((9.0, 1, 3))], 2, since=8.0) is None


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


def test_a_kill_takes_the_whole_family(children: Children) -> None:
    """As after a power cut, no process that the killed one has started is left."""
    child = started(children, PARENT)
    wait_until(lambda: child.printed.new())
    family = [psutil.Process(child.process.pid), *psutil.Process(child.process.pid).children(recursive=True)]
    assert len(family) == 2
    child.kill()
    wait_until(lambda: gone(family))
    assert child.status == -signal.SIGKILL


# -- the stage


@pytest.fixture
def stage(children: Children) -> Stage:
    return Stage(QUICK, children)


def player(stage: Stage, name: str, code: str) -> Player:
    """A player that runs code."""
    made = Player(name, started(stage.children, code, name), Lines(stage.folder / f"{name}.jsonl"))
    stage.players[name] = made
    return made


def test_a_death_ends_the_demo_with_a_sentence(stage: Stage) -> None:
    """It names the process, how it ended, its last words and its log; a peer that the demo has killed is no failure."""
    child = player(stage, "carol", "import sys; sys.exit('no memory left')").child
    wait_until(lambda: child.status is not None)
    with pytest.raises(P2PDilocoError, match=r"carol ended with status 1 \(no memory left\); its log is .*carol.log"):
        stage.until(lambda: False, "nothing")
    child.kill()
    stage.until(lambda: True, "nothing")


def test_the_next_aggregator_is_killed_half_way(stage: Stage) -> None:
    """Not before its status tells, nor while a peer has made less than half of the round."""
    for name in ("a", "b"):
        player(stage, name, STUBBORN)
    for epoch, elected in zip(range(QUICK.kill_at, 20), cycle("ab"), strict=False):
        for name, half in (("a", 10), ("b", 9)):
            stage.players[name].rows = rows((0.0, SYNC_EVERY * epoch + half, epoch))
            stage.players[name].told = {"epoch": epoch, "aggregates": [0] if name == elected else []}
        assert stage._doomed() is None
        stage.players["b"].rows = rows((0.0, SYNC_EVERY * epoch + 10, epoch))
        assert stage._doomed() is stage.players[elected]
        stage.players[elected].told["epoch"] = epoch - 1  # of the round before
        assert stage._doomed() is None


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Logs of two demos in one folder would be taken for one."""
    (tmp_path / "old").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        demo(tmp_path, as_json=False, quick=True)


# -- the report

PEER = {
    "name": "alice", "fate": "finished", "steps": 400, "rounds": 20, "waiting_s": 9.0, "bytes_sent": 12_000_000,
    "bytes_received": 11_000_000, "data_parallel_bytes": 232_000_000, "digest": "abc",
}  # fmt: skip
OUTCOME = {
    "seconds": 60.0, "cores": 2, "sync_every": 20, "epochs": 20, "parameters": 217_664, "warm_start": 100,
    "data_parallel_bytes_per_step": 580_437, "digests_equal": True, "swarm_loss": 2.04, "alone_loss": 2.17,
    "peers": [PEER, {**PEER, "name": "bob", "fate": "killed", "bytes_sent": None, "digest": ""}],
    "kill": {"peer": "bob", "epoch": 5, "next_commit_s": 1.5, "usual_round_s": 1.2},
    "newcomer": {"peer": "dave", "epoch": 12, "joined_s": 9.5}, "folder": "out", "plot": None,
}  # fmt: skip


def text_of(outcome: dict[str, Any]) -> str:
    """The report on a terminal of 80 columns."""
    out = StringIO()
    Console(file=out, width=80, markup=False).print(*report(outcome), sep="\n")
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return " ".join(out.getvalue().split())


def test_the_report_says_what_was_measured() -> None:
    """The figures, what they are compared with, and where to get the PNG without matplotlib."""
    text = text_of(OUTCOME)
    for part in (
        "the run 2.040, one peer alone 2.170: 0.130 nats a byte better",
        "bob, due to average a part of the next round, half-way from outer step 5",
        "1.5 s after the kill; usual round: 1.2 s",
        "in the run 9.5 s after its start, at outer step 12; contributed to 20 rounds",
        "yes, on alice: abc",
        "232.0 MB 19x",
        "580.4 kB a step",
        NO_PNG,
    ):
        assert part in text


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
    assert QUICK.kill_at <= found["kill"]["epoch"] < QUICK.epochs
    assert found["kill"]["next_commit_s"] > 0
    assert newcomer.rounds > 0
    assert found["newcomer"]["epoch"] > found["kill"]["epoch"]
    assert len({peer.digest for peer in (*survivors, newcomer)} | {""}) == 2
    assert found["digests_equal"]
    for peer in survivors:
        assert peer.rounds == QUICK.epochs
        assert peer.bytes_sent < peer.data_parallel_bytes / 5
    assert found["swarm_loss"] < found["alone_loss"]
    assert found["steps"] == found["alone_curve"][-1][0] == found["swarm_curve"][-1][0] == QUICK.epochs * SYNC_EVERY
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
