"""Peers train on data that only data nodes have: each sample once, though a data node is damaged and then killed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from once import Once
from swarm import ROOT, Member, Swarm, until

from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.invitation import Invitation

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

SAMPLES = 6_000
CACHE_BYTES = 6_000
CONFIG = {"sync_every": 5, "start_peers": 2, "heartbeat_interval": 0.5, "heartbeat_timeout": 10.0}


def started(swarm: Swarm, name: str, *arguments: str, on: Sequence[str] = ()) -> Member:
    """A data node that starts, on another machine if its command prefix is given."""
    return swarm.launch(name, ["-m", "p2p_diloco", "data", *arguments, "--name", name], on)


def data_node(swarm: Swarm, name: str, *arguments: str, on: Sequence[str] = ()) -> Member:
    """A data node that peers find."""
    member = started(swarm, name, *arguments, on=on)

    def serves() -> bool:
        assert member.process.poll() is None, member.log()
        return any("fingerprint" in line for line in list(member.said))

    until(serves, 180.0, lambda: f"{name} serves: {member.log()}")
    return member


def numbers(folder: Path) -> Path:
    folder.mkdir()
    text = "".join(f"{number}\n" for number in range(SAMPLES))
    (folder / "numbers.txt").write_text(text)
    return folder


def test_each_sample_is_used_once_though_a_data_node_and_a_peer_die(swarm: Swarm, tmp_path: Path) -> None:
    """Two data nodes serve one data set to two peers, whose caches hold a fifth of it. Half of the file of one data
    node is damaged, so that half of its slices are refused; then it is killed, and so is one of the peers, for which
    another one comes. Loaders read ahead in processes of their own, and a step takes two batches. Training goes on,
    every sample is counted once, as θ itself shows, and what the peers keep is whole and bounded."""
    options: dict[str, Any] = {"slices": "numbers", "caches": str(tmp_path / "caches"), "step_s": 0.1, "accumulate": 2}
    options |= {"workers": 1, "local": {"cache_bytes": CACHE_BYTES}}
    run = Once(swarm, tmp_path, SAMPLES, 1, 3, config=CONFIG, **options)
    of = ("--as", "numbers", "--slice-bytes", "300", "--run-id", "test", "--initial-peers", *swarm.addresses)
    damaged = numbers(tmp_path / "damaged")
    first = data_node(swarm, "first", str(damaged), *of)
    text = (damaged / "numbers.txt").read_text()
    (damaged / "numbers.txt").write_text(text[: len(text) // 2].replace("1", "2") + text[len(text) // 2 :])
    second = data_node(swarm, "second", str(numbers(tmp_path / "whole")), *of)
    for _ in range(2):
        run.join()
    run.reaches(SAMPLES // 4, 180.0)
    first.die()
    run.kill(run.living[0])
    run.join()
    run.ended(180.0)
    assert not run.verdict()
    assert all(member.last("end")["complete"] for member in run.living)
    assert all("doesn't have its hash: numbers.txt was changed" in one.log() for one in (first, run.living[0]))
    assert second.process.poll() is None
    for folder in (tmp_path / "caches").iterdir():
        kept = [path for path in folder.iterdir() if len(path.name) == 64]
        assert 0 < sum(path.stat().st_size for path in kept) <= CACHE_BYTES
        assert all(blake3(path.read_bytes()).hexdigest() == path.name for path in kept)


def test_members_of_a_private_run_read_and_strangers_do_not(swarm: Swarm, tmp_path: Path) -> None:
    """The example trains under a line of `join`, and waits until a data node is there. A data node without an
    invitation, or with another data set under the same name, is refused with a sentence."""
    swarm.bootstrap()
    corpus, key, place = tmp_path / "corpus", RunKey.create(), tmp_path / "member"
    corpus.mkdir()
    for module in (argparse, textwrap):
        (corpus / f"{module.__name__}.txt").write_text(Path(module.__file__).read_text())
    grant, seed = key.grant("worker", "shared", time.time() + 3600)
    place.mkdir()
    invite = place / "secret.invite"
    invite.write_text(Invitation("secret", tuple(swarm.addresses), grant, seed, key.secret).pack())
    invite.chmod(0o600)
    key.save(place / "secret.key")
    join = ["-m", "p2p_diloco", "join", "--invite", invite.name, "--sync-every", "20", "--exit-timeout", "2"]
    line = [sys.executable, *join, "--", sys.executable, str(ROOT / "examples" / "data_node.py")]
    log = place / "log"
    with log.open("w") as err:
        peer = subprocess.Popen(line, cwd=place, stdout=subprocess.PIPE, stderr=err, text=True)
    try:
        until(lambda: "founded the run" in log.read_text(), 180.0, lambda: f"the run: {log.read_text()}")
        stranger = started(swarm, "stranger", str(corpus), "--run-id", "secret", "--initial-peers", *swarm.addresses)
        assert stranger.status(120.0) == 5
        assert "--run-id=secret is the name of a private run" in stranger.log()
        data_node(swarm, "first", str(corpus), "--slice-bytes", "10k", "--invite", str(invite))
        other = started(swarm, "other", str(corpus), "--slice-bytes", "9k", "--invite", str(invite))
        assert other.status(120.0) == 5
        assert "--as=corpus is another data set on the data node first:" in other.log()
        outcome = json.loads(peer.communicate(timeout=180)[0].splitlines()[-1])
        assert outcome["complete"], log.read_text()
        assert outcome["loss"] < 5.0  # it began at 5.5
    finally:
        peer.kill()
        peer.communicate()
