"""Sinks: what they get of a report, and that none stops training. Other libraries are played by modules of the test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_diloco.errors import UsageError
from p2p_diloco.integrations.sinks import Aim, JsonLines, TensorBoard, WandB
from p2p_diloco.observe.baseline import Baseline
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.peer import Peer


class Recorder:
    """Takes any call, and remembers it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Recorder]:
        def call(*arguments: Any, **named: Any) -> Recorder:
            self.calls.append((name, *arguments, named))
            return self

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    def played(name: str) -> Recorder:
        recorder, module = Recorder(), ModuleType(name)
        module.__getattr__ = lambda attribute: getattr(recorder, attribute)  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
        return recorder

    return played


def trained(peer: AbsentPeer, steps: int = 2) -> None:
    for step in range(steps):
        peer.report(loss=2.5 - step, samples=8)
        peer.global_step += 1


def alone() -> AbsentPeer:
    return AbsentPeer(torch.nn.Linear(1, 1), None)


def test_a_file_has_a_line_for_each_report(tmp_path: Path) -> None:
    """With the step, and all samples so far; a second start appends. What was not reported is left out."""
    peer = alone()
    peer.sinks.append(JsonLines(tmp_path / "run.jsonl"))
    trained(peer)
    assert Baseline.read(tmp_path / "run.jsonl")._curves == {"loss": [(8.0, 2.5), (16.0, 1.5)]}
    peer.sinks[:] = [JsonLines(tmp_path / "run.jsonl")]
    peer.report(held_out_loss=3.0)
    assert [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()] == [
        {"step": 0, "loss": 2.5, "epoch": 0.0, "samples": 8.0},
        {"step": 1, "loss": 1.5, "epoch": 0.0, "samples": 16.0},
        {"step": 2, "held_out_loss": 3.0, "epoch": 0.0, "samples": 16.0},
    ]


LOGGED = {"loss": 2.5, "epoch": 0.0, "samples": 8.0}


@pytest.mark.parametrize(
    ("name", "make", "calls"),
    [
        ("wandb", WandB, [("init", {"project": "p"}), ("log", LOGGED, {"step": 0})]),
        ("aim", Aim, [("Run", {"project": "p"}), *(("track", v, {"name": k, "step": 0}) for k, v in LOGGED.items())]),
    ],
)
def test_a_trackers_calls(library: Callable[..., Recorder], name: str, make: Any, calls: list[Any]) -> None:
    """One of `log` a report, at the run's step; or one of `track` for each value."""
    told, peer = library(name), alone()
    peer.sinks.append(make(project="p"))
    trained(peer, 1)
    assert told.calls == calls


def test_tensorboard(library: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scalar for each value; it is written to the end when the program ends."""
    at_end: list[Callable[[], Any]] = []
    monkeypatch.setattr("atexit.register", at_end.append)
    told, peer = library("torch.utils.tensorboard"), alone()
    peer.sinks.append(TensorBoard(tmp_path))
    trained(peer, 1)
    for end in at_end:
        end()
    assert told.calls[:2] == [("SummaryWriter", str(tmp_path), {}), ("add_scalar", "loss", 2.5, 0, {})]
    assert told.calls[-1] == ("close", {})


@pytest.mark.parametrize(
    ("make", "package"), [(WandB, "wandb"), (Aim, "aim"), (lambda: TensorBoard("x"), "tensorboard")]
)
def test_a_missing_library_is_named(make: Callable[[], Any], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install, and what needs nothing."""
    for name in ("wandb", "aim", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"pip install {package}.*JsonLines"):
        make()


def test_a_sink_that_fails_is_taken_out(caplog: pytest.LogCaptureFixture) -> None:
    """With a warning that has the error; the others go on."""

    class Broken:
        def write(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("the disk is full")

    class Kept:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def write(self, step: int, values: Mapping[str, float]) -> None:
            self.steps.append(step)

    peer, kept = alone(), Kept()
    peer.sinks += [Broken(), kept]
    trained(peer)
    assert (peer.sinks, kept.steps) == ([kept], [0, 1])
    assert ["Broken failed, so it gets no more reports" in record.message for record in caplog.records] == [True]
    assert "the disk is full" in caplog.text


def test_a_peer_hands_on_what_it_reports(tmp_path: Path) -> None:
    """With the run's step and epoch, after the report has gone to the node."""
    model = torch.nn.Linear(1, 1)
    peer, order = Peer(model, torch.optim.SGD(model.parameters(), lr=0.1)), list[Any]()
    standing = SimpleNamespace(epoch=3, global_step=70, finished=False)
    hook = SimpleNamespace(report=lambda *told: order.append(told))
    session = SimpleNamespace(hook=hook, following=None, node=None, watch=None, standing=standing)
    peer._session = session  # type: ignore[assignment]
    peer.sinks.append(SimpleNamespace(write=lambda step, values: order.append((step, values))))
    peer.report(loss=2.0, samples=8)
    peer._session = None
    assert order == [(2.0, 8, None), (70, {"loss": 2.0, "epoch": 3.0, "samples": 8.0})]
