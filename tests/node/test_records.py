"""What peers say of themselves in the DHT."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from functools import reduce
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core import messages as m
from p2p_diloco.core.state import rooted
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.net.interface import VALUE_BYTES_MAX, Refusal
from p2p_diloco.node import records
from p2p_diloco.node.headers import pack
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.records import BOARD, publish, read_peers
from p2p_diloco.node.reporting import WAITS_S
from p2p_diloco.node.run_record import RunRecord, signature_of
from p2p_diloco.node.signatures import Signatures
from p2p_diloco.node.status import DataProgress, Event, GpuMemory, LastRound, PeerStatus, RefusedPeer, cut
from p2p_diloco.node.wire import PROTOCOL
from tests.net.memory import MemoryNetwork
from tests.net.patience import awaited, until
from tests.node.conftest import QUICK, entered, stop

VERSION = Version(0, 0, 0, "d")
RECORD = PeerStatus(peer_id="a", name="alice", time=1.0, events=(Event(1.0, "joined"),))


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.text(min_size=50, max_size=200), max_size=9),
    st.lists(st.tuples(st.floats(0, 1e9), st.text(max_size=300)), max_size=9),
    st.lists(st.integers(0, 2**40), max_size=99),
    st.lists(st.tuples(st.text(max_size=99), st.integers(0, 2**40), st.text(max_size=300)), max_size=9),
)
def test_a_record_always_fits(
    addresses: list[str], events: list[tuple[float, str]], slices: list[int], refused: list[tuple[str, int, str]]
) -> None:
    """However much there is to tell, the record stays within what the DHT takes, and keeps all that is short."""
    short = dict.fromkeys(("step", "samples", "bytes_sent", "bytes_received", "incarnation", "sync_every"), 2**40)
    record = PeerStatus(
        **short, peer_id="p" * 52, addresses=tuple(addresses), events=tuple(Event(*event) for event in events),
        aggregates=tuple(slices), aggregates_count=len(slices), last_round=LastRound(*[0.1] * 8),
        refused=tuple(RefusedPeer(*one) for one in refused),
        data=(DataProgress("n" * 40, 2**40, 2**20, 2**60, 2**40),) * 4,
    )  # fmt: skip
    value = record.pack()
    assert len(value) <= VALUE_BYTES_MAX
    found = PeerStatus.unpack(value)
    cut = {"addresses": (), "events": (), "aggregates": (), "refused": ()}
    assert dataclasses.replace(found, **cut) == dataclasses.replace(record, **cut)


def test_a_record_keeps_what_matters_and_is_read_with_care() -> None:
    # a long event says that it is cut; a text that fits stays whole
    assert (cut("x" * 80), cut("x" * 81)) == ("x" * 80, "x" * 79 + "…")

    # The peers that were refused last stay. In a record that is too long, events make room first, and addresses
    # only after all refused peers.
    refused = tuple(RefusedPeer(f"peer {n}", 1, "x" * 99) for n in range(2))
    events = tuple(Event(float(n), "x" * 80) for n in range(3))
    addresses = tuple(f"/ip4/192.0.2.{n}/tcp/4001/p2p/{'x' * 52}" for n in range(4))
    full = dataclasses.replace(RECORD, refused=refused, events=events, addresses=addresses, host="x" * 150)
    found = PeerStatus.unpack(full.pack())
    assert (found.refused, found.addresses) == (refused, addresses)
    assert len(found.events) < 3
    longer = PeerStatus.unpack(dataclasses.replace(full, host="x" * 350).pack())
    assert (longer.events, len(longer.refused), longer.addresses) == ((), 1, addresses)

    # What is no record of this protocol is none. A field that has another type, or is missing, is unknown.
    # Without the peer's id it is no record.
    protocol, fields = msgpack.unpackb(RECORD.pack())
    assert PeerStatus.unpack(msgpack.packb([protocol, [*fields[:1], 7]])) == PeerStatus(peer_id="a")
    for content in ([protocol + 1, fields], [protocol, [7, *fields[1:]]], [protocol, []], fields, {}):
        with pytest.raises(ValueError, match="not a peer's status"):
            PeerStatus.unpack(msgpack.packb(content))

    # Settings that can not be printed are no settings. Anyone can write the record of an open run: a joiner and
    # `status` would end in a RecursionError.
    nested = reduce(lambda inner, _: [inner], range(700), [])
    record = RunRecord({"outer_options": {"a": [[1]]}}, "model", "cut", 1, 10, 1, "id", 0.0)
    assert RunRecord.unpack(record.pack()) == record
    _, fields = msgpack.unpackb(signature_of(record.pack())[0])
    with pytest.raises(ValueError, match="nested too deeply"):
        RunRecord.unpack(msgpack.packb([msgpack.packb([PROTOCOL, [{"a": nested}, *fields[1:]]]), b""]))


@awaited
async def test_records_are_read_from_all_buckets_and_forgeries_left_out() -> None:
    """Every peer's record is found, wherever it lies; one in another's name, or that is none, is not."""
    network = MemoryNetwork()
    names = [f"peer{n}" for n in range(12)]
    transports = [network.join(name, Inbox()) for name in names]
    for name, transport in zip(names, transports, strict=True):
        record = dataclasses.replace(RECORD, peer_id=name)
        await transport.store(BOARD.key("r", name), name, record.pack(), 30.0)
    assert len({BOARD.key("r", name) for name in names}) > 1
    forger = transports[0]
    lie = dataclasses.replace(RECORD, peer_id="peer1", name="mallory").pack()
    await forger.store(BOARD.key("r", "peer1"), "peer1", lie, 60.0)
    await forger.store(BOARD.key("r", "x"), "x", lie, 30.0)
    await forger.store(BOARD.key("r", "y"), "y", b"\xc1 no msgpack", 30.0)
    found = await read_peers(forger, "r")
    assert sorted(found) == sorted(names)
    assert found["peer1"].name == "alice"


@awaited
async def test_nodes_publish_their_status() -> None:
    """A node's record is there soon, tells its state, and says at the end that it left. An aggregator is one."""
    network = MemoryNetwork()
    watcher, states = network.join("w", Inbox()), dict[str, str]()
    peers = [*await entered("a", network=network), *await entered("b", {}, network, sizes=None)]
    while states.get("a") not in ("training", "idle") or states.get("b") != "aggregating":
        await asyncio.sleep(0.05)
        states = {peer: status.state for peer, status in (await read_peers(watcher, "r")).items()}
        assert set(states.values()) <= {"joining", "training", "idle", "aggregating"}
    await stop(*peers)
    assert {status.state for status in (await read_peers(watcher, "r")).values()} == {"leaving"}


