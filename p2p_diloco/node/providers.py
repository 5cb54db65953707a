"""Data nodes as other processes see them: their records in the DHT, and the questions that are put to them.

Law: a record is a hint: nothing in it is believed until its data node answers. Only the peer that was asked may answer,
once, and what it sends must have the hash that was asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from p2p_diloco.data.manifest import MANIFEST_BYTES_MAX, Manifest, Slice
from p2p_diloco.net.interface import CONTENT_BYTES_MAX, Records, Refusal, Transport, Unreachable
from p2p_diloco.node import board, wire
from p2p_diloco.node.board import Board
from p2p_diloco.node.headers import packed
from p2p_diloco.node.status import ADDRESSES_MAX
from p2p_diloco.node.wire import GetSlice, ListSlices, SliceBytes, SliceList

LABEL_LETTERS_MAX = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataNodeRecord:
    """What a data node publishes of itself. `label`: its name. `data_set`: the identity of the data set that it
    serves."""

    peer_id: str
    label: str = ""
    data_set: str = ""
    addresses: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """Encode the record, with as many addresses as fit."""
        addresses = self.addresses[:ADDRESSES_MAX]
        while len(value := board.pack(dataclasses.replace(self, addresses=addresses))) > CONTENT_BYTES_MAX:
            addresses = addresses[:-1]
        return value


def _board(name: str) -> Board:
    """The records of the data nodes that serve a data set of this name."""
    return Board(f"data/{name}", ttl_s=30.0, owned=True)


async def publish(dht: Records, run_id: str, name: str, record: DataNodeRecord) -> bool:
    """Store a data node's record in the DHT; returns False if it wasn't stored. `name`: of the served data set."""
    return await _board(name).store(dht, run_id, record.pack())


async def read_data_nodes(dht: Records, run_id: str, name: str) -> list[DataNodeRecord]:
    """The records of the other data nodes that serve a data set of this name. A record that isn't stored under its data
    node's id, or can't be read, is left out.

    Raises:
        Unreachable: the DHT doesn't answer.
    """
    found = list[DataNodeRecord]()
    for peer, value in (await _board(name).fetch(dht, run_id)).items():
        try:
            record = board.unpack(DataNodeRecord, value)
        except ValueError:
            continue
        if record.peer_id == peer != dht.peer_id and record.data_set:
            found.append(dataclasses.replace(record, label=record.label[:LABEL_LETTERS_MAX] or peer[-8:]))
    return sorted(found, key=lambda record: record.peer_id)


@dataclass(slots=True)
class _Question:
    nbytes_max: int
    read: Callable[[memoryview], Any]
    answer: asyncio.Future[Any]
    heard_at: float


class Questions:
    """The questions that this process has put to data nodes, and that are not answered yet."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._open: dict[tuple[str, Hashable], _Question] = {}

    async def manifest(self, record: DataNodeRecord, name: str) -> Manifest:
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

        found = await self._ask(record.peer_id, ListSlices(name), name, MANIFEST_BYTES_MAX, read)
        assert isinstance(found, Manifest)
        return found

    async def slice(self, peer: str, data_set: str, index: int, one: Slice) -> memoryview:
        """Ask a data node for the slice `one`, which has the number `index` in the data set `data_set`.

        Raises:
            Refusal, Unreachable: it doesn't come, or has another hash.
        """

        def read(payload: memoryview) -> memoryview:
            if not one.is_hash_of(payload):
                raise Refusal(f"slice {index} doesn't have its hash: {one.name} was changed, or is damaged")
            return payload

        found = await self._ask(peer, GetSlice(data_set, index), (data_set, index), one.nbytes, read)
        assert isinstance(found, memoryview)
        return found

    async def _ask(
        self,
        peer: str,
        message: wire.DataMessage,
        what: Hashable,
        nbytes_max: int,
        read: Callable[[memoryview], Any],
    ) -> Any:
        loop, silence_s = asyncio.get_running_loop(), self._transport.limits.read_timeout_s
        question = self._open[peer, what] = _Question(nbytes_max, read, loop.create_future(), loop.time())
        try:
            await self._transport.send(peer, packed(message))
            while not question.answer.done():
                if (left_s := question.heard_at + silence_s - loop.time()) <= 0:
                    raise Unreachable(f"no answer within {silence_s:g} s")
                await asyncio.wait({question.answer}, timeout=left_s)
            return question.answer.result()
        finally:
            del self._open[peer, what]
            if question.answer.done():
                question.answer.exception()  # marks the exception as seen: `check` raised it, too

    # -- what comes

    def nbytes(self, message: SliceList | SliceBytes) -> int:
        """The length of an answer's payload. Raises Refusal if the message answers no open question."""
        asked = (question for (_, what), question in self._open.items() if what == _what(message))
        if not 0 < message.nbytes <= max((question.nbytes_max for question in asked), default=0):
            raise Refusal("this peer did not ask for it")
        return message.nbytes

    def check(self, sender: str, message: SliceList | SliceBytes, payload: memoryview | None) -> None:
        """Take an answer. Raises Refusal if its sender wasn't asked, or the payload isn't what was asked for."""
        question = self._open.get((sender, _what(message)))
        if question is None or question.answer.done() or payload is None:
            raise Refusal("this peer did not ask for it")
        self.moving(sender)
        try:
            question.answer.set_result(question.read(payload))
        except Refusal as refusal:
            question.answer.set_exception(refusal)
            raise

    def moving(self, peer: str) -> bool:
        """A payload to or from this peer makes progress. Returns whether a question to this peer is open."""
        theirs = self._of(peer)
        for question in theirs:
            question.heard_at = asyncio.get_running_loop().time()
        return bool(theirs)

    def closed(self, peer: str) -> bool:
        """A stream to or from this peer broke, so its answers may not come. Returns whether a question to this peer was
        open."""
        theirs = [question for question in self._of(peer) if not question.answer.done()]
        for question in theirs:
            question.answer.set_exception(Unreachable("its connection broke"))
        return bool(theirs)

    def _of(self, peer: str) -> list[_Question]:
        return [question for (asked, _), question in self._open.items() if asked == peer]


def _what(message: SliceList | SliceBytes) -> Hashable:
    return message.name if isinstance(message, SliceList) else (message.data_set, message.index)
