"""The positions of a trainer's data follow its progress: each pair of the log's carry and the trainer's take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2p_diloco.core.data_use import Fate
from p2p_diloco.core.events import Carry
from p2p_diloco.node.data_side import fate
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.local_progress import Take
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.status import DataProgress
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited


@pytest.mark.parametrize(
    ("carry", "take", "expected"),
    [
        (None, None, Fate.KEEP),
        (Carry.KEEP, Take.KEEP, Fate.KEEP),
        (Carry.SUBTRACT, Take.SUBTRACT, Fate.COUNTED),
        (Carry.SUBTRACT, Take.MIX, Fate.COUNTED),
        (Carry.SUBTRACT, Take.DROP, Fate.COUNTED_ALONE),
        (Carry.RESTORE, Take.RESTORE, Fate.RESTORED),
        (Carry.KEEP, Take.SENT, Fate.SENT),
        (Carry.KEEP, Take.DROP, Fate.DROPPED),
        (Carry.DROP, Take.DROP, Fate.DROPPED),
        (Carry.SUBTRACT, Take.FORGET, Fate.DROPPED),
        (None, Take.FORGET, Fate.DROPPED),
    ],
)
def test_positions_follow_the_take(carry: Carry | None, take: Take | None, expected: Fate) -> None:
    """If the trainer loads only the global value, what was sent is counted if the log says so, and all else is gone."""
    assert fate(carry, take) is expected


@awaited
async def test_after_the_runs_end_there_is_no_data(memory_peer: Any, quick: dict[str, Any]) -> None:
    """What is trained on then is dropped, so its samples would come again and again, and the loop would never end.
    Before the end the peer's status has the progress of the data."""
    network = MemoryNetwork()
    peer, watcher = memory_peer(network, "a", {**quick, "stop_after_epochs": 2}), network.join("w", Inbox())
    await peer.enter()
    data = {"name": "train", "length": 100, "epochs": 0, "fingerprint": ""}
    await peer.ask("data", "data", data=data)
    load = await peer.ask("merge", "load", measures=False, afresh=False, data={"train": [[], 20]})
    peer.tell("have read", loaded=[shard for shard, _ in load["takes"]], torn=False)
    await peer.exchange(1.0)
    (told,) = (await peer.merge())["data"]
    assert told["stock"] == [[0, 20]]
    assert told["left"] is None
    for _ in range(200):
        status = (await read_peers(watcher, "r")).get("a")
        if status is not None and status.data:
            break
        await asyncio.sleep(0.05)
    assert status.data == (DataProgress("train", 100, 0, 0, 20),)
    await peer.exchange(1.0)
    load = await peer.merge()
    assert load["ended"]
    assert load["data"][0]["stock"] == []
    await peer.stop()
