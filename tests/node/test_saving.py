"""Checkpoints of the outer state, written and read back by nodes over the in-memory swarm."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core.events import Damaged
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.state import founding
from p2p_diloco.core.version import Version, model_version
from p2p_diloco.errors import CheckpointError, ConfigError
from p2p_diloco.node import saving
from p2p_diloco.node.run import Run
from p2p_diloco.node.run_record import Founding
from p2p_diloco.node.saving import Saving
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.tensors import checkpoint
from p2p_diloco.tensors.layout import Layout, ParamSpec
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, entered, stop


def run_for(config: dict[str, Any], epochs: int, **local: Any) -> tuple[list[float], list[Any]]:
    """A lone peer's θ after each epoch, and its versions at the end."""

    async def life() -> tuple[list[float], list[Any]]:
        peer = MemoryPeer(MemoryNetwork(), "a", config, sizes=(3, 2), **local)
        try:
            await peer.enter(theta=1.0)
            values = []
            for _ in range(epochs):
                await peer.exchange(1.0)
                values.append(peer.memory.theta[0].item())
            return values, (await peer.ask("ask", "told"))["versions"]
        finally:
            await peer.stop()

    return asyncio.run(life())


class Moving:
    """A peer that saves, with a replica that a test moves from version to version. Its tensors are what these say."""

    def __init__(self, root: Path, every: int, keep: int = 3) -> None:
        self.run = Run("r", RunConfig(codec="fp32"), Layout.build((ParamSpec("p", (2,), "float32"),), 1))
        self.work = SliceWork(self.run, torch.zeros(2), lambda *of: b"")
        self.replica: Any = SimpleNamespace(finished=False, has_state=True, revision=FOUNDED)
        local = PeerConfig(run_id="r", checkpoint_dir=root, save_every=every, keep=keep)
        self.told = list[Damaged]()
        events, described = SimpleNamespace(post=self.told.append), SimpleNamespace(card=b"")
        of: dict[str, Any] = {"run": self.run, "replica": self.replica, "work": self.work, "local": local}
        common: Any = SimpleNamespace(**of, founding=Founding("r", "a", 1.0), events=events, described=described)
        self.saving = Saving(common)

    async def reach(self, epoch: int, samples: int, *, finished: bool = False, flip: bool = False) -> None:
        """Be at another version, with memory that has changed since if `flip`; wait for what is saved of it."""
        version = Version(0, samples, epoch, f"{epoch:032x}")
        state = replace(founding(0, version, "a", 1), revision=self.replica.revision)
        self.replica.logs = [SimpleNamespace(held=state)]
        self.work.hold(0, version)
        self.work.digest(0)
        model = model_version([version])
        self.work.state.slices[0].theta[1] += flip
        self.replica.epoch, self.replica.finished = epoch, finished
        self.replica.roster = SimpleNamespace(mine=SimpleNamespace(model=model))
        self.saving.settled()
        await self.saving.written()