@awaited
async def test_news_is_published_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the next regular time; several events within a moment make one record. Also while an earlier record
    is still being stored, because a member of the DHT doesn't answer: then only what changes without an event waits."""
    monkeypatch.setattr(records, "PUBLISH_EVERY_S", 60.0)
    monkeypatch.setattr(records, "NEWS_AFTER_S", 0.05)
    peer, news, answers = MemoryNetwork().join("a", Inbox()), asyncio.Event(), asyncio.Event()
    described, stored = list[int](), list[int]()

    async def store(key: str, subkey: str, value: bytes, ttl_s: float) -> bool:
        stored.append(PeerStatus.unpack(value).step or 0)
        return await answers.wait()

    def describe() -> PeerStatus:
        described.append(len(described))
        return dataclasses.replace(RECORD, peer_id="a", time=time.time(), step=described[-1])

    monkeypatch.setattr(peer, "store", store)
    answers.set()
    publishing = asyncio.create_task(publish(peer, "r", describe, news))
    for expected in range(3):
        await until(lambda expected=expected: len(stored) > expected)
        assert stored == described == list(range(expected + 1))
        for _ in range(3):
            news.set()
            await asyncio.sleep(0)
    await until(lambda: len(stored) == 4)
    answers.clear()
    monkeypatch.setattr(records, "PUBLISH_EVERY_S", 0.01)
    news.set()
    await until(lambda: len(described) >= 9)
    assert len(stored) == 5
    news.set()
    await until(lambda: len(stored) == 6)
    assert stored[-1] >= 8
    answers.set()
    await until(lambda: len(stored) >= 7)
    publishing.cancel()
    assert (await asyncio.wait({publishing}, timeout=20.0))[0]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@awaited
