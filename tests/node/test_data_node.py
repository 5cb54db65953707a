"""Data nodes serve slices, and a peer fetches them, over the in-memory swarm."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.core.events import Broke, Moving, Received
from p2p_diloco.data.files import cut_files
from p2p_diloco.errors import ConfigError, Refused
from p2p_diloco.net.interface import Limits, Refusal
from p2p_diloco.node import data_node, fetching, wire
from p2p_diloco.node.board import Board
from p2p_diloco.node.data_node import DataNode, Served
from p2p_diloco.node.fetching import AT_ONCE, DataNodeRecord, Fetching, board_of, find_data_nodes
from p2p_diloco.node.headers import packed
from p2p_diloco.node.inbox import Handler, Inbox
from p2p_diloco.peer.slices import open_slices
from tests.net.memory import MemoryNetwork
from tests.net.patience import plays, until
from tests.node.conftest import QUICK, MemoryPeer

SLICES = 8


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_EVERY_S", "LOOK_SOON_S", "TELL_EVERY_S", "AGAIN_S"):
        monkeypatch.setattr(fetching, name, 0.05)
    monkeypatch.setattr(data_node, "PUBLISH_EVERY_S", 0.05)


def served(folder: Path, text: str = "line", name: str = "corpus") -> Served:
    """A data set of 8 slices of 8 bytes, in files of this folder."""
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text("".join(f"{text} {number:02}\n" for number in range(SLICES)))
    return Served(name, *cut_files([folder], 1, lambda text: None))


class Nodes:
    """Data nodes and one reader in a network."""

    def __init__(self, folder: Path, bytes_max: int = 10**6) -> None:
        self.network, self.folder = MemoryNetwork(), folder
        self.inbox = Inbox()
        limits = Limits(read_timeout_s=0.5, connect_timeout_s=0.2)
        transport = self.network.join("reader", self.inbox, limits=limits)
        self.reader = Fetching(transport, self.inbox.questions, "r", folder / "cache", bytes_max)
        self.inbox.handler = Handler(wire.ANY_RUN)
        self.nodes: dict[str, DataNode] = {}
        self.announcing: list[asyncio.Task[None]] = []
        self.said: list[str] = []

    async def add(self, name: str, what: Served | None = None) -> DataNode:
        """Start a data node, and wait until it is announced."""
        inbox = Inbox()
        transport = self.network.join(name, inbox, limits=Limits(read_timeout_s=0.5))
        inbox.handler = node = self.nodes[name] = DataNode(transport, inbox, what or served(self.folder / name))
        await node.refuse_another("r")
        ready = asyncio.Event()
        self.announcing.append(asyncio.create_task(node.announce("r", name.upper(), ready.set)))
        await ready.wait()
        return node

    def kill(self, name: str) -> None:
        """End a data node. Its record stays for a while."""
        self.announcing[list(self.nodes).index(name)].cancel()
        self.network.kill(name)

    def told(self, words: str) -> bool:
        """Whether the reader has said this."""
        return any(words in text for text in self.said)

    async def read(self, *indices: int) -> list[bytes]:
        """The bytes of slices of the one data set that there is."""
        manifest = await self.reader.open("corpus", "", self.said.append)
        found = await asyncio.gather(*(self.reader.get(manifest.identity, i, self.said.append) for i in indices))
        return [path.read_bytes() for path in found]


def live(test: Callable[[Nodes], Awaitable[None]], bytes_max: int = 10**6) -> None:
    async def bounded() -> None:
        with tempfile.TemporaryDirectory() as folder:
            nodes = Nodes(Path(folder), bytes_max)
            try:
                await asyncio.wait_for(test(nodes), 30)
            finally:
                for task in nodes.announcing:
                    task.cancel()
                nodes.reader.close()

    asyncio.run(bounded())


def line(index: int) -> bytes:
    return b"line %02d\n" % index


@plays(live)
async def test_slices_come_from_all_data_nodes_and_stay(nodes: Nodes) -> None:
    """Two data nodes share the work; what was read once comes from the disk, though both are gone."""
    a, b = await nodes.add("a"), await nodes.add("b")
    assert await nodes.read(*range(SLICES)) == [line(index) for index in range(SLICES)]
    assert sum(a.sent.values()) + sum(b.sent.values()) == SLICES
    assert min(a.sent["reader"], b.sent["reader"]) >= 2  # the further ones come from whichever answers first
    identity = next(iter(nodes.reader._data_sets))
    for name in "ab":
        nodes.kill(name)
    assert (await nodes.reader.get(identity, 3, nodes.said.append)).read_bytes() == line(3)


@plays(live)
async def test_a_damaged_slice_is_refused_and_comes_from_another(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever data node is asked first: what arrives is whole, and soon. The damaged one is told, and goes on
    serving."""
    await nodes.add("a")
    await nodes.add("b")
    nodes.network.peers["reader"].limits = Limits(read_timeout_s=1000.0)
    path = nodes.folder / "a" / "a.txt"
    path.write_text(path.read_text().replace("line 01", "lIne 01"))
    assert await nodes.read(1, 0, 1) == [line(1), line(0), line(1)]
    (nodes.folder / "b" / "a.txt").unlink()
    assert await nodes.read(2, 3) == [line(2), line(3)]
    assert "slice 1 of 'corpus' doesn't come from A: slice 1 doesn't have its hash: a.txt was changed" in caplog.text
    assert "the peer reader refused what it asked for: slice 1 doesn't have its hash" in caplog.text