def newest(root: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The newest checkpoint of a folder: its path, its tensors, and what a node has put into its manifest."""
    path = checkpoint.latest(root)
    assert path is not None
    tensors, manifest = checkpoint.load(path)
    own = {key: value for key, value in manifest.items() if key not in ("format", "epoch", "files")}
    return path, {**tensors}, own


def saved_in(root: Path) -> list[str]:
    """The checkpoints of a folder, oldest first."""
    return [path.name for path in checkpoint.whole(root)][::-1]


@awaited
async def test_a_greater_lineage_is_saved_in_place_of_the_own(tmp_path: Path) -> None:
    """After a switch to one of fewer epochs counting goes on from there; what was left behind goes first, though of
    more epochs. Two sides of a split may both reach the last epoch; its checkpoint is then of the one that won."""
    peer = Moving(tmp_path, every=2)
    for epoch in (596, 598, 600):
        await peer.reach(epoch, 10 * epoch)
    for epoch in (111, 112, 113, 114, 116):
        await peer.reach(epoch, 400 * epoch)
    assert saved_in(tmp_path) == ["checkpoint-112", "checkpoint-114", "checkpoint-116"]
    await peer.reach(117, 400 * 117, finished=True)
    await peer.reach(117, 400 * 118, finished=True)
    assert saved_in(tmp_path) == ["checkpoint-114", "checkpoint-116", "checkpoint-117"]
    assert checkpoint.load(tmp_path / "checkpoint-117")[1]["samples"] == 400 * 118


@awaited
async def test_a_damaged_state_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The older ones stay, the replica is told each time and the log once; what is true again is saved again. An end
    that was damaged is saved once it is mended: at the latest when the peer leaves, though its version is the one that
    was not saved."""
    peer = Moving(tmp_path, every=1, keep=1)
    for epoch in range(5):
        await peer.reach(epoch, epoch, flip=epoch in (2, 3))
        assert bool(peer.saving.failed) == (epoch in (2, 3))
        if epoch in (1, 3):
            assert saved_in(tmp_path) == ["checkpoint-1"]
    assert [damaged.numbers for damaged in peer.told] == [(0,), (0,)]
    assert saved_in(tmp_path) == ["checkpoint-4"]
    assert caplog.text.count("slices 0 are corrupted in memory") == 1
    await peer.reach(5, 5, finished=True, flip=True)
    assert saved_in(tmp_path) == ["checkpoint-4"]
    peer.work.state.slices[0].theta[1] -= 1
    await peer.saving.finish()
    assert saved_in(tmp_path) == ["checkpoint-5"]


def test_the_founding_command_given_again_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run begins at another one's second epoch, and reaches the fifth; the same command starts there, and says so.
    Within one run the newer checkpoint counts, and whoever sets the run back says so (`new_generation`): that is
    epoch 0 of the next generation, with the checkpoint's parameters."""
    old, new = tmp_path / "old", tmp_path / "new"
    (*_, last), _ = run_for(QUICK, 2, checkpoint_dir=old, save_every=1)
    founding = {"run_id": "new", "from_checkpoint": old, "checkpoint_dir": new, "save_every": 1}
    _, versions = run_for(QUICK, 3, **founding)
    assert [version[2] for version in versions] == [5]
    assert "the run has gone on" not in caplog.text
    with caplog.at_level("INFO"):
        _, versions = run_for({}, 0, **founding)
    assert [version[2] for version in versions] == [5]
    assert caplog.text.count(f"the run has gone on since the checkpoint {old}") == 1
    with pytest.raises(ConfigError, match=r"checkpoint_dir=.*old holds checkpoints of the run r; name another folder"):
        run_for({}, 0, run_id="new", from_checkpoint=new, checkpoint_dir=old)  # it would delete the old run's
    within = [*checkpoint.whole(new)]  # one is left out if it is due while another is written
    assert len(within) > 1
    for named in within:
        _, versions = run_for({}, 0, run_id="new", from_checkpoint=named, checkpoint_dir=new)
        assert [version[2] for version in versions] == [5]
    (value,), versions = run_for({}, 1, **{**founding, "save_every": 9}, new_generation=True)
    assert [version[:3] for version in versions] == [[1, 1, 1]]
    assert value < last


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """An empty folder, one of another run: each an error that says so."""
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        run_for(QUICK, 0, from_checkpoint=tmp_path)
    run_for(QUICK, 1, checkpoint_dir=tmp_path, save_every=1)
    _, tensors, own = newest(tmp_path)
    checkpoint.save(tmp_path, 7, tensors, {**own, "run_id": "another"}, keep=9)
    with pytest.raises(ConfigError, match="run another"):
        run_for(QUICK, 0, checkpoint_dir=tmp_path)


def test_a_checkpoint_with_wrong_digests_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saved whole by a machine whose memory was at fault, say. A peer starts from the one before; not if it names this
    one, nor if there is no other.
    """
    run_for(QUICK, 1, checkpoint_dir=tmp_path, save_every=1)
    path, tensors, own = newest(tmp_path)
    tensors["theta"]["p0"][0] += 1
    spoilt = checkpoint.save(tmp_path, 8, tensors, own, keep=9)
    _, versions = run_for(QUICK, 0, checkpoint_dir=tmp_path)
    assert [v[2] for v in versions] == [1]
    assert "an older one is tried if there is one: checkpoint=" in caplog.text
    for named in (tmp_path, spoilt):
        with pytest.raises(CheckpointError, match="digest"):
            run_for(QUICK, 0, from_checkpoint=named)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="digest"):
        run_for(QUICK, 0, checkpoint_dir=tmp_path)


@pytest.mark.parametrize(("stop", "every"), [(3, 1), (None, 1), (None, 10)])
def test_what_was_due_is_saved_in_spite_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int | None, every: int
) -> None:
    """A checkpoint under way when the run finishes, or the peer leaves, doesn't take the place of the last epoch's. Who
    leaves saves what it has, though none is due: it may be the last that has it. Without a commit there is nothing."""
    write = saving.Saving._write

    def slow_write(*values: Any) -> Any:
        time.sleep(0.3)
        return write(*values)

    monkeypatch.setattr(saving.Saving, "_write", slow_write)
    run_for(QUICK, 0, checkpoint_dir=tmp_path / "new", save_every=every)
    assert not saved_in(tmp_path / "new")
    run_for({**QUICK, "stop_after_epochs": stop}, 3, checkpoint_dir=tmp_path, save_every=every)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-3"


@awaited
async def test_the_trainer_is_told_of_checkpoints_that_others_commits_bring_on(tmp_path: Path) -> None:
    """Asynchronous: a peer that submits nothing meanwhile is to save its own state beside what its node saves."""
    network = MemoryNetwork()
    (busy,) = await entered("a", {**QUICK, "mode": "async"}, network)
    (other,) = await entered("b", {}, network, checkpoint_dir=tmp_path, save_every=3)
    for _ in range(7):
        await busy.exchange(1.0)
    await until(lambda: other.memory.epoch >= 7)
    told: int = other.memory.saved
    await stop(busy, other)
    assert told >= 6  # or 7, where the one before was being written when the sixth commit came
    assert f"checkpoint-{told}" in saved_in(tmp_path)


@pytest.mark.parametrize("lacks", ["theta", "outer", "fragments", "digests"])
def test_a_checkpoint_that_lacks_something_is_refused(tmp_path: Path, lacks: str) -> None:
    """One without a tensor or an entry, or with a tensor of another size, is the user's error, not a crash."""
    run_for(QUICK, 1, checkpoint_dir=tmp_path, save_every=1)
    _, tensors, own = newest(tmp_path)
    why = r"can't be used: (its tensors|slice 0 doesn't have the digest)"
    if lacks in own:
        own.pop(lacks)
        changed, why = [tensors], f"missing required field `{lacks}`"
    else:
        name, *others = tensors[lacks]
        kept = {key: tensors[lacks][key] for key in others}
        changed = [{**tensors, lacks: {**kept, name: torch.zeros(1)}}, {**tensors, lacks: kept}]
    for epoch, wrong in enumerate(changed, start=7):
        path = checkpoint.save(tmp_path, epoch, wrong, own, keep=9)
        with pytest.raises(CheckpointError, match=why):
            run_for(QUICK, 0, from_checkpoint=path)


@awaited
async def test_a_save_that_fails_is_told_until_one_succeeds(tmp_path: Path) -> None:
    root = tmp_path / "saved"
    root.write_text("no folder")
    peer = Moving(root, every=1)
    await peer.reach(0, 0)
    await peer.reach(1, 10)
    assert peer.saving.failed.startswith("a checkpoint can't be written: ")
    root.unlink()
    await peer.reach(2, 20)
    assert not peer.saving.failed
    assert saved_in(root) == ["checkpoint-2"]


@awaited
async def test_a_checkpoint_is_saved_when_the_founder_asks_for_one(tmp_path: Path) -> None:
    """Once for each request, when all fragments are at it. What was asked for before the peer's start is not saved."""
    peer = Moving(tmp_path, every=10_000)
    for epoch, asked in ((1, 2), (2, 2), (3, 3), (4, 3), (5, 0), (6, 3), (7, 5)):
        peer.replica.revision = Revision(asked, saves=asked) if asked else FOUNDED
        await peer.reach(epoch, 10 * epoch)
    assert saved_in(tmp_path) == ["checkpoint-3", "checkpoint-7"]
