"""The loop, with a fake in the run's place: what it tells the run, what it takes from it, and how it ends. And the
model that it trains."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.trainer.config import TrainerConfig
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.train import Batches, Progress, main, mean_loss, new_optimizer, share_of_rate, train, warm_start

TINY = TrainerConfig(layers=1, width=16, heads=2, context=16, batch_size=2, eval_batches=2, threads=1)
PROSE = b"".join(b"%d: the quick brown fox jumps over the lazy dog.\n" % n for n in range(3000))


class FakePeer(AbsentPeer):
    """A run of one that counts, remembers what it was told, and does as its test says. Its global parameters are no
    peer's, or with `own` those of its model."""

    digest = "agreed"

    def __init__(
        self,
        model: GPT,
        optimizer: Optimizer,
        *,
        config: RunConfig,
        ends_at_epoch: int | None = None,
        joined_at: int = 0,
        on_report: Any = None,
        peer_id: str = "fake",
        own: bool = False,
        **_: object,
    ) -> None:
        super().__init__(model, optimizer)
        self.config, self.global_step, self.peer_id = config, joined_at, peer_id
        self.parameters = (model if own else GPT(GPTConfig(1, 16, 2, 16, seed=99))).state_dict()
        self.told: list[tuple[str, float]] = []
        self.held_out: list[float] = []
        self.rates: list[float] = []
        self.paused, self._pausing = 0, False
        self.left_with: type[BaseException] | str | None = "not left"
        self._optimizer, self._ends_at_epoch, self._on_report = optimizer, ends_at_epoch, on_report

    @property
    def epoch(self) -> int:
        return self.global_step // self.config.sync_every

    @property
    def finished(self) -> bool:
        return self._ends_at_epoch is not None and self.epoch >= self._ends_at_epoch

    def report(self, *, samples: int | None = None, held_out_loss: float | None = None, **_: Any) -> None:
        if held_out_loss is not None:
            self.held_out.append(held_out_loss)
            return
        self.told.append(("report", samples or 0))
        if self._on_report is not None:
            self._on_report(self)

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused, self._pausing = self.paused + 1, True
        yield
        self._pausing = False

    def global_state_dict(self) -> Mapping[str, Tensor]:
        assert self._pausing or self.left_with is None, "evaluation was not announced"
        return self.parameters

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.left_with = kind

    def _count(self) -> None:
        assert not self._pausing
        self.told.append(("step", 1))
        self.rates.append(self._optimizer.param_groups[0]["lr"])
        self.global_step += 1


def _setting(config: TrainerConfig = TINY) -> SimpleNamespace:
    """What `train` needs, all tiny."""
    model = GPT(GPTConfig(1, 16, 2, 16))
    content = torch.frombuffer(bytearray(PROSE), dtype=torch.uint8)
    judged = [next(Batches(content, batch_size=8, context=16, seed=0, key="judge"))]
    return SimpleNamespace(
        model=model,
        optimizer=new_optimizer(model, config),
        batches=Batches(content, batch_size=2, context=16, seed=0, key="a"),
        judged=judged,
        progress=Progress(model, judged),
    )


def _train(peer_options: dict[str, Any], config: TrainerConfig = TINY, **run: Any) -> SimpleNamespace:
    at = _setting(config)
    at.peer = FakePeer(at.model, at.optimizer, config=RunConfig(**run), **peer_options)
    at.stopped = train(at.model, at.optimizer, at.peer, at.batches, config, at.progress)
    return at


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "prose.txt"
    file.write_bytes(PROSE)
    return file


