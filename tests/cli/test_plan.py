"""`plan`: reads the user's machines and links, and shows the forecast in 80 columns, as JSON and as a PNG."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.cli import carry_out
from p2p_diloco.cli.plan import inputs
from p2p_diloco.cli.plan.inputs import Seen, question, size_of
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.node.board import name_of
from p2p_diloco.node.records import BOARD
from p2p_diloco.node.run_record import RunRecord
from p2p_diloco.node.status import PeerStatus
from tests.net.memory import DeafInbox, MemoryNetwork

FRIENDS = ["plan", "--params", "1B", "--peers", "4", "--bandwidth", "50mbit", "--latency", "60ms", "--step-time", "1"]
SCRIPT = """
import sys, time, torch
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
print("out of the script")
for _ in range(int(sys.argv[1])):
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert carry_out(arguments) == 0
    return capsys.readouterr().out


# -- what is shown


def test_four_friends_get_an_answer_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Which H, what with fewer bits, what with overlap, and whether it pays."""
    out = told([*FRIENDS, "--tokens", "10B", "--tokens-per-step", "16k"], capsys)
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "…" not in out
    for text in (
        "--sync-every 10198 suffices, or --codec int4 --reply-codec int4 --sync-every 2763",
        "--num-fragments 4 --overlap-steps 128",
        "1.93 times as much",
        "10B tokens take 3.7 days",
        "H=7,812 at most",
    ):
        assert text in " ".join(out.split())


def test_json_has_the_same_figures_and_nothing_else_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told([*FRIENDS, "--json"], capsys))
    assert found["schema_version"] == 1
    assert found["round"]["sent_bytes_per_peer"] == 3e9
    assert found["advice"]["sync_every"] == 10198
    assert found["ways"]["run"]["utilisation"] == pytest.approx(0.48, abs=0.005)
    assert found["unit"] == "step"
    assert "It does not pay as it is" in told([*FRIENDS, "--sync-every", "20"], capsys)


def test_a_peer_that_is_alone_has_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    """It exchanges nothing, so nothing is said of bandwidths, and no H is advised."""
    alone = ["plan", "--params", "1B", "--peers", "1", "--step-time", "1"]
    out = told(alone, capsys)
    assert out.splitlines()[0] == "1B parameters, 1 peer, 1 s a step, H=500, bf16"
    assert "One peer alone exchanges nothing" in out
    assert "bit/s" not in out
    assert "smallest H" not in out
    assert json.loads(told([*alone, "--json"], capsys))["machines"][0]["link_mbit"] is None


def test_png_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it can't be, the error has the mend."""
    pytest.importorskip("matplotlib")
    told([*FRIENDS, "--png", str(tmp_path / "curves.png")], capsys)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert carry_out([*FRIENDS, "--png", str(tmp_path / "no" / "curves.png")]) == 3
    assert "--png=" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert carry_out([*FRIENDS, "--png", "curves.png"]) == 2
    assert "pip install 'p2p-diloco[plot]'" in capsys.readouterr().err


# -- what is asked


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"params": None}, "--params is missing"),
        ({"params": "many"}, "--params=many is no number of parameters"),
        ({"peers": None}, "--peers is missing"),
        ({"bandwidth": None}, "--bandwidth is missing"),
        ({"bandwidth": "50"}, "--bandwidth=50 .* write e.g. 50mbit"),
        ({"bandwidth": "50mbit,20mbit"}, "--bandwidth has 2 values for 4 peers; give one for all, or 4"),
        ({"latency": "-1ms"}, "--latency=-1ms .* write e.g. 60ms"),
        ({"step_time": None}, "--step-time is missing; .*--measure"),
        ({"step_time": "0"}, "--step-time=0 "),
        ({"tokens": "1B"}, "--tokens=1B needs --tokens-per-step"),
        ({"tokens": "none", "tokens_per_step": "1k"}, "--tokens=none is no number of tokens"),
        ({"model": Path("there")}, "--model=there names the model's size as well"),
        ({"command": ["python"]}, "--step-time=1 is measured already"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_a_mend(change: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error) as raised:
        question({**FLAGS, **change}, {}, None)
    assert raised.value.mend


ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
NONE: dict[str, Any] = dict.fromkeys(
    ("params", "model", "peers", "bandwidth", "latency", "step_time", "command", "tokens_per_step", "tokens")
)
FLAGS = {**NONE, "params": "1B", "peers": 4, "bandwidth": "50mbit", "step_time": "1", "utilisation": 0.95}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"sync_every": 2, "num_fragments": 3}, "sync-every=2 is less than num_fragments=3"),
        ({"mode": "async"}, "mode=async"),
        ({"codec": "x"}, "codec"),
    ],
)
def test_settings_that_can_not_be_computed_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises((ConfigError, UsageError), match=error):
        question(FLAGS, settings, None)


