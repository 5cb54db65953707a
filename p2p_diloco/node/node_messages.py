"""The messages that nodes handle themselves, and do not pass to their replicas: descriptions, nudges, audits, data.

Law: no event reaches the replica from here but a transfer's signs of life and its end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.allowance import Allowances
from p2p_diloco.node.auditing import EXPELLED, Audits
from p2p_diloco.node.common import Common
from p2p_diloco.node.headers import packed
from p2p_diloco.node.inbox import Handler
from p2p_diloco.node.node import Node
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
    Nudge,
    SliceBytes,
    SliceList,
)

MOVING_EVERY_S = 0.1
"""Seconds in which the replica is told at most once that transfers with a peer move. With many slices there would be
hundreds of such reports a second, which tell the replica nothing more."""

log = logging.getLogger(__name__)


class NodeMessages(Handler):
    """The handler of a peer that is in the run."""

    def __init__(self, common: Common, node: Node, trainer: TrainerSide, audits: Audits) -> None:
        self._node, self._trainer, self._outbox = node, trainer, common.outbox
        self._run = run = common.run
        self._describing, self._events = common.describing, common.events
        self._token, self._fragments = run.token, len(run.layout.fragments)
        self._replica, self._inbox, self._allowances = common.replica, common.inbox, Allowances()
        self._audits = audits
        self._told, self._told_until = set[str](), 0.0  # peers of whose progress the replica was told lately
        self._questions = common.fetching.questions

    def nbytes(self, message: wire.NodeMessage) -> int:
        """The length of a message's payload in bytes. Raises Refusal if the message is refused."""
        match message:
            case Describe() | Nudge():
                return 0
            case Audit() | Copy() | Accusation() | Contradicts():
                return self._audits.nbytes(message)
            case Description():
                raise Refusal("this peer did not ask for a description of a model")
            case ListSlices() | GetSlice():
                raise Refusal("this peer is no data node")
            case SliceList() | SliceBytes():
                return self._questions.nbytes(message)

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        match message:
            case Nudge():
                self._check_nudge(sender, message.goal)
            case SliceList() | SliceBytes():
                self._questions.check(sender, message, payload)
        if isinstance(message, Copy | Accusation | Contradicts):
            return dataclasses.replace(message, payload=payload)
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        match message:
            case Describe():
                description = self._describing.packed()
                header = packed(wire.Description(description.nbytes), self._token)
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

    def _check_nudge(self, sender: str, goal: int) -> None:
        """Raises Refusal if the peers with the sender's invitation nudge too often. In an open run they may: anyone
        could make further identities there."""
        commits, fragments = sum(self._replica.roster.mine.epochs), self._fragments
        group = self._inbox.grant_of(sender)
        if group is not None and not self._allowances.nudge(group, goal, commits, fragments):
            raise Refusal("the last nudge with the sender's invitation came less than a round ago")

    def check_sender(self, sender: str) -> None:
        if (lie := self._audits.expelled.get(sender)) is not None:
            raise Refusal(f"{EXPELLED}: {lie}")

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
