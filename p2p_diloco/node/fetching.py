"""Data nodes as other processes see them: their records in the DHT, and how slices of data sets are fetched from them,
as this peer's trainer wants them.

Law: a record is a hint: nothing in it is believed until its data node answers. What it sends must have the hash that
was asked for. Each slice is under way once at most, from one data node, and is checked before it is kept. A slice that
the trainer waits for has a place at each data node that slices fetched ahead don't take. A data node that refuses a
slice, or doesn't answer, is asked again after a pause that doubles each time; meanwhile others are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from p2p_diloco.data.manifest import MANIFEST_BYTES_MAX, Cache, Manifest
from p2p_diloco.errors import ConfigError, Refused, reason
from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import CONTENT_BYTES_MAX, Refusal, Transport, Unreachable
from p2p_diloco.node import board
from p2p_diloco.node.board import Board
from p2p_diloco.node.inbox import Questions
from p2p_diloco.node.status import ADDRESSES_MAX
from p2p_diloco.node.wire import GetSlice, ListSlices
from p2p_diloco.remembered import cache_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataNodeRecord:
    """What a data node publishes of itself. `label`: its name. `data_set`: the identity of the data set that it
    serves."""

    peer_id: str
    label: str = ""
    data_set: str
    addresses: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """Encode the record, with as many addresses as fit."""
        addresses = self.addresses[:ADDRESSES_MAX]
        while len(value := board.pack(dataclasses.replace(self, addresses=addresses))) > CONTENT_BYTES_MAX:
            addresses = addresses[:-1]
        return value


def board_of(name: str) -> Board:
    """The records of the data nodes that serve a data set of this name."""
    return Board(f"data/{name}", ttl_s=30.0, owned=True)


async def find_data_nodes(transport: Transport, run_id: str, name: str) -> list[DataNodeRecord]:
    """The records of the other data nodes that serve a data set of this name, which can be asked from now on. A record
    that isn't stored under its data node's id, or can't be read, is left out; all are if the DHT doesn't answer."""
    found = list[DataNodeRecord]()
    try:
        records = await board_of(name).fetch(transport, run_id)
    except Unreachable as error:
        log.debug("the DHT gave no answer about data nodes: %s", error)
        return found
    for peer, value in sorted(records.items()):
        with contextlib.suppress(ValueError):
            record = board.unpack(DataNodeRecord, value)
            if record.peer_id == peer != transport.peer_id:
                await transport.introduce(peer, record.addresses)
                found.append(record)
    return found


async def manifest_of(transport: Transport, questions: Questions, record: DataNodeRecord, name: str) -> Manifest:
    """Ask a data node for the manifest of its data set.

    Raises:
        Refusal, Unreachable: it doesn't come, or isn't the one that the data node's record names.
    """

    def read(payload: memoryview) -> Manifest:
        try:
            manifest = Manifest.unpack(payload)
        except ValueError as error:
            raise Refusal(str(error)) from None
        if manifest.identity != record.data_set:
            raise Refusal("the manifest isn't the one that the data node's record names")
        return manifest

    return await questions.ask(transport, record.peer_id, ListSlices(name), MANIFEST_BYTES_MAX, read)


Told = dict[str, tuple[DataNodeRecord, Manifest]]
"""By the identity of a data set, a data node that serves it, and its manifest."""


async def served_by(
    transport: Transport, questions: Questions, records: Iterable[DataNodeRecord], name: str
) -> tuple[Told, str]:
    """Ask the data nodes of these records, until one has answered for each data set. Returns also why one of them did
    not answer; empty if all did."""
    found, why = Told(), ""
    for record in records:
        if record.data_set not in found:
            try:
                found[record.data_set] = record, await manifest_of(transport, questions, record, name)
            except (Refusal, Unreachable) as error:  # its record may be left over, or a false one
                why = f"{record.label}: {error}"
    return found, why


AT_ONCE = 4
"""The most slices under way from one data node. The last place is kept for a slice that the trainer waits for."""
AHEAD = 8
"""The most slices that are fetched ahead at a time."""
LOOK_EVERY_S, LOOK_SOON_S = 10.0, 1.0
"""Seconds between two searches for data nodes; LOOK_SOON_S while no data node can be asked for a slice that the trainer
waits for."""
TELL_EVERY_S = 1.0
AGAIN_S, AGAIN_S_MAX = 0.5, 30.0
"""Seconds until a data node that did not answer, or refused a slice, is asked again: AGAIN_S after the first failure,
then twice as long each time, at most AGAIN_S_MAX."""

T = TypeVar("T")
Tell = Callable[[str], None]


@dataclass(slots=True)
class _DataNode:
    record: DataNodeRecord
    under_way: int = 0
    pause_s: float = 0.0
    """For how long it is not asked since it did not give a slice; 0: it gave the last one."""
    paused_until: float = 0.0
    why: str = ""
    """Why the data node did not give the last slice for which it was asked; empty if it gave the slice."""


class _DataSet:
    """A data set that the trainer reads, and the data nodes that serve it."""

    def __init__(self, name: str, manifest: Manifest, records: Iterable[DataNodeRecord]) -> None:
        self.name, self.manifest = name, manifest
        self.nodes: dict[str, _DataNode] = {}
        self.others: Sequence[str] = ()
        """The names of data nodes that serve another data set under this name."""
        self.fetching: dict[int, asyncio.Task[Path]] = {}
        self.awaited: set[int] = set()  # slices that the trainer waits for
        self.soon: deque[int] = deque()
        self.news = asyncio.Event()
        self.meet(records)

    def meet(self, records: Iterable[DataNodeRecord]) -> None:
        """From now on use the data nodes of these records, if they serve this data set, and no others."""
        found = list(records)
        ours = [record for record in found if record.data_set == self.manifest.identity]
        self.others = sorted({record.label for record in found if record not in ours})
        self.nodes = {record.peer_id: self.nodes.get(record.peer_id, _DataNode(record)) for record in ours}
        self.news.set()

    def choose(self, index: int, now: float) -> _DataNode | None:
        """The data node to ask for a slice: of those that may be asked now, the one with the fewest slices under way.
        None: none may be asked now."""
        places = AT_ONCE if index in self.awaited else AT_ONCE - 1
        able = [node for node in self.nodes.values() if node.under_way < places and node.paused_until <= now]
        return min(able, key=lambda node: node.under_way, default=None)

    def why(self, index: int) -> str:
        """Why a slice is not here yet, as a sentence."""
        nodes, begin = self.nodes.values(), f"waits for slice {index} of {self.name!r}: "
        if not nodes:
            other = f", but {', '.join(self.others)} another data set of this name: other files or --slice-bytes"
            return begin + "no data node serves it now" + (other if self.others else "")
        if all(node.why for node in nodes):
            said = "; ".join(f"{node.record.label}: {node.why}" for node in nodes)
            return begin + f"no data node that holds it answers ({said})"
        return begin + f"it is on its way, with {len(self.fetching) - 1} others"


class Fetching:
    """Fetches slices for one peer. Keeps at most `bytes_max` bytes of them in `folder` (None: this user's cache)."""

    def __init__(
        self, transport: Transport, questions: Questions, run_id: str, folder: Path | None, bytes_max: int
    ) -> None:
        self._transport, self._questions, self._run_id = transport, questions, run_id
        self._folder, self._bytes_max = folder, bytes_max
        self._cache: Cache | None = None
        self._data_sets: dict[str, _DataSet] = {}
        self._disk = ThreadPoolExecutor(1)
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Fetch nothing more."""
        fetching = [task for data_set in self._data_sets.values() for task in data_set.fetching.values()]
        for task in (*self._tasks, *fetching):
            task.cancel()
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def open(self, name: str, identity: str, tell: Tell) -> Manifest:
        """Find the data set with this name and, unless `identity` is empty, this identity. Waits until a data node that
        serves it answers. `tell` is called with the reason for the wait.

        Raises:
            Refused: data nodes serve several data sets under this name. ConfigError: the cache can't be used.
        """
        while True:
            records = await find_data_nodes(self._transport, self._run_id, name)
            fitting = [record for record in records if identity in ("", record.data_set)]
            found, why = await served_by(self._transport, self._questions, fitting, name)
            if len(found) > 1:
                listed = ", ".join(f"{one} (served by {record.label})" for one, (record, _) in found.items())
                mend = "stop the data nodes of one of them, or give fingerprint= with the one to use"
                raise Refused(f"is the name of several data sets: {listed}", key="slices", value=name, mend=mend)
            if found:
                manifest = next(iter(found.values()))[1]
                await self._begin(name, manifest, records)
                return manifest
            tell(f"waits for the data set {name!r}: no data node that serves it answers ({why or 'none serves it'})")
            await asyncio.sleep(LOOK_SOON_S)

    async def get(self, identity: str, index: int, tell: Tell) -> Path:
        """The file with a slice of an opened data set. Waits until the slice is there. `tell` is called with the reason
        for the wait.

        Raises:
            ConfigError: the cache can't be written.
        """
        data_set = self._data_sets[identity]
        data_set.awaited.add(index)
        try:
            task = self._fetch(data_set, index)
            while not (await asyncio.wait({task}, timeout=TELL_EVERY_S))[0]:
                tell(data_set.why(index))
            return task.result()
        finally:
            data_set.awaited.discard(index)

    def soon(self, identity: str, indices: Sequence[int]) -> None:
        """Fetch these slices ahead, in this order, as many as fit into half of the cache. Replaces an earlier list."""
        data_set, left = self._data_sets[identity], self._bytes_max // 2
        data_set.soon.clear()
        for index in indices:
            left -= data_set.manifest.slices[index].nbytes
            if left < 0:
                break
            data_set.soon.append(index)
        self._fetch_ahead(data_set)

    # -- one slice

    def _fetch(self, data_set: _DataSet, index: int) -> asyncio.Task[Path]:
        if (task := data_set.fetching.get(index)) is not None:
            data_set.news.set()  # the trainer may wait for it now, so it may take the last place
            return task

        def fetched(task: asyncio.Task[Path]) -> None:
            del data_set.fetching[index]
            if task.cancelled():
                return
            if (error := task.exception()) is not None:
                log.debug("slice %d of %r was not kept: %r", index, data_set.name, error)  # `get` raises it
            else:
                self._fetch_ahead(data_set)

        task = data_set.fetching[index] = asyncio.create_task(self._bring(data_set, index))
        task.add_done_callback(fetched)
        return task

    def _fetch_ahead(self, data_set: _DataSet) -> None:
        while data_set.soon and len(data_set.fetching) < AHEAD:
            self._fetch(data_set, data_set.soon.popleft())

    async def _bring(self, data_set: _DataSet, index: int) -> Path:
        one, clock, cache = data_set.manifest.slices[index], asyncio.get_running_loop().time, self._cache
        assert cache is not None, "a data set is open"
        if (path := await self._on_disk(lambda: cache.find(one))) is not None:
            return path
        while True:
            if (node := data_set.choose(index, clock())) is None:
                data_set.news.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(AGAIN_S, data_set.news.wait())
            elif (content := await self._from(data_set, node, index)) is not None:
                return await self._on_disk(lambda: cache.put(one, content))

    async def _from(self, data_set: _DataSet, node: _DataNode, index: int) -> memoryview | None:
        """Ask a data node for a slice; None if it doesn't come."""
        clock, peer, identity = asyncio.get_running_loop().time, node.record.peer_id, data_set.manifest.identity
        one, question = data_set.manifest.slices[index], GetSlice(identity, index)

        def read(payload: memoryview) -> memoryview:
            if not one.is_hash_of(payload):
                raise Refusal(f"slice {index} doesn't have its hash: {one.name} was changed, or is damaged")
            return payload

        node.under_way += 1
        try:
            content = await self._questions.ask(self._transport, peer, question, one.nbytes, read)
        except (Refusal, Unreachable) as error:
            if not node.why:
                log.warning("slice %d of %r doesn't come from %s: %s", index, data_set.name, node.record.label, error)
            node.why = str(error)
            node.pause_s = min(max(AGAIN_S, 2 * node.pause_s), AGAIN_S_MAX)
            node.paused_until = clock() + node.pause_s
            return None
        finally:
            node.under_way -= 1
            data_set.news.set()
        node.pause_s, node.why = 0.0, ""
        return content

    # -- data sets and their data nodes

    async def _begin(self, name: str, manifest: Manifest, records: Iterable[DataNodeRecord]) -> None:
        longest = max(one.nbytes for one in manifest.slices)
        if 2 * longest > self._bytes_max:
            wrong = f"is too low for the data set {name!r}, whose longest slice has {longest} bytes"
            raise ConfigError(wrong, key="cache_bytes", value=self._bytes_max, mend=f"give {2 * longest} or more")
        if self._cache is None:
            folder = self._folder or cache_folder() / "slices"
            self._cache = await self._on_disk(lambda: Cache(folder, self._bytes_max))
        if manifest.identity not in self._data_sets:
            data_set = self._data_sets[manifest.identity] = _DataSet(name, manifest, records)
            self._tasks.add(asyncio.create_task(self._look_often(data_set)))

    async def _look_often(self, data_set: _DataSet) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            stuck = any(data_set.choose(index, clock()) is None for index in data_set.awaited)
            await asyncio.sleep(LOOK_SOON_S if stuck else LOOK_EVERY_S)
            if records := await find_data_nodes(self._transport, self._run_id, data_set.name):
                data_set.meet(records)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._disk, work)
        except OSError as error:
            wrong = f"can't be used as a cache ({reason(error)})"
            mend = "mend it, or name another folder"
            raise ConfigError(wrong, key="cache_dir", value=self._folder or "unset", mend=mend) from None
