"""The bases of pseudo-gradients after θ has changed."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.core.fetching import Fetching
from p2p_diloco.core.rules import Rules
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, MemoryPeer, entered, exchange


@pytest.mark.parametrize("stands", [True, False])
@awaited
async def test_a_trainer_hears_where_its_base_is(stands: bool) -> None:
    """A trainer that stands still during its exchange needs no memory beside θ; one that trains finds the old base in
    `base`, once."""
    peer = MemoryPeer(MemoryNetwork(), "a", QUICK, sizes=(2,))
    await peer.enter(theta=5.0)
    await peer.ask("read", "readable")
    peer.tell("have read", loaded=[])  # a look at the global values moves no base
    first = await peer.merge()
    assert (first["kept"], first["gone"], first["outcomes"]) == ([], [0], [[0, {"counted": False, "dropped": ""}]])
    await peer.exchange(1.0, stands=stands)
    loads = [message for message in peer.said if message["kind"] == "load"]
    assert loads[-1]["outcomes"]
    assert (loads[-1]["kept"], loads[-1]["gone"]) == (([], [0]) if stands else ([0], []))
    assert peer.memory.theta.tolist() != [5.0, 5.0]
    assert peer.memory.base.tolist() == ([0.0, 0.0] if stands else [5.0, 5.0])
    later = await peer.merge()
    assert (later["kept"], later["gone"], later["outcomes"]) == ([], [], [])


async def two_after_a_round(**config: Any) -> list[MemoryPeer]:
    peers = await entered("ab", {**QUICK, "start_peers": 2, **config}, sizes=(3,))
    await exchange(*peers)
    return peers


@pytest.mark.usefixtures("memory_is_always_looked_at")
@awaited
async def test_a_base_that_was_changed_in_memory_is_mended_first() -> None:
    """The base is repaired before a pseudo-gradient is computed from it, so no progress is lost."""
    a, b = await two_after_a_round()
    true = a.memory.theta.tolist()
    assert b.memory.theta.tolist() == true
    b.memory.theta[1] += 1.0
    await b.merge()
    assert b.memory.theta.tolist() != true  # nothing is measured
    load = await b.merge(measures=True)
    assert b.memory.theta.tolist() == true
    assert (load["kept"], load["lost"], load["outcomes"], load["due"]) == ([], [], [], 0)


@pytest.mark.usefixtures("memory_is_always_looked_at")
@awaited
async def test_a_changed_base_is_not_kept_when_others_pass_its_trainer_by() -> None:
    """Their commit is computed on what was changed, found wrong, and fetched; what was trained can't be told then."""
    a, b = await two_after_a_round(round_timeout=1.0)
    b.memory.theta[1] += 1.0
    await a.exchange(1.0)  # b trains
    await until(lambda: b.memory.theta.tolist() == a.memory.theta.tolist())
    load = await b.merge(measures=True)
    assert (load["kept"], load["lost"]) == ([], [0])
    assert not b.memory.base.any()


@pytest.mark.usefixtures("memory_is_always_looked_at")
@awaited
async def test_an_unrepaired_base_is_used_after_a_bounded_wait_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for a repair is bounded, because no peer may have the slice; the log names the slices."""
    monkeypatch.setattr(Rules, "mended_within", 0.05)
    monkeypatch.setattr(Fetching, "repaired", lambda self, fragment: (0,))

    (peer,) = await entered("a", {**QUICK, "heartbeat_timeout": 20.0}, sizes=(3,))
    await peer.exchange(1.0)
    peer.memory.theta[1] += 1.0
    assert (await peer.merge(measures=True))["due"] == 0
    await peer.stop()
    assert "slices 0 were corrupted in memory, and not repaired within 0.05 s" in caplog.text
