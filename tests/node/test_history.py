"""What a node writes of its history, and what it does if it can't."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.core.events import Received, Wakeup
from p2p_diloco.core.messages import Mean, Slice
from p2p_diloco.core.rules import Rules
from p2p_diloco.history.reading import Life, check, read
from p2p_diloco.node import history
from p2p_diloco.node.history import Head
from tests.net.memory import MemoryNetwork
from tests.node.conftest import QUICK, MemoryPeer, exchange, stop

ROUNDS = 3


async def trained(names: str, **local: Any) -> None:
    """Nodes of these names train for some rounds, and leave."""
    network = MemoryNetwork()
    peers = [MemoryPeer(network, name, {**QUICK, "start_peers": len(names)}, **local) for name in names]
    await asyncio.gather(*(peer.enter() for peer in peers))
    for _ in range(ROUNDS):
        await exchange(*peers)
    await stop(*peers)


def lives(folder: Path) -> list[Life]:
    return read([folder])


def test_each_node_keeps_a_history(tmp_path: Path) -> None:
    """It is whole from the first event to the last record, plays again with the same effects, and only its user may
    read the file. Of slices and means it has the number of their bytes, and no bytes."""
    asyncio.run(trained("ab", history_path=tmp_path))
    found = lives(tmp_path)
    assert sorted(life.head.name for life in found) == ["a", "b"]
    for life in found:
        assert life.head.left
        assert not life.gap
        assert check(life) == (len(life.entries), "")
        assert any("Average(" in line for life in found for entry in life.entries for line in entry.lines())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("r/*")} == {0o600}
    received = (entry.what.message for life in found for entry in life.entries if isinstance(entry.what, Received))
    payloads = [message.payload for message in received if isinstance(message, Mean | Slice)]
    assert set(payloads) == {16}  # the number of bytes: four numbers in fp32


@pytest.mark.parametrize("broken", ["no folder", "full disk"])
def test_a_history_that_cannot_be_written_ends_with_one_warning(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its folder can't be made or the disk becomes full: one warning, and the run goes on."""
    if broken == "no folder":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "below"
    else:
        folder, put = tmp_path, history.History._put
        calls = iter(range(1))

        def full(self: history.History, records: list[object]) -> None:
            if next(calls, None) is None:
                raise OSError(28, "No space left on device")
            put(self, records)

        monkeypatch.setattr(history.History, "_put", full)
    with caplog.at_level(logging.WARNING):
        asyncio.run(trained("a", history_path=folder))
    assert sum("history ends here" in record.message for record in caplog.records) == 1


def test_it_lies_in_the_users_state_folder_if_one_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told otherwise, in a folder of the run's name."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    asyncio.run(trained("a", history_bytes=0))
    folder = tmp_path / "p2p_diloco" / "history"
    assert not [*folder.glob("*/*")]
    asyncio.run(trained("a"))
    (path,) = folder.glob("*/*")
    assert path.parent.name == "r"
    assert path.name.startswith("a-")


def test_a_young_peers_events_wait_less(tmp_path: Path) -> None:
    """Events wait for a quarter of the peer's life, and for 10 s at most."""
    kept = history.History(lambda: 0.0)
    names = dict.fromkeys(("version", "run_id", "founder", "peer", "name", "role"), "p")
    times = dict.fromkeys(("founded", "started", "began"), 0.0)
    rules = Rules(run="p", fragments=((0,),))
    head = Head(protocol=9, incarnation=1, eligible=True, rules=rules, **names, **times)  # type: ignore[arg-type]
    kept.begin(tmp_path / "p", head, 2**20)
    written = []
    for now in (4.0, 4.9, 5.1, 100.0, 105.0, 109.9, 110.1):
        kept.write(now, Wakeup(), [])
        written.append(len(lives(tmp_path)[0].entries))
    assert written == [0, 0, 3, 3, 3, 3, 7]


def test_old_histories_make_room(tmp_path: Path) -> None:
    """When a peer starts, the oldest files of all runs are deleted until the rest is within the bound."""
    folder, size = tmp_path / "earlier", 100_000
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}{history.SUFFIX}").write_bytes(bytes(size))
        os.utime(folder / f"{number}{history.SUFFIX}", (1000 + number, 1000 + number))
    asyncio.run(trained("a", history_path=tmp_path, history_bytes=size))
    assert sorted(path.name for path in folder.iterdir()) == [f"{number}{history.SUFFIX}" for number in (6, 7, 8, 9)]
