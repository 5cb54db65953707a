"""After a power cut: whoever comes back waits for the others, and the greatest version on any disk wins."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.net.memory import MemoryNetwork


def disk(folder: Path, name: str) -> dict[str, Any]:
    return {"checkpoint_dir": folder / name, "save_every": 1}


async def started(peers: list[Any]) -> None:
    """Enter together, a checkpoint's state or another at hand."""
    await asyncio.gather(*(peer.enter(theta=1.0) for peer in peers))


async def cut(memory_peer: Any, config: dict[str, Any], folder: Path) -> list[float]:
    """Two peers make a round together; one goes, the other makes two more alone, and goes. Its last θ."""
    network = MemoryNetwork()
    a, b = (memory_peer(network, name, config, **disk(folder, name)) for name in "ab")
    await a.enter(theta=1.0)
    await b.enter()
    for _ in range(2):  # once a commit has named it, b is waited for
        await asyncio.gather(a.exchange(1.0), b.exchange(1.0))
    await b.stop()
    for _ in range(2):
        await a.exchange(1.0)
    last: list[float] = a.memory.theta.tolist()
    await a.stop()
    return last


@pytest.mark.parametrize("late", ["a", "b"])
def test_the_greatest_version_wins_though_its_disk_comes_late(
    memory_peer: Any, quick: dict[str, Any], tmp_path: Path, late: str
) -> None:
    """Neither trains on before the other is there; then both stand where the one with more had stood."""

    async def life() -> None:
        config = {**quick, "heartbeat_timeout": 5.0}
        last = await cut(memory_peer, config, tmp_path)
        network = MemoryNetwork()
        peers = {name: memory_peer(network, name, **disk(tmp_path, name)) for name in "ab"}
        early = peers.pop("b" if late == "a" else "a")
        entering = asyncio.create_task(early.enter())
        await asyncio.sleep(1.0)
        waits = not entering.done()
        (other,) = peers.values()
        await asyncio.gather(entering, other.enter())
        # a's last round was of a alone, so a goes on at once; b's was of both
        assert waits == (late == "a")
        assert early.memory.theta.tolist() == other.memory.theta.tolist() == last
        for peer in (early, other):
            await peer.stop()

    asyncio.run(life())


def test_waiting_for_the_others_has_an_end(
    memory_peer: Any, quick: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After `restart_wait` training goes on with whoever is there, and the log says who was missing."""

    async def life() -> None:
        await cut(memory_peer, quick, tmp_path)
        alone = memory_peer(MemoryNetwork(), "b", restart_wait=0.6, **disk(tmp_path, "b"))
        began = time.monotonic()
        await alone.enter()
        assert time.monotonic() - began >= 0.6
        assert (await alone.exchange(1.0))["sent"]
        await alone.stop()

    asyncio.run(life())
    assert "going on without 1 of the 2 peers of the last round (a)" in caplog.text