async def test_a_peer_that_waits_for_long_says_what_for() -> None:
    """Its status has the sentence, how much memory it takes, also of its GPU, and how many threads its node has; a peer
    that has waited for a moment says nothing."""
    network = MemoryNetwork()
    watcher = network.join("w", Inbox())
    (peer,) = await entered("Q", {**QUICK, "start_peers": 2}, network, node_threads=3)
    exchange = asyncio.create_task(peer.exchange(1.0))
    peer.memory.gpu_reserved, peer.memory.gpu_total = 11_213_455_555, 85_029_158_912
    found = []
    for waited_s in (0.0, WAITS_S + 1.0):
        status = RECORD
        while not status.memory_bytes or bool(status.waits_for) != bool(waited_s):
            peer.memory.stands_since = time.monotonic() - waited_s
            await asyncio.sleep(0.05)
            status = (await read_peers(watcher, "r")).get("Q", RECORD)
        found.append(status)
    exchange.cancel()
    await peer.stop()
    shortly, long = found
    assert shortly.waits_for == ""
    assert "1 of 2 (start_peers) have contributed" in long.waits_for
    assert long.memory_bytes is not None
    assert long.memory_bytes > 10**7
    assert long.gpu_memory == GpuMemory(11_210_000_000, 85_029_158_912)
    assert long.node_threads == 3


@awaited
async def test_a_refused_message_is_told_in_the_status() -> None:
    """By the sender's id and the reason, whether the node refused the message or the replica ignored it."""
    network = MemoryNetwork()
    (peer,), liar = await entered("Q", network=network), network.join("liar-123456", Inbox())
    run, base = peer.inbox.handler._run, peer.node.replica.logs[0].held.version
    life = ContributionId(2**61, 1)
    ready = rooted(m.Ready(0, base, life, life, 1.0, 1, tuple("0" * 64 for _ in run.rules.fragments[0])))
    signatures = Signatures(liar.peer_id, liar, run.token)
    links = ((base.epoch, base.chain),)
    for said, why in (
        (m.Told((base, base), (links, links)), "the Told is refused: it lists 2 fragments"),
        (ready, "its contribution is refused"),
    ):
        with contextlib.suppress(Refusal):
            await liar.send("Q", pack(signatures.signed(said), run.token)[0])
        told = RECORD
        while not any(one.peer == "…123456" and why in one.why for one in told.refused):
            await asyncio.sleep(0.05)
            told = (await read_peers(liar, "r")).get("Q", RECORD)


@awaited
async def test_each_look_reports_all_and_introduces_who_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This peer itself is neither."""
    monkeypatch.setattr(records, "LOOK_EVERY_S", 0.01)
    network = MemoryNetwork()
    me, other = (network.join(name, Inbox()) for name in "ab")
    introduced, reported, seen = list[Any](), list[Any](), list[Any]()

    async def introduce(peer: str, addresses: Any) -> None:
        introduced.append((peer, addresses))

    monkeypatch.setattr(me, "introduce", introduce)

    async def look() -> None:
        async for record, is_new in records.look_around(me, "r", lambda: 0):
            if record.peer_id != "a":
                reported.append((record.peer_id, record.name))
                seen.extend([record.addresses] if is_new else [])

    looking = asyncio.create_task(look())
    for transport, name, addresses in ((me, "a", ()), (other, "b", ("x",)), (other, "b", ("y",))):
        record = dataclasses.replace(RECORD, peer_id=name, addresses=addresses)
        assert await transport.store(BOARD.key("r", name), name, record.pack(), 30.0)
        await asyncio.sleep(0.1)
        while name == "b" and (not seen or seen[-1] != addresses):
            await asyncio.sleep(0.01)
    await until(lambda: len(reported) > 4)
    looking.cancel()
    assert introduced == [("b", ("x",)), ("b", ("y",))]
    assert seen == [("x",), ("y",)]
    assert set(reported) == {("b", "alice")}


@pytest.mark.parametrize(
    ("known", "young", "seconds"),
    [
        *((0, False, 1.5), (7, False, 1.5), (8, False, 10.0), (20, False, 10.0), (1000, False, 500.0)),
        *((8, True, 1.5), (100, True, 10.0)),
    ],
)
def test_a_peer_looks_often_while_it_is_young_or_knows_few(known: int, young: bool, seconds: float) -> None:
    """A look reads the records of all peers: what a peer reads in a second does not grow with the run."""
    assert records.looks_again_in(known, young=young) == seconds
