"""After a power cut: whoever comes back waits for the others, and the greatest version on any disk wins."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.core.messages import Choice
from p2p_diloco.core.state import append, key_of
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.node import beginning
from p2p_diloco.node.beginning import counted_last
from p2p_diloco.node.run_end import GoesOn
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, exchange
from tests.node.headers_world import Run, ready


def disk(folder: Path, name: str) -> dict[str, Any]:
    return {"checkpoint_dir": folder / name, "save_every": 1}


async def cut(folder: Path, **more: Any) -> list[float]:
    """Two peers make a round together; one goes, the other makes two more alone, and goes. Its last θ."""
    network = MemoryNetwork()
    a, b = (MemoryPeer(network, name, {**QUICK, **more}, **disk(folder, name)) for name in "ab")
    await a.enter(theta=1.0)
    await b.enter()
    for _ in range(2):  # once a commit has named it, b is waited for
        await exchange(a, b)
    await b.stop()
    for _ in range(2):
        await a.exchange(1.0)
    last: list[float] = a.memory.theta.tolist()
    await a.stop()
    return last


@pytest.mark.parametrize("late", ["a", "b"])
@awaited
async def test_the_greatest_version_wins_though_its_disk_comes_late(tmp_path: Path, late: str) -> None:
    """Neither trains on before the other is there; then both stand where the one with more had stood."""
    last = await cut(tmp_path, heartbeat_timeout=5.0)
    network = MemoryNetwork()
    peers = {name: MemoryPeer(network, name, **disk(tmp_path, name)) for name in "ab"}
    early = peers.pop("b" if late == "a" else "a")
    entering = asyncio.create_task(early.enter())
    # a's last round was of a alone, so a goes on at once; b's was of both
    await asyncio.wait({entering}, timeout=1.0 if late == "a" else 60.0)
    assert entering.done() == (late == "b")
    (other,) = peers.values()
    await asyncio.gather(entering, other.enter())
    assert early.memory.theta.tolist() == other.memory.theta.tolist() == last


@awaited
async def test_a_newcomer_beside_an_old_disk_ends_no_wait(tmp_path: Path) -> None:
    """A newcomer is none of those that are waited for, and gets no state to train on before they are there."""
    last = await cut(tmp_path, heartbeat_timeout=5.0)
    network = MemoryNetwork()
    b, newcomer = MemoryPeer(network, "b", **disk(tmp_path, "b")), MemoryPeer(network, "n")
    entering = [asyncio.create_task(b.enter())]
    await until(lambda: "r/config" in network.records)
    entering.append(asyncio.create_task(newcomer.enter()))
    await until(lambda: any("restart_wait" in message.get("text", "") for message in newcomer.said))
    assert not any(task.done() for task in entering)
    a = MemoryPeer(network, "a", **disk(tmp_path, "a"))
    await asyncio.gather(a.enter(), *entering)
    assert a.memory.theta.tolist() == b.memory.theta.tolist() == newcomer.memory.theta.tolist() == last


@awaited
async def test_waiting_for_the_others_has_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After `restart_wait` training goes on with whoever is there, and the log says who was missing."""
    await cut(tmp_path)
    alone = MemoryPeer(MemoryNetwork(), "b", restart_wait=0.6, **disk(tmp_path, "b"))
    began = time.monotonic()
    await alone.enter()
    assert time.monotonic() - began >= 0.6
    assert (await alone.exchange(1.0))["sent"]
    await alone.stop()
    assert "going on without 1 of the 2 peers of the last round (a)" in caplog.text


async def waited(training: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch, generation: int) -> bool:
    """Whether peer a still waits for c, of a group of three, when it has looked at these records, one look each; b is
    of this generation."""
    monkeypatch.setattr(beginning, "LOOK_EVERY_S", 0.0)
    mine, theirs = (SimpleNamespace(model=ModelVersion(g, 1), epochs=(1,)) for g in (0, generation))
    roster = SimpleNamespace(alive=lambda: ["b"], holders=lambda: ["b"], mine=mine, summaries=lambda: {"b": theirs})
    replica: Any = SimpleNamespace(me="a", finished=False, roster=roster)
    looks, over = iter(training), asyncio.Event()

    async def look() -> dict[str, float]:
        found = next(looks, None)
        if found is None:
            over.set()
            await asyncio.Event().wait()
        assert found is not None
        return found

    goes_on = GoesOn(replica, look)
    waiting = asyncio.create_task(beginning.until_the_others_are_back(replica, "abc", 60.0, goes_on, lambda text: None))
    looked = asyncio.create_task(over.wait())
    await asyncio.wait({waiting, looked}, return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
    still = not waiting.done()
    waiting.cancel()
    looked.cancel()
    return still


@pytest.mark.parametrize(
    ("training", "generation", "still"),
    [
        ([{"b": 5.0}] * 9, 0, True),  # left behind: nobody renews it
        ([{"b": 5.0}, {"b": 5.0}, {"b": 7.0}], 0, False),
        ([{}, {"b": 5.0}, {"b": 7.0}], 0, False),
        ([{"c": 5.0}, {"c": 7.0}, {"c": 9.0}], 0, True),  # its author can't be reached
        ([{"b": 5.0}, {"b": 7.0}, {"b": 9.0}], 1, True),  # training on from an older state leads to another end
    ],
)
def test_only_a_training_peer_shows_that_the_run_never_stopped(
    training: list[dict[str, float]], generation: int, still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record from before a power cut is as good as none, though its author lives again: one counts once it has been
    written anew, whatever any clock says. A newer generation that trains is waited for until its state has come."""
    assert asyncio.run(waited(training, monkeypatch, generation)) == still


def test_a_run_goes_on_as_long_as_somebody_is_there() -> None:
    """Who was seen to train and is gone may have come to the end, or be dead."""
    alive, clock = ["b"], iter(range(9))
    replica: Any = SimpleNamespace(roster=SimpleNamespace(alive=lambda: alive))

    async def look() -> dict[str, float]:
        return {"b": float(next(clock))}

    async def looks() -> list[bool]:
        goes_on = GoesOn(replica, look)
        found = [await goes_on.look(), await goes_on.look()]
        alive.clear()
        return [*found, await goes_on.look()]

    assert asyncio.run(looks()) == [False, True, False]


def test_a_helper_of_the_last_round_is_waited_for_too() -> None:
    """One without a model may hold the greatest version: it contributes without a weight."""
    run = Run(3)
    trains, helps, absent = run.names
    base = run.state.version
    entries = (trains, ready(trains, base)), (helps, replace(ready(helps, base), weight=0.0, hashes=()))
    choice = Choice(run.me, 0, entries)
    state = append(run.state, choice, key_of(0, base, choice), run.hashes, run.rules)
    assert counted_last(state) == [trains, helps] != [*state.roll]
    assert absent in state.roll
