"""Incoming messages of a peer that is in the run: decoded, checked, and fed to the node.

Law: every message that reaches the replica is of this run, well-formed, signed by those that it names, and of finite
values. One that names peers by their places in a roll that this peer doesn't have yet is kept until it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from p2p_diloco.core import messages as m
from p2p_diloco.core.events import Granted, Received
from p2p_diloco.core.leases import WEIGHT_MIN, fault
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.roster import Peer
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, key_of
from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.allowance import Allowances
from p2p_diloco.node.encoding import check_values
from p2p_diloco.node.forms import NOWHERE, About
from p2p_diloco.node.headers import Folded, opened, unpack
from p2p_diloco.node.inbox import Handler, Inbox, check_role, group_of
from p2p_diloco.node.node import Node
from p2p_diloco.node.node_messages import NodeMessages
from p2p_diloco.node.refusals import Refusals, refusing
from p2p_diloco.node.run import Run
from p2p_diloco.node.signatures import Signatures, hash_of
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

LAST_ROUNDS, LAST_SUBMISSIONS = 8, 256
"""A peer takes part if one of so many last commits has counted it. In asynchronous mode a commit counts one
submission, or few."""

log = logging.getLogger(__name__)

Key = tuple[str, type, int, int]


def _named(group: Hashable) -> str:
    """A group as contributions name it: a grant, or in an open run a peer."""
    return group.hex() if isinstance(group, bytes) else str(group)


@dataclass(frozen=True, slots=True)
class Long:
    """A message that comes as its payload."""


class RunInbox(Handler):
    """The handler of a peer that is in the run."""

    def __init__(
        self,
        run: Run,
        node: Node,
        signatures: Signatures,
        refusals: Refusals,
        proven: Callable[[Revision], bool],
        beside: NodeMessages,
        members: Inbox,
    ) -> None:
        """`proven`: whether the run's founder has signed a revision. `beside` processes the messages that nodes handle
        themselves. `members` knows the roles and grants of the members of a private run."""
        self._run, self._node, self._signatures, self._refusals = run, node, signatures, refusals
        self._proven, self._beside, self._members = proven, beside, members
        self._allowances = Allowances()
        self._unsigned = set[str]()  # peers whose unsigned revisions were logged
        self._counts = NOWHERE, Counter[str]()  # the newest version, and how many of each grant take part
        self._folded: dict[Key, tuple[str, Folded]] = {}  # by sender, kind, fragment and epoch
        node.settled.append(self.unfold)

    def read(self, sender: str, header: bytes) -> tuple[Any, int]:
        body = opened(header, self._run.token)
        if isinstance(body, int):
            return Long(), body
        message = self._placed(unpack(body, self._about(sender), self._node.rolls))
        if isinstance(message, wire.NodeMessage):
            return message, self._beside.nbytes(message)
        return message, 0 if isinstance(message, Folded) else self._node.work.nbytes(message)

    def check(self, sender: str, message: Any, payload: memoryview | None) -> Any:
        if isinstance(message, wire.NodeMessage):
            return self._beside.check(sender, message, payload)
        if isinstance(message, Long):
            assert payload is not None, "the length of its payload was checked"
            message, payload = self._placed(unpack(payload, self._about(sender), self._node.rolls)), None
            if isinstance(message, wire.NodeMessage):
                raise Refusal(f"a {type(message).__name__} must come as a header")
            if not isinstance(message, Folded):
                check_role(self._members.role_of(sender), message)
        if isinstance(message, m.Ask):
            part = len(message.numbers) / self._run.rules.slices
            group = group_of(sender, self._members.grant_of)
            if not self._allowances.fetch(group, part, asyncio.get_running_loop().time()):
                raise Refusal("the sender, or others with its invitation, asked for too many states lately")
        return message if isinstance(message, Folded) else self._checked(sender, message, payload)

    async def take(self, sender: str, message: Any) -> None:
        if isinstance(message, wire.NodeMessage):
            await self._beside.take(sender, message)
        elif isinstance(message, Folded):
            self._keep(sender, message)
        else:
            self._tell_grant(sender)
            await self._node.receive(sender, message)

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
        self._beside.check_sender(sender)

    def closed(self, peer: str) -> None:
        self._beside.closed(peer)  # it may be a data node, else it goes on to the node

    def moving(self, peer: str) -> None:
        self._beside.moving(peer)

    # -- what is read

    def _about(self, sender: str) -> About:
        return About(sender, self._run.rules)

    def _placed(self, message: wire.AnyMessage | Folded) -> wire.AnyMessage | Folded:
        """Check that a message which was just read can belong to the run; returns it.

        Raises:
            Refusal: it can't.
        """
        if not isinstance(message, Folded | wire.NodeMessage):
            with refusing(type(message)):
                check_place(message, self._run.rules)
        return message

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
            self._signatures.check(sender, message)
            if not all(map(self._may_hold, _revisions(message))):
                raise Refusal("the run's founder has not signed its revision")
            self._check_values(message)
            self._check_grants(sender, message)
        if isinstance(message, m.Probe | m.ProbeAck) and not self._may_hold(revision := message.summary.revision):
            if sender not in self._unsigned:
                self._unsigned.add(sender)
                what = "ignored the revision %s of the peer %s: not signed by the run's founder"
                log.warning(what, revision, sender)
            return replace(message, summary=replace(message.summary, revision=FOUNDED))  # all else is believed
        return message

    def _may_hold(self, revision: Revision) -> bool:
        return revision.sound and self._proven(revision)

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

    # -- what can't be read yet

    def _keep(self, sender: str, folded: Folded) -> None:
        """Keep a message until its roll is here. Each sender has equal room, and its oldest goes first."""
        self._folded[sender, type(folded.body), folded.fragment, folded.base.epoch] = sender, folded
        mine = [key for key in self._folded if key[0] == sender]
        if len(mine) > 4 * self._run.rules.commits_kept:
            del self._folded[min(mine, key=lambda key: key[3])]

    def unfold(self) -> None:
        """Feed what can be read now; drop what is older than the present state."""
        for key, (sender, folded) in list(self._folded.items()):
            present = self._node.replica.logs[folded.fragment].epoch
            known = self._node.rolls.of(folded.fragment, folded.base) is not None
            if not known and folded.base.epoch >= present:
                continue
            del self._folded[key]
            if not known:
                continue
            with contextlib.suppress(Refusal), self._refusals.counted(sender):
                message = self._placed(folded.read(self._about(sender), self._node.rolls))
                assert not isinstance(message, Folded | wire.NodeMessage)
                self._node.events.post(Received(sender, self._checked(sender, message, None)))


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


# -- what can't belong to the run


def check_place(message: m.Message, rules: Rules) -> None:
    """Raises Refusal if a message can't belong to the run. Each number by itself was checked when the message was
    decoded; the core judges commits by the state before them."""
    fragments, fragment = len(rules.fragments), getattr(message, "fragment", None)
    if fragment is not None and not 0 <= fragment < fragments:
        raise Refusal(f"the run has no fragment {fragment}")
    slices = 0 if fragment is None else len(rules.fragments[fragment])
    match message:
        case m.Probe(summary) | m.ProbeAck(summary):
            _check_summary(summary, fragments)
        case m.Ready():
            _check_ready(message, slices)
        case m.Slice(number=number) | m.Mean(number=number) | m.Part(number=number):
            _check_numbers([number], slices)
        case m.Want(numbers=numbers) | m.Ask(fragment=int(), numbers=numbers):
            _check_numbers(numbers, slices)
        case m.Ask(numbers=numbers) if numbers:
            raise Refusal("it asks for slices of no fragment")
        case m.Lack(missing=missing):
            _check_numbers([number for number, _ in missing], slices)
        case m.Close():
            _check_close(message, slices)
        case m.Vote(served=served, commit=commit):
            for part in (served, commit):
                if part is not None and (part.fragment, part.base) != (fragment, message.base):
                    raise Refusal("it tells of another round than its own")
            if served is not None:
                if served.choice is None:
                    raise Refusal("it tells of a Close without a choice")
                _check_close(served, slices)
        case m.Told(versions=versions, links=links):
            if len(versions) != fragments or len(links) != fragments:
                raise Refusal(f"it lists {len(versions)} fragments, the run has {fragments}")
            for version, line in zip(versions, links, strict=True):
                _check_links(version, line)
        case m.Head(state=state, digests=digests):
            if len(digests) not in (0, slices):
                raise Refusal(f"it lists {len(digests)} slices, the fragment has {slices}")
            _check_state(state, slices)


def _check_numbers(numbers: Sequence[int], slices: int) -> None:
    for number in numbers:
        if not 0 <= number < slices:
            raise Refusal(f"the fragment has no slice {number}")


def _check_summary(summary: m.Summary, fragments: int) -> None:
    for listed in (summary.heads, summary.sent, summary.digests):
        if len(listed) not in (0, fragments):
            raise Refusal(f"it lists {len(listed)} fragments, the run has {fragments}")
    if any(fragment >= fragments for fragment, _ in summary.awaits):
        raise Refusal("it awaits peers for a fragment that the run doesn't have")
    if summary.role not in ("worker", "aggregator"):
        raise Refusal(f"the role {summary.role!r} is unknown")


def _check_ready(ready: m.Ready, slices: int) -> None:
    if len(ready.hashes) != (slices if ready.weight else 0):
        raise Refusal(f"it has the hashes of {len(ready.hashes)} slices, the fragment has {slices}")
    if 0 < ready.weight < WEIGHT_MIN:
        raise Refusal("its weight is out of range")


def _check_close(close: m.Close, slices: int) -> None:
    if len(close.owners) != slices:
        raise Refusal(f"it lists the owners of {len(close.owners)} slices, the fragment has {slices}")
    if close.choice is None:
        return
    names = [peer for peer, _ in close.choice.entries]
    if names != sorted(set(names)):
        raise Refusal("its contributions are not sorted, or one peer has two")
    for _, ready in close.choice.entries:
        _check_ready(ready, slices)
    if key_of(close.fragment, close.base, close.choice) != close.key:
        raise Refusal("its key is not that of its choice")


def _check_links(version: Version, links: m.Links) -> None:
    epochs = [epoch for epoch, _ in links]
    if not links or epochs != sorted(set(epochs)) or links[-1] != (version.epoch, version.digest):
        raise Refusal("its links don't lead to its version")


def _check_state(state: State, slices: int) -> None:
    if len(state.hashes) not in (0, slices):
        raise Refusal(f"its last commit has {len(state.hashes)} means, the fragment has {slices} slices")
    if not 0 <= state.paced[0] <= state.version.epoch:
        raise Refusal("its count of inner steps has values that can't be used")
    _check_links(state.version, state.links)
    if why := fault(state.tables):
        raise Refusal(why)
