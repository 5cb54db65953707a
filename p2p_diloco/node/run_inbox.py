"""Checks the headers and payloads of messages to a peer that is in the run, and passes the messages on.

Law: every message that reaches the replica is of this run, well-formed, of the right size and finite.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Hashable
from functools import lru_cache, partial

from p2p_diloco.core.events import Granted
from p2p_diloco.core.messages import Commit, Contribution, Fetch, Message, Probe, ProbeAck, State
from p2p_diloco.core.probing import Member
from p2p_diloco.core.revision import FOUNDED
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.allowance import Allowances
from p2p_diloco.node.auditing import EXPELLED, Audits
from p2p_diloco.node.common import Common
from p2p_diloco.node.inbox import Handler, group_of, no_grant
from p2p_diloco.node.ledger import CODEC
from p2p_diloco.node.misfit import misfit
from p2p_diloco.node.node import Node
from p2p_diloco.node.payloads import objection
from p2p_diloco.node.trainer import TrainerSide
from p2p_diloco.node.wire import (
    Accusation,
    Audit,
    Contradicts,
    Copy,
    Describe,
    Description,
    GetSlice,
    ListSlices,
    NodeMessage,
    Nudge,
    SliceBytes,
    SliceList,
)

REMEMBERED_BYTES_MAX = 16 * 2**10
"""The longest header that is cached; a longer one is decoded twice. Headers of strangers must not fill the cache."""
MOVING_EVERY_S = 0.1
"""Seconds in which the replica is told at most once that transfers with a peer move. With many shards there would be
hundreds of such reports a second, which tell the replica nothing more."""

log = logging.getLogger(__name__)


class RunInbox(Handler):
    """The handler of a peer that is in the run. `grant_of`: returns the grant by which a peer was admitted to a private
    run; nudges and requests for states are limited for each grant. It returns None in an open run: there requests are
    limited for each peer, and nudges are not, because anyone could make further identities."""

    def __init__(
        self,
        common: Common,
        node: Node,
        trainer: TrainerSide,
        audits: Audits,
        grant_of: Callable[[str], Hashable | None] = no_grant,
    ) -> None:
        self._node, self._trainer, self._work, self._outbox = node, trainer, common.work, common.outbox
        self._proven = partial(common.founding.proven, common.transport)
        self._judging = partial(common.ledger.part, CODEC)
        self._run = run = common.run
        self._describing, self._events = common.describing, common.events
        self._token, self._shape = run.token, (len(run.layout.shards), len(run.layout.fragments))
        self._replica, self._grant_of, self._allowances = common.replica, grant_of, Allowances()
        self._audits = audits
        self._told, self._told_until = set[str](), 0.0  # peers of whose progress the replica was told lately
        self._questions = common.fetching.questions
        self._unsigned: set[str] = set()  # peers whose unsigned revisions were logged

    def read(self, sender: str, header: bytes) -> tuple[wire.AnyMessage, int]:
        read = _read_once if len(header) <= REMEMBERED_BYTES_MAX else _read
        message = read(header, self._token, self._shape)
        match message:
            case Describe() | Nudge():
                return message, 0
            case Audit() | Copy() | Accusation() | Contradicts():
                return message, self._audits.nbytes(message)
            case Description():
                raise Refusal("this peer did not ask for a description of a model")
            case ListSlices() | GetSlice():
                raise Refusal("this peer is no data node")
            case SliceList() | SliceBytes():
                return message, self._questions.nbytes(message)
        return message, self._work.nbytes(message)

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        match message:
            case Nudge():
                self._check_nudge(sender, message.goal)
            case Fetch():
                self._check_fetch(sender, message)
            case SliceList() | SliceBytes():
                self._questions.check(sender, message, payload)
        if isinstance(message, (Commit, State)) and message.revision.number and not self._proven(message.revision):
            raise Refusal(f"the {type(message).__name__} is refused: the run's founder has not signed its revision")
        if isinstance(message, (Contribution, Commit, State)) and payload is not None:
            with self._judging():
                why = objection(self._run, message, payload)
            if why:
                raise Refusal(f"the {type(message).__name__} is refused: {why}")
            message = dataclasses.replace(message, payload=payload)
        if isinstance(message, Copy | Accusation | Contradicts):
            return dataclasses.replace(message, payload=payload)
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        match message:
            case Describe():
                description = self._describing.packed()
                header = wire.pack(wire.Description(description.nbytes), self._token)
                self._outbox.put(sender, header, description, urgent=True)  # the asker waits only briefly
            case Nudge(goal):
                self._trainer.nudged(goal)
            case Audit():
                self._audits.asked(sender, message)
            case Accusation():
                self._audits.accused(sender, message)
            case Copy():
                self._audits.take(message)
            case Contradicts():
                self._audits.shown(message)
            case SliceList() | SliceBytes():
                pass  # `check` has handed it on
            case Description() | ListSlices() | GetSlice():
                raise AssertionError(f"`read` should have refused this {type(message).__name__}")
            case _:
                self._tell_grant(sender)
                await self._node.receive(sender, self._believed(sender, message))

    def _tell_grant(self, sender: str) -> None:
        """Tell the replica by which grant the sender is in the run, unless it knows that. The grant is the one in the
        certificate that the sender has shown, so no peer can name another one's."""
        if (grant := self._grant_of(sender)) is None:
            return
        named = grant.hex() if isinstance(grant, bytes) else str(grant)
        if self._replica.roster.members.get(sender, Member()).grant != named:
            self._events.post(Granted(sender, named))

    def _check_nudge(self, sender: str, goal: int) -> None:
        """Raises Refusal if the peers with the sender's invitation nudge too often; in an open run they may."""
        commits, fragments = sum(self._replica.roster.mine.epochs), self._shape[1]
        group = self._grant_of(sender)
        if group is not None and not self._allowances.nudge(group, goal, commits, fragments):
            raise Refusal("the last nudge with the sender's invitation came less than a round ago")

    def _check_fetch(self, sender: str, request: Fetch) -> None:
        """Raises Refusal if the peers with the sender's invitation have asked for too many states lately."""
        asked = range(self._shape[0]) if request.shards is None else set(request.shards)
        mine = self._replica.versions
        part = sum(request.whole or request.have[shard] != mine[shard] for shard in asked) / self._shape[0]
        if not self._allowances.fetch(group_of(sender, self._grant_of), part, asyncio.get_running_loop().time()):
            raise Refusal("the sender, or others with its invitation, asked for too many states lately")

    def objection(self, sender: str) -> str:
        lie = self._audits.expelled.get(sender)
        return "" if lie is None else f"{EXPELLED}: {lie}"

    def closed(self, peer: str) -> None:
        if not self._questions.closed(peer):
            self._node.closed(peer)

    def moving(self, peer: str) -> None:
        if self._questions.moving(peer):
            return
        if (now := asyncio.get_running_loop().time()) >= self._told_until:
            self._told, self._told_until = set(), now + MOVING_EVERY_S
        if peer not in self._told:
            self._told.add(peer)
            self._node.moving(peer)

    def _believed(self, sender: str, message: Message) -> Message:
        """If a probe has a revision that the founder has not signed, remove the revision and keep the probe's other
        fields. Commits and states with such a revision are refused as a whole, in `check`."""
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
    if isinstance(message, NodeMessage):
        return message
    if reason := misfit(message, *shape):
        raise Refusal(f"the {type(message).__name__} is refused: {reason}")
    return message


_read_once = lru_cache(maxsize=64)(_read)
"""Cached, because a header is decoded when it comes and again with its payload; few are under way at a time."""
