"""The asynchronous mode in whole nodes of one loop, over the in-memory swarm, the tests in the trainers' place."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from p2p_diloco.config import RunConfig
from p2p_diloco.core.carry import OLD, Outcome
from p2p_diloco.core.events import Release
from p2p_diloco.core.exchange import ENDED, LEFT
from p2p_diloco.node import trainer
from p2p_diloco.node.ledger import STALENESS_FROM, SubmissionLog
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited
from tests.node.conftest import MemoryPeer, entered, stop

ASYNC = {
    "mode": "async", "heartbeat_interval": 0.1, "heartbeat_timeout": 20.0, "codec": "fp32", "sync_every": 1,
    "outer_lr": 1.0, "outer_momentum": 0.0, "step_limit": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("count", "each"), [(3, 20), pytest.param(10, 1000, marks=[pytest.mark.chaos, pytest.mark.timeout(900)])]
)
@awaited
async def test_a_submission_is_applied_unchanged(count: int, each: int) -> None:
    """η = 1, no momentum, whole numbers: θ is minus the sum of all submissions, to the last one, on every slice."""
    draw = random.Random(int(os.environ.get("SEED", "7")))
    peers = await entered("abcdefghij"[:count], {**ASYNC, "slice_elements": 2})
    submitted = 0

    async def train(peer: Any, deltas: list[int]) -> None:
        nonlocal submitted
        for delta in deltas:
            await submit(peer, float(delta))
            submitted += delta

    await asyncio.gather(*(train(peer, [draw.randint(1, 9) for _ in range(each)]) for peer in peers))
    newest = torch.stack([peer.memory.theta for peer in peers]).amin(0)  # every submission lowers θ
    assert newest.tolist() == [-submitted] * 4


@awaited
async def test_what_is_too_stale_is_refused_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """A submission further behind than max_staleness is answered with the newest value, and not counted. With the next
    one it is refused again, for its oldest base is older still; then nothing of it is left, and the third counts."""
    caplog.set_level(logging.INFO)
    config = {**ASYNC, "max_staleness": 2, "merge": "rebase"}
    one, other = await entered("ab", config)
    await one.merge()
    for _ in range(3):
        await other.exchange(1.0)
    outcomes = []
    for delta in (100.0, 1000.0, 1.0):
        due = (await one.merge())["due"]
        one.memory.delta.fill_(delta)
        release = await one.contribute(due)
        one.memory.steps += 1
        outcomes += [Outcome(**outcome) for _, outcome in (await one.merge())["outcomes"]]
        assert release["sent"]
    assert caplog.text.count("not counted: the submission was further behind than max_staleness") == 2
    assert outcomes == [Outcome(), Outcome(dropped=OLD), Outcome(counted=True)]
    assert release["refused"] == 2
    assert one.memory.theta.tolist() == [-4.0] * 4


NUMBERS = {
    1: [-1.9, -4.61, -8.049],
    2: [-0.5, -1.9, -2.4, -4.61, -5.11, -8.049],
    3: [-1 / 3, -2 / 3, -1.9, -2.2333333, -2.5666667, -4.61],
}
"""θ after each submission of a pseudo-gradient of 1, by the size of the buffer: η = 1, μ = 0.9."""


def buffered(size: int) -> dict[str, Any]:
    return {**ASYNC, "heartbeat_timeout": 5.0, "outer_momentum": 0.9, "dn_buffer_size": size}


async def submit(peer: MemoryPeer, delta: float = 1.0) -> float:
    """The value that a peer's submission is answered with."""
    release = await peer.exchange(delta)
    assert release["sent"]
    assert not release["refused"]
    return peer.memory.theta[0].item()


@pytest.mark.parametrize("size", NUMBERS)
@awaited
async def test_each_submitter_is_answered_with_the_number(size: int) -> None:
    peers = await entered("abc", buffered(size))
    found = [await submit(peers[number % 3]) for number in range(len(NUMBERS[size]))]
    assert found == pytest.approx(NUMBERS[size], rel=1e-6)