@pytest.fixture
def fake_network(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put FakePeer in Peer's place; `made` holds the one that main builds, `options` what more it gets."""
    network = SimpleNamespace(made=None, options={}, given={})

    def build(model: GPT, optimizer: Optimizer, **given: Any) -> FakePeer:
        network.given = given
        network.weights = {name: value.clone() for name, value in model.state_dict().items()}
        peer = network.made = FakePeer(model, optimizer, **given, **network.options)
        return peer

    monkeypatch.setattr("p2p_diloco.trainer.train.Peer", build)
    return network


def test_the_learning_rate_follows_the_run_after_a_warm_up_of_the_peers_own() -> None:
    """A peer that joins at step 30 of 40 rises in its own first steps to the rate that the others have by then."""
    config = TINY.model_copy(update={"warmup_steps": 4})
    at = _train({"ends_at_epoch": 10, "joined_at": 30}, config, sync_every=4, stop_after_epochs=10)
    of_run = [TINY.lr * share_of_rate(config, step, step, 40) for step in range(30, 40)]
    risen = [0.25, 0.5, 0.75] + [1.0] * 7
    assert at.peer.rates == pytest.approx([rate * share for rate, share in zip(of_run, risen, strict=True)])
    assert of_run[0] < 0.7 * TINY.lr


def test_what_is_judged_is_the_global_parameters() -> None:
    """Every second epoch and at the end, announced, by what the run yields and no peer's own."""
    config = TINY.model_copy(update={"eval_every_epochs": 2})
    at = _train({"ends_at_epoch": 5}, config, sync_every=3)
    yielded = GPT(at.model.config)
    yielded.load_state_dict(at.peer.parameters)
    assert at.peer.paused == 3  # epochs 2, 4 and the last
    assert at.peer.held_out[-1] == at.progress.val_loss
    assert at.progress.val_loss == pytest.approx(mean_loss(yielded, at.judged))
    assert at.progress.val_loss != pytest.approx(mean_loss(at.model, at.judged))


def test_what_is_judged_is_noted_at_its_own_epoch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though the others have gone on by the time that the loss is known."""
    at = _setting()
    peer = FakePeer(at.model, at.optimizer, config=RunConfig(sync_every=3), ends_at_epoch=2)

    def slow(*_: object) -> float:
        peer.global_step += 30
        return 1.5

    monkeypatch.setattr("p2p_diloco.trainer.train.mean_loss", slow)
    config = TINY.model_copy(update={"eval_every_epochs": 1})
    with Progress(at.model, at.judged, tmp_path / "rows.jsonl") as progress:
        train(at.model, at.optimizer, peer, at.batches, config, progress)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if row["val_loss"] is not None] == [1]


def test_gradients_are_clipped() -> None:
    """The optimizer never sees a gradient longer than `clip`."""
    at = _setting()
    norms: list[float] = []

    def note(optimizer: Optimizer, *_: object) -> None:
        grads = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.stack(grads).norm().item())

    at.optimizer.register_step_pre_hook(note)
    peer = FakePeer(at.model, at.optimizer, config=RunConfig(sync_every=5), ends_at_epoch=1)
    config = TINY.model_copy(update={"clip": 0.01})
    train(at.model, at.optimizer, peer, at.batches, config, at.progress)
    assert norms == pytest.approx([0.01] * 5, rel=1e-3)


def test_a_warm_start_teaches_the_model_and_leaves_no_trace() -> None:
    """It lowers the loss, does the same each time, and holds no state of the optimizer that follows."""
    first, again = _setting(), _setting()
    before = mean_loss(first.model, first.judged)
    for at in (first, again):
        warm_start(at.model, at.batches, 40, TINY)
    assert mean_loss(first.model, first.judged) < before - 1.0
    for one, same in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, same)
        assert one.grad is None
    assert not first.optimizer.state


def test_the_warm_start_is_made_before_the_run_is_founded(text_file: Path, fake_network: SimpleNamespace) -> None:
    """The model that the run is founded with is the warm one, the same from every peer that is asked to."""
    config = TINY.model_copy(update={"data": text_file, "warm_start": 5})
    fake_network.options = {"ends_at_epoch": 1}
    weights = []
    for _ in range(2):
        assert main(RunConfig(sync_every=2), PeerConfig(), config) == 0
        weights.append(fake_network.weights)
    cold = GPT(GPTConfig(1, 16, 2, 16)).state_dict()
    for name, value in cold.items():
        assert torch.equal(weights[0][name], weights[1][name])
        assert not torch.equal(weights[0][name], value)
    assert fake_network.made.told.count(("step", 1)) == 2  # those of the warm start are nobody's


def test_the_run_gets_the_settings_that_were_given(text_file: Path, fake_network: SimpleNamespace) -> None:
    """Only given settings count as given, or a joiner would be refused for defaults."""
    fake_network.options = {"ends_at_epoch": 1}
    peer_config = PeerConfig(run_id="my-run", name="alice")
    config = TINY.model_copy(update={"data": text_file})
    assert main(RunConfig(sync_every=2), peer_config, config) == 0
    assert fake_network.given["config"].given == {"sync_every": 2}
    assert fake_network.given["local"] is peer_config
    assert fake_network.made.left_with is None


@pytest.mark.parametrize(
    ("sent", "status", "stopped"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_leaves_the_run(
    text_file: Path,
    fake_network: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    sent: signal.Signals,
    status: int,
    stopped: str,
) -> None:
    """^C and SIGTERM end training at once, the run is left, the summary still comes, and the handler goes."""

    def interrupt(peer: FakePeer) -> None:
        if len(peer.told) == 5:
            os.kill(os.getpid(), sent)

    before = signal.getsignal(signal.SIGTERM)
    fake_network.options = {"on_report": interrupt}
    config = TINY.model_copy(update={"data": text_file, "summary_json": True, "steps": 50})
    assert main(RunConfig(), PeerConfig(), config) == status
    assert isinstance(fake_network.made.left_with, type)
    assert issubclass(fake_network.made.left_with, KeyboardInterrupt)
    summary = json.loads(capsys.readouterr().out)
    assert summary["stopped"] == stopped
    assert summary["steps"] == 2
    assert summary["digest"] == ""  # nothing was agreed on
    assert signal.getsignal(signal.SIGTERM) == before


def test_training_alone_learns_real_text(
    tmp_path: Path, fake_network: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a run of this peer alone: the held-out loss of the standard library's text falls well below a fair die's 5.5.

    The summary is all that goes to stdout; the file gets a row for each step and each evaluation.
    """
    log, fake_network.options = tmp_path / "log.jsonl", {"ends_at_epoch": 4, "own": True}
    config = TrainerConfig(
        layers=2,
        width=32,
        heads=2,
        context=32,
        eval_every_epochs=2,
        log_path=log,
        threads=1,
        num_shards=1,
        summary_json=True,
    )
    assert main(RunConfig(sync_every=20, stop_after_epochs=4), PeerConfig(), config) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["stopped"] == "finished"
    assert (summary["steps"], summary["global_step"], summary["epoch"]) == (80, 80, 4)
    assert summary["val_loss"] < 3.5
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    judged = [(row["epoch"], row["val_loss"]) for row in rows if row["val_loss"] is not None]
    assert len(losses) == 80
    assert losses[0] > 5.0
    assert sum(losses[-10:]) / 10 < losses[0] - 1.5
    assert [epoch for epoch, _ in judged] == [2, 4]
    assert judged[0][1] > judged[1][1]
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)