@plays(live)
async def test_a_slice_that_no_data_node_has_is_waited_for(nodes: Nodes) -> None:
    """The wait says which slice, of what, and why; when a data node comes that has it, the wait ends."""
    await nodes.add("a")
    (nodes.folder / "a" / "a.txt").write_text("gone")
    waits = asyncio.create_task(nodes.read(4))
    await until(lambda: nodes.told("waits for slice 4 of 'corpus': no data node that holds it answers (A: "))
    await nodes.add("b")
    assert await waits == [line(4)]


def test_a_wait_names_who_serves_something_else(tmp_path: Path) -> None:
    """A data node that came back with changed files is another data set, and no help."""
    manifest = served(tmp_path).manifest
    changed = DataNodeRecord(peer_id="a", label="A", data_set="ab" * 32)
    text = fetching._DataSet("corpus", manifest, [changed]).why(3)
    assert text.endswith(
        "no data node serves it now, but A another data set of this name: other files or --slice-bytes"
    )
    assert fetching._DataSet("corpus", manifest, []).why(3).endswith("no data node serves it now")


@plays(live)
async def test_a_data_node_that_dies_is_replaced_at_once(nodes: Nodes) -> None:
    """It dies after it was asked: the slices come from the other one, without a wait for a deadline."""
    a, _ = await nodes.add("a"), await nodes.add("b")
    await nodes.read(0)

    async def never(to: str, index: int) -> None:
        await asyncio.Event().wait()

    a._send_slice = never  # type: ignore[method-assign]
    nodes.network.peers["reader"].limits = Limits(read_timeout_s=1000.0)
    waits = asyncio.create_task(nodes.read(*range(1, SLICES)))
    await until(lambda: len(a._tasks) >= 2)
    nodes.kill("a")
    assert await waits == [line(index) for index in range(1, SLICES)]


@plays(live)
async def test_a_data_node_that_falls_silent_is_given_up(nodes: Nodes) -> None:
    a, _ = await nodes.add("a"), await nodes.add("b")
    await nodes.read(0)
    a._start = lambda to, sending: sending.close()  # type: ignore[method-assign]
    assert await nodes.read(*range(1, SLICES)) == [line(index) for index in range(1, SLICES)]


@plays(live)
async def test_a_slow_data_node_is_waited_for_while_bytes_come(nodes: Nodes) -> None:
    """It takes three times as long as it may be silent; there is no other one."""
    a = await nodes.add("a")
    await nodes.read(0)
    send = a._send_slice

    async def slowly(to: str, index: int) -> None:
        for _ in range(15):
            await asyncio.sleep(0.1)
            nodes.inbox.moving("a")
        await send(to, index)

    a._send_slice = slowly  # type: ignore[method-assign]
    assert await nodes.read(1) == [line(1)]
    assert list(a.sent.values()) == [2]
    assert not nodes.told("no data node")


