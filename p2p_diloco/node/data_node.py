"""A data node: serves the slices of one data set to the peers of a run.

Law: it only answers. It takes no part in the run, is in no roster, and knows neither the run's settings nor its model.
In a private run the transport admits only members, and of these `inbox` allows only workers to ask.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from socket import gethostname
from typing import Any

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.data.files import Piece
from p2p_diloco.data.manifest import Manifest
from p2p_diloco.errors import Refused, reason
from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.net.shares import Groups, has_room
from p2p_diloco.node import headers, wire
from p2p_diloco.node.fetching import AT_ONCE, DataNodeRecord, board_of, find_data_nodes, served_by
from p2p_diloco.node.inbox import Handler, Inbox
from p2p_diloco.node.privacy import refuse_if_private, watch_revocations
from p2p_diloco.node.shared import Setup
from p2p_diloco.node.swarm import entered, until_one_ends
from p2p_diloco.node.wire import GetSlice, ListSlices, SliceBytes, SliceList

SENT_AT_ONCE = 16
"""The most answers that are sent at a time; each is in memory meanwhile. In a private run at most a quarter of them go
to one peer, and at most three quarters to the peers of one invitation."""
PUBLISH_EVERY_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What a data node serves: a data set under a name, and where its slices are."""

    name: str
    manifest: Manifest
    pieces: Sequence[Piece]


class DataNode(Handler):
    """Answers requests for one data set."""

    def __init__(self, transport: Transport, inbox: Inbox, served: Served) -> None:
        super().__init__(wire.ANY_RUN)
        self._transport, self._served = transport, served
        self._groups: Groups = lambda peer: inbox.grant_of(peer)
        self._questions = inbox.questions
        self._sending = Counter[str]()
        self._tasks = set[asyncio.Task[None]]()
        self.sent = Counter[str]()
        """How many slices each peer has got."""

    # -- what comes

    def nbytes(self, sender: str, message: wire.AnyMessage) -> int:
        if not isinstance(message, ListSlices | GetSlice):
            raise Refusal("this is a data node, which takes no part in the run")
        return 0

    async def take(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> None:
        name, manifest = self._served.name, self._served.manifest
        match message:
            case ListSlices(asked) if asked != name:
                raise Refusal(f"this data node serves {name!r}")
            case GetSlice(data_set, index) if data_set != manifest.identity or index >= len(manifest.slices):
                raise Refusal(f"this data node serves another data set under the name {name!r}")
            case _ if self._busy(sender):
                raise Refusal("this data node sends as many slices as it can")
            case ListSlices():
                packed = memoryview(manifest.packed)
                self._start(sender, self._send(sender, SliceList(name, packed.nbytes), packed))
            case GetSlice(index=index):
                self._start(sender, self._send_slice(sender, index))

    def _busy(self, sender: str) -> bool:
        theirs = self._sending[sender]
        return theirs >= AT_ONCE or not has_room(sender, self._sending, SENT_AT_ONCE, self._groups)

    # -- what is sent

    def _start(self, to: str, sending: Coroutine[Any, Any, None]) -> None:
        def sent(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._sending[to] -= 1
            self._sending += Counter()  # drops zeros

        self._sending[to] += 1
        task = asyncio.create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(sent)

    async def _send_slice(self, to: str, index: int) -> None:
        piece, content = self._served.pieces[index], b""
        try:
            content = await asyncio.get_running_loop().run_in_executor(None, piece.read)
        except OSError as error:
            log.warning("slice %d can't be read from %s: %s", index, piece.path, reason(error))
        content = content or b"\0"  # the hash is wrong, so the peer asks another data node
        answer = SliceBytes(self._served.manifest.identity, index, len(content))
        await self._send(to, answer, memoryview(content))

    async def _send(self, to: str, answer: SliceList | SliceBytes, payload: memoryview) -> None:
        try:
            await self._transport.send(to, headers.packed(answer), payload)
        except Refusal as refusal:
            log.warning("the peer %s refused what it asked for: %s", to, refusal.reason)
        except Unreachable as error:
            log.debug("the peer %s did not get what it asked for: %s", to, error)
        else:
            self.sent[to] += isinstance(answer, SliceBytes)

    # -- besides

    async def refuse_another(self, run_id: str) -> None:
        """Look for data nodes of this run that serve another data set under the same name.

        Raises:
            Refused: there is one.
        """
        served = self._served
        records = await find_data_nodes(self._transport, run_id, served.name)
        others = [record for record in records if record.data_set != served.manifest.identity]
        found, _ = await served_by(self._transport, self._questions, others, served.name)
        if found:
            record, theirs = next(iter(found.values()))
            wrong = f"is another data set on the data node {record.label}: {_told(theirs)} there, "
            mend = "give the same files and the same --slice-bytes as there, or another --as"
            raise Refused(f"{wrong}{_told(served.manifest)} here", key="--as", value=served.name, mend=mend)

    async def announce(self, run_id: str, label: str, ready: Callable[[], None]) -> None:
        """Until cancelled, keep this data node's record in the DHT. `ready` is called once, when the DHT has it."""
        served = self._served

        def record() -> bytes:
            me, addresses = self._transport.peer_id, tuple(self._transport.addresses())
            return DataNodeRecord(
                peer_id=me, label=label, data_set=served.manifest.identity, addresses=addresses
            ).pack()

        await board_of(served.name).keep(self._transport, run_id, record, PUBLISH_EVERY_S, ready)


def _told(manifest: Manifest) -> str:
    return f"{len(manifest.slices)} slices, {manifest.nbytes} bytes, identity {manifest.identity[:16]}"


async def serve(
    local: PeerConfig, served: Served, tell: Callable[[str], None], ready: Callable[[], None] = lambda: None
) -> None:
    """Serve a data set in a run until cancelled. `tell` is called with a text about each step, `ready` once this
    data node's record is in the DHT.

    Raises:
        P2PDilocoError: this process can't serve in the run, or can't go on.
    """
    async with entered(Setup(RunConfig(), local, None), tell) as swarm:
        swarm.inbox.handler = node = DataNode(swarm.transport, swarm.inbox, served)
        if swarm.access is None and not local.open:
            await refuse_if_private(swarm.transport, local.run_id)
        await node.refuse_another(local.run_id)
        tell(f"serves {served.name!r} in the run {local.run_id}: {_told(served.manifest)}")
        tasks = [node.announce(local.run_id, local.name or gethostname(), ready)]
        if swarm.access is not None:
            tasks.append(watch_revocations(swarm.transport, local.run_id, swarm.access.member))
        await until_one_ends(tasks, swarm.dead)