def test_a_peer_trains_on_its_own_third_unless_told_otherwise(
    tmp_path: Path, fake_network: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default a peer trains on a third of the blocks, chosen by its identity; with a fixed split all peers with one
    index have the same. The warm start never depends on the identity."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_bytes(PROSE[2000 * number :][:2000])
    drawn: dict[str, bytes] = {}

    def batches(content: Tensor, *, key: str, **sizes: Any) -> Batches:
        drawn[key] = bytes(content.tolist())
        return Batches(content, key=key, **sizes)

    def part_of(peer_id: str, **own: Any) -> bytes:
        fake_network.options = {"ends_at_epoch": 1, "peer_id": peer_id}
        config = TINY.model_copy(update={"data": tmp_path, "steps": 1, **own})
        assert main(RunConfig(sync_every=1), PeerConfig(), config) == 0
        return drawn[peer_id]

    monkeypatch.setattr("p2p_diloco.trainer.train.Batches", batches)
    whole = part_of("alice", num_shards=1)
    alice, bob = part_of("alice"), part_of("bob")
    assert len(alice) == len(bob) == pytest.approx(len(whole) / 3, abs=2000)
    assert alice != bob
    assert part_of("alice") == alice
    assert part_of("bob", num_shards=1) == whole
    assert drawn["warm start"] == whole


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("device", "abacus", "device=abacus can't be used here"),
        ("log_path", Path("/nowhere/log.jsonl"), "log_path=/nowhere/log.jsonl can't be written"),
        ("data", Path("/nowhere"), "data=/nowhere does not exist"),
    ],
)
def test_what_can_not_be_used_is_said_before_the_run_is_joined(
    text_file: Path, fake_network: SimpleNamespace, key: str, value: object, sentence: str
) -> None:
    config = TINY.model_copy(update={"data": text_file, key: value})
    with pytest.raises(ConfigError, match=sentence):
        main(RunConfig(), PeerConfig(), config)
    assert fake_network.made is None


# -- the model: causal and deterministic

SMALL = GPTConfig(layers=2, width=16, heads=2, context=12)


def test_a_byte_alters_no_logits_before_it() -> None:
    """A change at position t leaves the logits before t as they are, to the bit, and alters those at t."""
    model = GPT(SMALL)
    tokens = torch.randint(0, 256, (3, SMALL.context), generator=torch.Generator().manual_seed(1))
    for t in range(1, SMALL.context):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % 256
        before, after = model(tokens), model(changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.allclose(before[:, t], after[:, t])


def test_one_seed_is_one_model_whatever_was_drawn_before() -> None:
    """Equal seeds give equal bits, other seeds other models; torch's own random state has no say."""
    first = GPT(SMALL)
    torch.rand(17)
    second, other = GPT(SMALL), GPT(GPTConfig(layers=2, width=16, heads=2, context=12, seed=1))
    for mine, same, different in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, same)
        assert mine.dim() == 1 or not torch.equal(mine, different)