def test_a_runs_records_fill_in_what_no_flag_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Size, settings, links and step times; a flag counts more, and an unmeasured link is taken as the slowest."""
    seen = Seen(10**6, {"sync_every": 40}, (1e6, 0.0, 3e6), (0.1, 0.2, 0.0), ("ann", "ben", "cas"))
    monkeypatch.setattr(inputs, "_seen", lambda *_: seen)
    settings = {"initial_peers": [ADDRESS]}
    asked = {**NONE, "latency": "10ms", "utilisation": 0.95}
    found = question(asked, settings, None)
    assert (found.forecast.params, found.forecast.run.sync_every, found.names) == (10**6, 40, ("ann", "ben", "cas"))
    assert [each.link for each in found.forecast.machines] == [1e6, 1e6, 3e6]
    assert [each.step_s for each in found.forecast.machines] == [0.1, 0.2, 0.2]
    changed = question({**asked, "params": "2M", "step_time": "1"}, {**settings, "sync_every": 80}, None)
    assert (changed.forecast.params, changed.forecast.run.sync_every) == (2 * 10**6, 80)
    assert {each.step_s for each in changed.forecast.machines} == {1.0}
    more = question({**asked, "peers": 5}, settings, None)
    assert [each.link for each in more.forecast.machines] == [2e6] * 5
    assert (more.names[4], len(more.notes)) == ("peer 5", 2)
    unmeasured = Seen(10**6, {}, (0.0, 0.0), (0.1, 0.1), ("ann", "ben"))
    monkeypatch.setattr(inputs, "_seen", lambda *_: unmeasured)
    with pytest.raises(UsageError, match="--bandwidth is missing, and the run's peers have not measured it"):
        question(asked, settings, None)


def test_a_runs_records_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of live workers alone; with the settings that the run has now. A run without peers is an error."""

    async def test() -> None:
        network = MemoryNetwork()
        eyes = network.join("eyes", DeafInbox())

        @contextlib.asynccontextmanager
        async def observer(*_: object) -> AsyncIterator[Any]:
            yield eyes

        monkeypatch.setattr("p2p_diloco.observe.snapshot.observer", observer)
        with pytest.raises(ConfigError, match="run_id=main has no record or no live peer"):
            await inputs._look(PeerConfig(initial_peers=(ADDRESS,)))
        run = RunRecord(RunConfig(sync_every=10).to_wire(), "model", "cut", 3, 100, 4, "ann-id", 0.0)
        await eyes.store("main/config", name_of(run.pack()), run.pack(), 30.0, owned=False)
        changed = {"revision": 1, "outer_lr": 0.7, "outer_momentum": 0.9, "changed": (("sync_every", 40.0),)}
        for name, role, state in (
            ("ann", "worker", "training"),
            ("agg", "aggregator", ""),
            ("bye", "worker", "leaving"),
        ):
            status = PeerStatus(
                peer_id=f"{name}-id", name=name, role=role, state=state, time=time.time(), bandwidth=5000,
                steps_per_second=4.0, **changed,  # type: ignore[arg-type]
            )  # fmt: skip
            await eyes.store(BOARD.key("main", status.peer_id), status.peer_id, status.pack(), 30.0, owned=False)
        found = await inputs._look(PeerConfig(initial_peers=(ADDRESS,)))
        assert (found.params, found.config["sync_every"]) == (100, 40)
        assert (found.links, found.steps_s, found.names) == ((5000.0,), (0.25,), ("ann",))
        RunConfig(**found.config)  # type: ignore[arg-type]

    asyncio.run(test())


# -- the model's size


def test_a_checkpoint_tells_its_size(tmp_path: Path) -> None:
    """A checkpoint itself, or a folder of them; a broken one is an error."""
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    layout = {"params": [["a", [3, 4], "float32"], ["b", [5], "float32"]]}
    (folder / "manifest.json").write_text(json.dumps({"layout": layout}))
    assert size_of(folder) == size_of(tmp_path) == 17
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--model=.* can't be read"):
        size_of(folder)
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        size_of(tmp_path / "nothing")


# -- steps that are measured


@pytest.mark.real
def test_a_scripts_steps_are_timed_and_it_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The script would make 100,000 steps of at least 0.02 s. What it prints does not go to stdout."""
    (tmp_path / "train.py").write_text(SCRIPT)
    found = inputs.step_time([sys.executable, str(tmp_path / "train.py"), "100000"], 5)
    assert 0.02 <= found < 5
    assert capfd.readouterr().out == ""


def test_a_script_with_too_few_steps_is_an_error() -> None:
    """Here it writes the times itself: of five steps, three of which warm up."""
    five = "import os; open(os.environ['PLAN_TIMES_FILE'] + '.1', 'w').write('1.0\\n' * 5)"
    with pytest.raises(UsageError, match=r"--measure=.* ended \(exit code 0\) before .*; mend it, or give --step-time"):
        inputs.step_time([sys.executable, "-c", five], 5)


def test_a_script_that_makes_no_step_is_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MEASURE_S", 0.5)
    with pytest.raises(UsageError, match="made too few steps of a torch optimizer"):
        inputs.step_time([sys.executable, "-c", "import time; time.sleep(60)"], 5)
