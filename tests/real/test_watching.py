"""A real run is watched from outside: `status --check` for cron, beside a baseline, before and after a death."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from swarm import ROOT, Swarm, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

CONFIG = {"sync_every": 4, "heartbeat_interval": 0.5, "heartbeat_timeout": 6.0, "start_peers": 3}
TRAINING = {"params": {"w": [1000]}, "step_s": 0.1, "config": CONFIG, "loss": 2.12, "samples": 8}


def status(swarm: Swarm, *flags: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and log of one look."""
    command = [sys.executable, "-m", "p2p_diloco", "status", "--run-id", "test", "--initial-peers", *swarm.addresses]
    done = subprocess.run([*command, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=100.0)
    return done.returncode, done.stdout, done.stderr


def test_a_death_and_a_bad_loss_are_faults(swarm: Swarm, tmp_path: Path) -> None:
    """Nothing is wrong at first. A loss 6 % above the baseline's is, at the samples of all peers; then a kill."""
    swarm.bootstrap()
    assert status(swarm, "--check")[:2] == (
        1,
        "no peers: the run test has none, or this machine finds none of its records\n",
    )
    peers = [swarm.start(name, **TRAINING) for name in ("alice", "bob", "carol")]
    for peer in peers:
        peer.epoch(3)
    (tmp_path / "good.csv").write_text("samples,loss\n0,2.1\n1e9,2.1\n")
    (tmp_path / "better.csv").write_text("samples,loss\n0,2.0\n1e9,2.0\n")
    check = ("--check", "--baseline", tmp_path / "good.csv")
    counts = lambda: json.loads(status(swarm, "--once", "--json")[1])["run"]["samples"]  # noqa: E731
    until(lambda: counts() >= 3 * 3 * 4 * 8, 60.0, "three peers' samples of three rounds with four steps each")
    code, told, log = status(swarm, *check)
    assert (code, told) == (0, ""), log
    _, text, _ = status(swarm, "--once", "--json", "--baseline", tmp_path / "better.csv")
    run = json.loads(text)["run"]
    assert run["compared"]["excess"] == pytest.approx(0.06)
    code, told, _ = status(swarm, "--check", "--json", "--baseline", tmp_path / "better.csv")
    assert code == 1
    assert [line.partition(":")[0] for line in json.loads(told)] == ["loss above its baseline"]
    peers[2].die()
    epoch = peers[0].reached()
    peers[0].epoch(epoch + 3)
    time.sleep(2.0)  # the death is in a record at once, and the DHT has it within this
    code, told, _ = status(swarm, *check)
    assert code == 1
    assert "dead peer: carol" in told
