"""What peers say of themselves in the DHT."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core.rules import Rules
from p2p_diloco.net.interface import VALUE_BYTES_MAX
from p2p_diloco.node import records
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.records import key_of, read_peers
from p2p_diloco.node.status import Event, LastRound, PeerStatus, Ways
from tests.net.memory import MemoryNetwork

RECORD = PeerStatus(peer_id="a", name="alice", time=1.0, events=(Event(1.0, "joined"),))


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.text(min_size=50, max_size=200), max_size=9),
    st.lists(st.tuples(st.floats(0, 1e9), st.text(max_size=300)), max_size=9),
    st.lists(st.integers(0, 2**40), max_size=99),
)
def test_a_record_always_fits(addresses: list[str], events: list[tuple[float, str]], shards: list[int]) -> None:
    """However much there is to tell, the record stays within what the DHT takes, and keeps all that is short."""
    short = dict.fromkeys(("step", "samples", "bytes_sent", "bytes_received", "incarnation", "sync_every"), 2**40)
    record = PeerStatus(
        **short, peer_id="p" * 52, addresses=tuple(addresses), events=tuple(Event(*event) for event in events),
        aggregates=tuple(shards), aggregates_count=len(shards), last_round=LastRound(*[0.1] * 7),
    )  # fmt: skip
    value = record.pack()
    assert len(value) <= VALUE_BYTES_MAX
    found = PeerStatus.unpack(value)
    assert len(found.events) <= 3
    assert len(found.aggregates) <= 16
    cut = {"addresses": (), "events": (), "aggregates": ()}
    assert dataclasses.replace(found, **cut) == dataclasses.replace(record, **cut)


def test_the_newest_events_stay() -> None:
    events = tuple(Event(float(n), f"event {n}") for n in range(9))
    assert PeerStatus.unpack(dataclasses.replace(RECORD, events=events).pack()).events == events[-3:]


def test_other_versions_have_other_fields() -> None:
    """A field that this version doesn't know is passed over, and one that is missing is unknown."""
    other = msgpack.packb({"peer_id": "a", "step": 7, "mood": "good", "ways": [1, 0, 0]})
    assert PeerStatus.unpack(other) == PeerStatus(peer_id="a", step=7, ways=Ways(1, 0, 0))
    with pytest.raises(ValueError, match="not a peer's status: no peer_id"):
        PeerStatus.unpack(msgpack.packb({"name": "alice"}))


def test_records_are_read_from_all_buckets_and_forgeries_left_out() -> None:
    """Every peer's record is found, wherever it lies; one in another's name, or that is none, is not."""

    async def life() -> None:
        network = MemoryNetwork()
        names = [f"peer{n}" for n in range(12)]
        transports = [network.join(name, Inbox()) for name in names]
        for name, transport in zip(names, transports, strict=True):
            record = dataclasses.replace(RECORD, peer_id=name)
            await transport.store(key_of("r", name), name, record.pack(), 30.0)
        assert len({key_of("r", name) for name in names}) > 1
        forger = transports[0]
        lie = dataclasses.replace(RECORD, peer_id="peer1", name="mallory").pack()
        await forger.store(key_of("r", "peer1"), "peer1", lie, 60.0)
        await forger.store(key_of("r", "x"), "x", lie, 30.0)
        await forger.store(key_of("r", "y"), "y", b"\xc1 no msgpack", 30.0)
        found = await read_peers(forger, "r")
        assert sorted(found) == sorted(names)
        assert found["peer1"].name == "alice"

    asyncio.run(life())


def test_nodes_publish_their_status(memory_peer: Any, quick: dict[str, Any]) -> None:
    """A node's record is there soon, tells its state, and says at the end that it left."""

    async def life() -> None:
        network = MemoryNetwork()
        peer, watcher = memory_peer(network, "a", quick), network.join("w", Inbox())
        await peer.enter()
        seen = []
        for _ in range(100):
            if found := await read_peers(watcher, "r"):
                seen.append(found["a"].state)
                break
            await asyncio.sleep(0.05)
        await peer.stop()
        seen.append((await read_peers(watcher, "r"))["a"].state)
        assert seen[0] in ("joining", "training")
        assert seen[1] == "leaving"

    asyncio.run(life())


def test_a_cut_heals_though_both_sides_have_forgotten_each_other(
    memory_peer: Any, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a record is introduced to the replica at every look, for it may have forgotten it since the last."""
    monkeypatch.setattr(Rules, "forgotten_after", 0.3)
    monkeypatch.setattr(records, "LOOK_EVERY_S", 0.1)

    async def seen_by(peer: Any, expected: list[str]) -> None:
        while sorted((await peer.ask("ask", "told"))["peers"]) != expected:
            await asyncio.sleep(0.02)

    async def life() -> None:
        network = MemoryNetwork()
        peers = [memory_peer(network, name, quick) for name in "ab"]
        for peer in peers:
            peer.transport.limits = dataclasses.replace(peer.transport.limits, connect_timeout_s=0.01)
            await peer.enter()
        network.cut("a", "b")
        for peer in peers:
            await asyncio.wait_for(seen_by(peer, [peer.transport.peer_id]), 40.0)
        await asyncio.sleep(1.0)  # until both are forgotten
        network.heal()
        for peer in peers:
            await asyncio.wait_for(seen_by(peer, ["a", "b"]), 40.0)
        for peer in peers:
            await peer.stop()

    asyncio.run(life())


def test_every_peer_is_reported_at_every_look_and_introduced_when_its_addresses_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This peer itself is neither."""
    monkeypatch.setattr(records, "LOOK_EVERY_S", 0.01)

    async def life() -> None:
        network = MemoryNetwork()
        me, other = (network.join(name, Inbox()) for name in "ab")
        introduced, reported, seen = list[Any](), list[Any](), list[Any]()

        async def introduce(peer: str, addresses: Any) -> None:
            introduced.append((peer, addresses))

        monkeypatch.setattr(me, "introduce", introduce)
        looking = asyncio.create_task(
            records.look_around(me, "r", lambda *found: reported.append(found), lambda: 0, seen.append)
        )
        for transport, name, addresses in ((me, "a", ()), (other, "b", ("x",)), (other, "b", ("y",))):
            record = dataclasses.replace(RECORD, peer_id=name, addresses=addresses)
            assert await transport.store(key_of("r", name), name, record.pack(), 30.0)
            await asyncio.sleep(0.1)
            while name == "b" and (not seen or seen[-1] != addresses):
                await asyncio.sleep(0.01)
        while len(reported) <= 4:
            await asyncio.sleep(0.01)
        looking.cancel()
        assert introduced == [("b", ("x",)), ("b", ("y",))]
        assert seen == [("x",), ("y",)]
        assert set(reported) == {("b", "alice")}

    asyncio.run(asyncio.wait_for(life(), 100.0))
