"""Checks the headers and payloads of messages to a peer that is in the run, and passes the messages on.

Law: every message that reaches the replica is of this run, well-formed, of the right size and finite.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from functools import lru_cache, partial

import msgpack

from p2p_diloco.core.messages import Commit, Contribution, Fetch, Message, Probe, ProbeAck, State
from p2p_diloco.core.revision import FOUNDED
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.allowance import Allowances
from p2p_diloco.node.common import Common
from p2p_diloco.node.inbox import Handler
from p2p_diloco.node.ledger import CODEC
from p2p_diloco.node.misfit import misfit
from p2p_diloco.node.node import Node
from p2p_diloco.node.trainer import TrainerSide
from p2p_diloco.node.wire import Describe, Description, Nudge

REMEMBERED_BYTES_MAX = 16 * 2**10
"""The longest header that is cached; a longer one is decoded twice. Headers of strangers must not fill the cache."""

log = logging.getLogger(__name__)


class RunInbox(Handler):
    """The handler of a peer that is in the run. `private`: whether the run is, so that nudges are limited: in an open
    run anyone could make further identities."""

    def __init__(self, common: Common, node: Node, trainer: TrainerSide, *, private: bool = False) -> None:
        self._node, self._trainer, self._work, self._outbox = node, trainer, common.work, common.outbox
        self._proven = partial(common.founding.proven, common.transport)
        self._judging = partial(common.ledger.part, CODEC)
        run = common.run
        self._layout = memoryview(msgpack.packb(run.layout.to_wire()))
        self._token, self._shape = run.token, (len(run.layout.shards), len(run.layout.fragments))
        self._replica, self._private, self._allowances = common.replica, private, Allowances()
        self._unsigned: set[str] = set()  # peers whose unsigned revisions were logged

    def read(self, header: bytes) -> tuple[wire.AnyMessage, int]:
        """Implements `Handler.read`."""
        read = _read_once if len(header) <= REMEMBERED_BYTES_MAX else _read
        message = read(header, self._token, self._shape)
        match message:
            case Describe() | Nudge():
                return message, 0
            case Description():
                raise Refusal("this peer did not ask for a description of a model")
        return message, self._work.nbytes(message)

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        """Implements `Handler.check`."""
        if isinstance(message, (Contribution, Commit, State)) and payload is not None:
            with self._judging():
                objection = self._work.objection(message, payload)
            if objection:
                raise Refusal(f"the {type(message).__name__} is refused: {objection}")
            return dataclasses.replace(message, payload=payload)
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        """Implements `Handler.take`."""
        match message:
            case Describe():
                header = wire.pack(wire.Description(self._layout.nbytes), self._token)
                self._outbox.put(sender, header, self._layout, urgent=True)  # the asker waits only briefly
            case Nudge(goal):
                self._check_nudge(sender)
                self._trainer.nudged(goal)
            case Fetch():
                self._check_fetch(sender, message)
                await self._node.receive(sender, message)
            case Description():
                raise AssertionError("a Description is refused earlier, in `read`")
            case _:
                await self._node.receive(sender, self._believed(sender, message))

    def _check_nudge(self, sender: str) -> None:
        """Raises Refusal if this peer has nudged too often."""
        commits, fragments = sum(self._replica.roster.mine.epochs), self._shape[1]
        if self._private and not self._allowances.nudge(sender, commits, fragments):
            raise Refusal("the last nudge of this peer was less than a round ago")

    def _check_fetch(self, sender: str, request: Fetch) -> None:
        """Raises Refusal if this peer has asked for too many states."""
        asked = range(self._shape[0]) if request.shards is None else set(request.shards)
        mine = self._replica.versions
        part = sum(request.whole or request.have[shard] != mine[shard] for shard in asked) / self._shape[0]
        if not self._allowances.fetch(sender, part, asyncio.get_running_loop().time()):
            raise Refusal("this peer has asked for too many states lately")

    def closed(self, peer: str) -> None:
        """Implements `Handler.closed`."""
        self._node.closed(peer)

    def moving(self, peer: str) -> None:
        """Implements `Handler.moving`."""
        self._node.moving(peer)

    def _believed(self, sender: str, message: Message) -> Message:
        """If a probe has a revision that the founder has not signed, remove the revision and keep the probe's other
        fields. Commits and states need no such check, because their digests cover their revisions."""
        match message:
            case Probe(summary) | ProbeAck(summary) if summary.revision.number:
                if self._proven(summary.revision):
                    return message
                if sender not in self._unsigned:
                    self._unsigned.add(sender)
                    log.warning(
                        "ignored the revision %s of the peer %s: not signed by the run's founder",
                        summary.revision,
                        sender,
                    )
                return dataclasses.replace(message, summary=dataclasses.replace(summary, revision=FOUNDED))
        return message


def _read(header: bytes, token: bytes, shape: tuple[int, int]) -> wire.AnyMessage:
    """Decode a header, and check it against the run. `shape`: how many shards and how many fragments the run has.

    Raises:
        Refusal: the header is no message of this run.
    """
    message = wire.unpack(header, token)
    if isinstance(message, (Describe, Description, Nudge)):
        return message
    if reason := misfit(message, *shape):
        raise Refusal(f"the {type(message).__name__} is refused: {reason}")
    return message


_read_once = lru_cache(maxsize=64)(_read)
"""Cached, because a header is decoded when it comes and again with its payload; few are under way at a time."""