@awaited
async def test_the_same_where_the_leader_dies_in_the_midst_of_a_buffer() -> None:
    """Momentum, buffer and count go on with the successor; the survivors take the dead one's turns."""
    network, found = MemoryNetwork(), []
    peers = {peer.setup.local.name: peer for peer in await entered("abcd", buffered(3), network)}
    for number in range(6):
        if number == 2:
            leader = peers["a"].node.replica.logs[0].held.plan.succession[0]
            network.kill(leader)
            peers.pop(leader).task.cancel()
        found.append(await submit([*peers.values()][number % len(peers)]))
    assert found == pytest.approx(NUMBERS[3], rel=1e-6)


@awaited
async def test_a_run_goes_on_from_its_disks_in_the_midst_of_a_buffer(tmp_path: Path) -> None:
    """Delayed Nesterov, N = 3: after four submissions both peers end, and start again from their checkpoints. θ,
    momentum, the buffer with one submission in it, its count and what is counted of whom are there again."""
    found: list[float] = []
    for life in range(2):
        network = MemoryNetwork()
        peers = [
            MemoryPeer(network, name, buffered(3), checkpoint_dir=tmp_path / name, save_every=1, restart_wait=5.0)
            for name in "ab"
        ]
        await asyncio.gather(*(peer.enter() for peer in peers))
        for number in range(4) if life == 0 else range(4, 6):
            found.append(await submit(peers[number % 2]))
        await stop(*peers)
    assert found == pytest.approx(NUMBERS[3], rel=1e-6)


@awaited
async def test_a_wait_is_told_once_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a submission waits for is no news where it is answered at once, as most are."""
    monkeypatch.setattr(trainer, "TELL_EVERY_S", 0.2)
    (one,) = await entered("Q", {**ASYNC, "min_peers": 2})
    due = (await one.merge())["due"]
    one.memory.stands_since = time.monotonic() + 1.0
    one.memory.stands = 1
    one.tell("contribute", n=99, fragment=due, weight=1.0, samples=1, stands=True, every=1, uses=[])
    told = await one.hear("waiting")
    assert time.monotonic() >= one.memory.stands_since + 0.2
    assert told["text"] == (
        "waiting for peers: 1 of 2 (min_peers) are alive; start more, or p2p-diloco set --min-peers 1"
    )


def test_a_log_of_submissions_counts_and_adjusts() -> None:
    # Staleness is counted by bins. Each submission that was counted is in one bin, by its staleness; one that was
    # not is among the refused, unless the run ended before it came.
    submissions = SubmissionLog(RunConfig(mode="async"))
    for behind in (0, 5, 64, 1000):
        submissions.ends(Release(sent=True, staleness=behind))
    for why in (LEFT, ENDED):
        assert submissions.ends(Release(sent=True, refused=why)).endswith(f"not counted: {why}")
    assert submissions.counted == 4
    assert submissions.refused == 1
    found = {low: count for low, count in zip(STALENESS_FROM, submissions.histogram, strict=True) if count}
    assert found == {0: 1, 4: 1, 64: 2}

    # Slower peers make fewer steps. With dylu a peer's number of steps follows the table of speeds. If the run's
    # H changes, its number changes by the same ratio at once, and follows the table from then on. Without dylu,
    # it is the run's.
    plain, submissions = (SubmissionLog(RunConfig(mode="async", sync_every=500, dylu=dylu)) for dylu in (False, True))
    assert plain.adjust(1.0, {"b": 10.0}) == submissions.adjust(0.0, {"b": 10.0}) == ""
    assert plain.steps == submissions.steps == 500
    assert "100 inner steps to an exchange instead of 500" in submissions.adjust(2.0, {"b": 10.0, "c": 5.0})
    assert submissions.steps == 100
    for one, steps in ((plain, 50), (submissions, 10)):
        one.begins_with(50)
        assert one.steps == steps
    assert submissions.adjust(2.0, {"b": 10.0}) == ""
    assert submissions.adjust(0.0, {"b": 10.0}).startswith("50 inner steps")
