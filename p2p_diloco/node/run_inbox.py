"""Incoming messages of a peer that is in the run: decoded, checked, and fed to the node, or handled here if they are
those of nodes (`wire`): descriptions, nudges, audits, data.

Law: every message that reaches the replica is of this run, well-formed, signed by those that it names, and of finite
values. Of what nodes handle themselves the replica learns only a transfer's signs of life and its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from p2p_diloco.core import messages as m
from p2p_diloco.core.events import Granted
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.roster import Peer
from p2p_diloco.core.state import State
from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.auditing import EXPELLED, Audits
from p2p_diloco.node.common import Common
from p2p_diloco.node.headers import packed, refusing
from p2p_diloco.node.inbox import Allowances, Handler, group_of
from p2p_diloco.node.node import Node
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.node.slice_work import check_values
from p2p_diloco.node.trainer import TrainerSide
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

LAST_ROUNDS, LAST_SUBMISSIONS = 8, 256
"""A peer takes part if one of so many last commits has counted it. In asynchronous mode a commit counts one
submission, or few."""
MOVING_EVERY_S = 0.1
"""Seconds in which the replica is told at most once that transfers with a peer move. With many slices there would be
hundreds of such reports a second, which tell the replica nothing more."""


def _named(group: Hashable) -> str:
    """A group as contributions name it: a grant, or in an open run a peer."""
    return group.hex() if isinstance(group, bytes) else str(group)


class RunInbox(Handler):
    """The handler of a peer that is in the run."""

    def __init__(self, common: Common, node: Node, trainer: TrainerSide, audits: Audits) -> None:
        super().__init__(common.run.token, common.run.rules)
        self._common, self._run, self._members, self._node = common, common.run, common.inbox, node
        self._trainer, self._audits = trainer, audits
        self._allowances = Allowances()
        # the newest version, and how many of each grant take part
        self._counts: tuple[Version | None, Counter[str]] = None, Counter()
        self._told, self._told_until = set[str](), 0.0  # peers of whose progress the replica was told lately

    def nbytes(self, sender: str, message: wire.AnyMessage) -> int:
        match message:
            case wire.Describe() | wire.Nudge():
                return 0
            case wire.Audit() | wire.Copy() | wire.Accusation() | wire.Contradicts():
                return self._audits.nbytes(message)
            case _ if isinstance(message, wire.NodeMessage):
                raise Refusal("this peer is no data node")
        return self._node.work.nbytes(message)

    async def take(self, sender: str, message: Any, payload: memoryview | None) -> None:
        if isinstance(message, wire.NodeMessage):
            self._take(sender, message, payload)
            return
        if isinstance(message, m.Ask):
            replica = self._node.replica
            waits = self._trainer.ready_at is None and not replica.finished
            if waits and message.fragment is None and not replica.roster.holds_state(sender):
                return  # others may come back with more: a newcomer would train on what this peer has, and they lose it
            part = len(message.numbers) / self._run.rules.slices
            group = group_of(sender, self._members.grant_of)
            if not self._allowances.fetch(group, part, asyncio.get_running_loop().time()):
                raise Refusal("the sender, or others with its invitation, asked for too many states lately")
        checked = self._checked(sender, message, payload)
        self._tell_grant(sender)
        await self._node.receive(sender, checked)

    def _tell_grant(self, sender: str) -> None:
        """Tell the replica by which grant the sender is in the run, unless it knows that. The grant is the one in the
        certificate that the sender has shown, so no peer can name another one's."""
        if (grant := self._members.grant_of(sender)) is None:
            return
        named = _named(grant)
        if self._node.replica.roster.peers.get(sender, Peer()).grant != named:
            self._node.events.post(Granted(sender, named))

    def hurries(self, sender: str) -> bool:
        replica, group = self._node.replica, group_of(sender, self._members.grant_of)
        if (state := replica.logs[0].state) is not None and state.version != self._counts[0]:
            last = LAST_SUBMISSIONS if self._run.rules.asynchronous else LAST_ROUNDS
            here = (member.grant for member in state.roll.values() if state.version.epoch - member.epoch < last)
            self._counts = state.version, Counter(here)
        peers, commits = self._counts[1][_named(group)], sum(replica.roster.mine.epochs)
        if not commits:  # nobody can have been counted, however many wait for the first round
            return False
        return not self._allowances.message(group, peers, commits, asyncio.get_running_loop().time())

    def check_sender(self, sender: str) -> None:
        if (lie := self._audits.verdicts.expelled.get(sender)) is not None:
            raise Refusal(f"{EXPELLED}: {lie}")

    def closed(self, peer: str) -> None:
        self._node.closed(peer)

    def moving(self, peer: str) -> None:
        if (now := asyncio.get_running_loop().time()) >= self._told_until:
            self._told, self._told_until = set(), now + MOVING_EVERY_S
        if peer not in self._told:
            self._told.add(peer)
            self._node.moving(peer)

    # -- the messages of nodes

    def _check_nudge(self, sender: str, goal: int) -> None:
        """Raises Refusal if the peers with the sender's invitation nudge too often. In an open run they may: anyone
        could make further identities there."""
        commits, group = sum(self._node.replica.roster.mine.epochs), self._members.grant_of(sender)
        if group is not None and not self._allowances.nudge(group, goal, commits, len(self._run.layout.fragments)):
            raise Refusal("the last nudge with the sender's invitation came less than a round ago")

    def _take(self, sender: str, message: wire.NodeMessage, payload: memoryview | None) -> None:
        """Process a message of nodes."""
        match message:
            case wire.Describe():
                description = self._common.described.packed
                header = packed(wire.Description(description.nbytes), self._run.token)
                self._common.outbox.put(sender, header, description)
            case wire.Nudge(goal):
                self._check_nudge(sender, goal)
                self._trainer.nudged(goal)
            case wire.Audit():
                self._audits.asked(sender, message)
            case wire.Accusation():
                self._audits.accused(sender, replace(message, payload=payload))
            case wire.Copy():
                self._audits.take(replace(message, payload=payload))
            case wire.Contradicts():
                self._audits.shown(replace(message, payload=payload))

    # -- the messages of the run

    def _checked(self, sender: str, message: m.Message, payload: memoryview | None) -> m.Message:
        """Check a message that is complete; returns it with its payload and the hash of that.

        Raises:
            Refusal: the message is refused.
        """
        if isinstance(message, m.Slice | m.Mean | m.Part):
            assert payload is not None
            message = replace(message, payload=payload)
            if isinstance(message, m.Slice | m.Mean):
                message = replace(message, hash=hash_of(payload))
        with refusing(type(message)):
            self._common.signatures.check(sender, message)
            if not all(map(self._may_hold, _revisions(message))):
                raise Refusal("the run's founder has not signed its revision")
            self._check_values(message)
            self._check_grants(sender, message)
        if isinstance(message, m.Probe | m.ProbeAck) and not self._may_hold(revision := message.summary.revision):
            what = f"its revision {revision} is ignored: it is not signed by the run's founder"
            self._common.refusals.count(sender, what)
            return replace(message, summary=replace(message.summary, revision=FOUNDED))  # all else is believed
        return message

    def _may_hold(self, revision: Revision) -> bool:
        return revision.sound and self._common.founding.proven(self._common.transport, revision)

    def _check_values(self, message: m.Message) -> None:
        """Raises Refusal if the values in a message's payload can't be used."""
        if not isinstance(message, m.Slice | m.Mean | m.Part):
            return
        place = self._run.layout.slices_of(message.fragment)[message.number]
        codec, reply = self._run.codecs(place.index)
        match message:
            case m.Slice(payload=payload):
                check_values(payload, codec, place.numel, MAGNITUDE_MAX)
            case m.Mean(payload=payload):
                check_values(payload, reply, place.numel)
            case m.Part(payload=payload):
                check_values(payload, "fp32", payload.nbytes // 4)

    def _check_grants(self, sender: str, message: m.Message) -> None:
        """Raises Refusal if a contribution in a message is not by the grant that it names. That of a member which this
        peer has never met can't be judged."""
        named: list[tuple[str, m.Ready]] = []
        match message:
            case m.Ready():
                named = [(sender, message)]
            case m.Close(choice=m.Choice(entries=entries)) | m.Vote(served=m.Close(choice=m.Choice(entries=entries))):
                named = list(entries)
        for peer, ready in named:
            grant = self._members.grant_of(peer)
            if grant != peer and ready.grant != (grant.hex() if isinstance(grant, bytes) else ""):
                raise Refusal(f"{peer} is not here by the grant that its contribution names")


def _revisions(message: m.Message) -> list[Revision]:
    """Return the revisions that a message would bring into force."""
    match message:
        case m.Close(choice=m.Choice(revision=revision)) | m.Commit(choice=m.Choice(revision=revision)):
            return [revision]
        case m.Vote(served=served, commit=commit):
            return [one for part in (served, commit) if part is not None for one in _revisions(part)]
        case m.Head(state=State(revision=revision)):
            return [revision]
    return []
