"""`export` and observers against real runs: what they read is a peer's global state, to the bit."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from swarm import PROGRAMS
from torch import Tensor

from p2p_diloco import Peer, PeerConfig, UsageError
from p2p_diloco.cli import carry_out

sys.path.insert(0, str(PROGRAMS))

from train import Tied

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


def epoch_of(peers: Sequence[Any], number: int) -> dict[str, Any]:
    """What a peer said of its global state at this epoch."""
    line: dict[str, Any] = peers[0].wait_for("values", epoch=number)
    return line


def parameters(state: Mapping[str, Tensor | Any]) -> dict[str, Any]:
    """The values of what is trained; buffers are each peer's own."""
    trained = {name: value for name, value in state.items() if ".running_" not in name and "num_batches" not in name}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in trained.items()}


def observe(swarm: Any, peers: Sequence[Any]) -> None:
    """Follow the run for some rounds. `refresh` brings the state of a later epoch, which is a peer's; the run goes on
    without the observer, which afterwards still has what it read."""
    model = Tied()
    local = PeerConfig(role="observer", name="eye", wait_timeout=60.0)
    with Peer(model, None, run_id="test", initial_peers=swarm.addresses, local=local) as observer:
        first = observer.epoch
        assert parameters(model.state_dict()) == parameters(epoch_of(peers, first)["theta"])
        give_up_at = time.monotonic() + 60.0
        while not observer.refresh():
            assert time.monotonic() < give_up_at
            time.sleep(0.1)
        assert observer.epoch > first
        line = epoch_of(peers, observer.epoch)
        assert parameters(observer.global_state_dict()) == parameters(model.state_dict()) == parameters(line["theta"])
        assert (observer.digest, observer.finished, observer.metrics.local_step) == (line["digest"], False, 0)
        assert len(observer.peers) == 2
        for needs_training in (observer.force_sync, observer.report):
            with pytest.raises(UsageError, match="trains nothing"):
                needs_training()
        last = observer.epoch
    assert parameters(observer.global_state_dict()) == parameters(epoch_of(peers, last)["theta"])
    peers[1].wait_for("values", epoch=last + 2)


def test_a_run_is_read_while_it_goes_on_and_after_its_end(
    swarm: Any, run_config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By exports and by an observer, and from a checkpoint: the parameters are those that a peer had at the same epoch,
    bit by bit, with the same digest."""

    def exported(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        assert carry_out(["export", *arguments]) == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    key = str(tmp_path / "key")
    saved = {"checkpoint_dir": str(tmp_path / "saved"), "save_every": 1000, "identity_path": key}
    config = {**run_config, "start_peers": 2}
    a = swarm.start("a", 1.0, config=config, kind="tied", values=True, step_s=0.2, local=saved, stays=True)
    peers = [
        a,
        swarm.start("b", 3.0, config={}, kind="tied", values=True, step_s=0.2),
    ]  # rounds last some tenths of a second
    peers[0].wait_for("values", epoch=1)
    run = ["--initial-peers", *swarm.addresses, "--run-id", "test", "--logs", "plain"]

    told = exported("--out", str(tmp_path / "live"), *run)
    assert not told["finished"]
    fresh = Tied()
    assert safetensors.torch.load_model(fresh, str(tmp_path / "live" / "model.safetensors")) == (set(), [])
    line = epoch_of(peers, told["epoch"])
    assert (parameters(fresh.state_dict()), told["digest"]) == (parameters(line["theta"]), line["digest"])
    assert fresh.norm.running_mean.min() > 0, "the statistics are those of a peer that trains"
    observe(swarm, peers)

    assert carry_out(["stop", *run, "--identity-path", key]) == 0
    for peer in peers:
        peer.tell("")
    end = peers[0].wait_for("finished")
    told = exported("--out", str(tmp_path / "ended"), "--format", "torch", *run)
    assert (told["finished"], told["epoch"], told["digest"]) == (True, end["epoch"], end["digest"])
    last = torch.load(tmp_path / "ended" / "model.pt", weights_only=True)
    assert parameters(last) == parameters(epoch_of(peers, end["epoch"])["theta"])

    peers[0].process.stdin.close()
    assert [peer.status() for peer in peers] == [0, 0]
    from_disk = ["--checkpoint", str(tmp_path / "saved"), "--format", "torch"]
    told = exported("--out", str(tmp_path / "saved-model"), *from_disk)
    assert (told["finished"], told["digest"], told["missing"]) == (True, end["digest"], [])
    assert parameters(torch.load(tmp_path / "saved-model" / "model.pt", weights_only=True)) == parameters(last)