@plays(live)
async def test_a_data_node_is_ready_when_the_dht_has_its_record(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready once, and no sooner: the DHT doesn't store the first record, and the second attempt fails."""
    answers, ready = iter([False, OSError("lost"), True, False, True]), list[int]()
    asked = 0

    async def publish_oddly(*_: object) -> bool:
        nonlocal asked
        asked += 1
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    node = DataNode(nodes.network.join("a", Inbox()), Inbox(), served(nodes.folder / "a"))
    monkeypatch.setattr(Board, "store", publish_oddly)
    announcing = asyncio.create_task(node.announce("r", "A", lambda: ready.append(asked)))
    await until(lambda: asked >= 5)
    announcing.cancel()
    assert ready == [3]
    assert "a record (data/corpus) can't be stored in the DHT; trying again" in caplog.messages


@plays(live)
async def test_only_a_data_nodes_own_record_counts(nodes: Nodes) -> None:
    """Not this peer's own, nor one that can't be read or names another peer. A name from elsewhere is shown in one
    line. What a data node announces must be what it serves."""
    liar = nodes.network.join("liar", Inbox())
    found = DataNodeRecord(peer_id="liar", label="a\nb", data_set="ab" * 32)
    await board_of("corpus").store(liar, "r", found.pack())
    await liar.store("r/data/corpus", "liar/x", DataNodeRecord(peer_id="a", data_set="cd" * 32).pack(), 30.0)
    await liar.store("r/data/corpus", "liar/y", b"junk", 30.0)
    own = nodes.network.peers["reader"]
    await board_of("corpus").store(own, "r", DataNodeRecord(peer_id="reader", data_set="ef" * 32).pack())
    records = await find_data_nodes(own, "r", "corpus")
    assert [(record.peer_id, record.label) for record in records] == [("liar", "a b")]
    serving = DataNode(liar, inbox := Inbox(), served(nodes.folder / "a"))
    inbox.handler = liar._inbox.handler = serving  # type: ignore[attr-defined]
    waits = asyncio.create_task(nodes.read(0))
    await until(lambda: nodes.told("the manifest isn't the one that the data node's record names"))
    waits.cancel()


@plays(live)
async def test_another_data_set_under_the_same_name_is_refused(nodes: Nodes) -> None:
    """The sentence names both; a record that no data node answers for, or a false one, refuses nobody."""
    a = nodes.network.join("left", Inbox(), limits=Limits(connect_timeout_s=0.1))
    await board_of("corpus").store(a, "r", DataNodeRecord(peer_id="left", data_set="ab" * 32).pack())
    await nodes.add("a")
    await nodes.add("b")
    with pytest.raises(Refused) as raised:
        await nodes.add("c", served(nodes.folder / "c", "Line"))
    assert "--name" not in str(raised.value)
    assert "--as=corpus is another data set on the data node A: 8 slices, 64 bytes" in str(raised.value)
    await nodes.add("d", served(nodes.folder / "d", "Line", name="other"))
    assert await nodes.read(0) == [line(0)]


@plays(live)
async def test_two_data_sets_of_one_name_are_told_apart_by_the_fingerprint(nodes: Nodes) -> None:
    """They can only come from two starts at one moment, or from a liar. A reader that names none is refused."""
    await nodes.add("a")
    other = served(nodes.folder / "b", "Line")
    nodes.network.join("b", inbox := Inbox(), limits=Limits())
    inbox.handler = liar = DataNode(nodes.network.peers["b"], inbox, other)
    nodes.announcing.append(asyncio.create_task(liar.announce("r", "B", lambda: None)))
    await asyncio.sleep(0.05)
    with pytest.raises(Refused, match=r"several data sets: .*\(served by A\).*\(served by B\); stop"):
        await nodes.read(0)
    manifest = await nodes.reader.open("corpus", other.manifest.identity, nodes.said.append)
    path = await nodes.reader.get(manifest.identity, 0, nodes.said.append)
    assert path.read_bytes() == b"Line 00\n"


@plays(partial(live, bytes_max=80))
async def test_what_comes_soon_is_fetched_ahead_in_order(nodes: Nodes) -> None:
    """As much as half of the cache holds. What the trainer waits for overtakes it."""
    a = await nodes.add("a")
    await nodes.read(0)
    asked: list[int] = []
    send = a._send_slice
    a._send_slice = lambda to, index: (asked.append(index), send(to, index))[1]  # type: ignore[method-assign]
    identity = next(iter(nodes.reader._data_sets))
    nodes.network.delay_s = 0.02
    nodes.reader.soon(identity, [7, 0, 6, 5, 4, 3, 2])
    await until(lambda: asked)
    assert (await nodes.reader.get(identity, 1, nodes.said.append)).read_bytes() == line(1)
    await until(lambda: not nodes.reader._data_sets[identity].fetching)
    assert sorted(asked) == [1, 4, 5, 6, 7]  # half of the cache holds 7, 0, 6, 5 and 4
    assert asked.index(1) <= AT_ONCE - 1


@plays(partial(live, bytes_max=15))
async def test_what_can_not_be_a_cache_is_named(nodes: Nodes) -> None:
    await nodes.add("a")
    with pytest.raises(ConfigError, match=r"cache_bytes=15 is too low .* slice has 8 bytes; give 16 or more"):
        await nodes.read(0)
    nodes.reader._bytes_max = 16
    (nodes.folder / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=r"cache_dir=.* can't be used as a cache"):
        await nodes.read(0)


@plays(live)
async def test_a_data_node_answers_only_what_it_can(nodes: Nodes) -> None:
    """Each refusal says why."""
    node = await nodes.add("a")
    identity = next(iter(nodes.nodes.values()))._served.manifest.identity

    async def refused(sender: str, message: wire.AnyMessage) -> str:
        try:
            await nodes.network.peers["a"]._inbox.deliver(sender, packed(message), None)
        except Refusal as refusal:
            return refusal.reason
        return ""

    assert await refused("p", wire.ListSlices("other")) == "this data node serves 'corpus'"
    assert "another data set" in await refused("p", wire.GetSlice("ab" * 32, 0))
    assert "another data set" in await refused("p", wire.GetSlice(identity, SLICES))
    assert "can't be read" in await refused("p", wire.GetSlice(identity, -1))
    assert "did not ask" in await refused("p", wire.SliceBytes(identity, 0, 8))
    assert "takes no part" in await refused("p", wire.Describe())
    assert not await refused("p", wire.GetSlice(identity, 0))
    node._sending["p"] = AT_ONCE + 1
    assert "as many slices as it can" in await refused("p", wire.GetSlice(identity, 0))
    node._sending["q"] = data_node.SENT_AT_ONCE
    assert "as many slices as it can" in await refused("z", wire.GetSlice(identity, 0))


@plays(live)
async def test_a_reader_takes_nothing_that_it_did_not_ask_for(nodes: Nodes) -> None:
    await nodes.add("a")
    await nodes.read(0)
    identity, liar = next(iter(nodes.reader._data_sets)), nodes.network.join("liar", Inbox())
    header = packed(wire.SliceBytes(identity, 1, 8))
    with pytest.raises(Refusal, match="did not ask"):
        await liar.send("reader", header, memoryview(line(1)))
    nodes.network.delay_s = 0.05
    waits = asyncio.create_task(nodes.read(1))
    await until(lambda: any(what == wire.GetSlice(identity, 1) for _, what in nodes.inbox.questions._open))
    with pytest.raises(Refusal, match="did not ask"):
        await liar.send("reader", header, memoryview(b"poison!!"))
    assert await waits == [line(1)]


def test_a_peer_in_a_run_reads_at_its_door(tmp_path: Path) -> None:
    """What a data node sends, and the end of its connection, reach the replica by no event; the peer itself answers no
    question for data."""

    async def life() -> None:
        network = MemoryNetwork()
        peer = MemoryPeer(network, "p", dict(QUICK), cache_dir=tmp_path / "cache")
        await peer.enter()
        inbox = Inbox()
        transport = network.join("a", inbox)
        inbox.handler = node = DataNode(transport, inbox, served(tmp_path / "a"))
        announcing = asyncio.create_task(node.announce("r", "A", lambda: None))
        door = (await peer.ask("door", "door"))["path"]
        slices = await asyncio.to_thread(open_slices, door, "corpus", "", 10.0)
        posted: list[Any] = []
        events = peer.inbox.handler._node.events
        post, events.post = events.post, lambda event: (posted.append(event), post(event))[1]
        network.delay_s = 0.1
        reading = asyncio.create_task(asyncio.to_thread(slices.samples.__getitem__, 2))
        await until(lambda: peer.inbox.questions._open)
        peer.inbox.moving("a")
        peer.inbox.closed("a")
        assert await reading == "line 02"
        for message in (wire.ListSlices("corpus"), wire.GetSlice(slices.fingerprint, 0)):
            with pytest.raises(Refusal, match="this peer is no data node"):
                await transport.send("p", packed(message))
        with pytest.raises(Refusal, match="did not ask"):
            await transport.send("p", packed(wire.SliceBytes(slices.fingerprint, 3, 8)), memoryview(line(3)))
        assert not [event for event in posted if isinstance(event, (Broke, Moving, Received))]
        announcing.cancel()
        await peer.stop()
        assert not Path(door).exists()

    asyncio.run(asyncio.wait_for(life(), 60))
