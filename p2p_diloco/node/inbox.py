"""Incoming messages, as the transport delivers them: a header is checked before its payload is received; which messages
were refused; and how often others may send messages, and those that cost this peer much: requests for states or for
audits, nudges.

Law: the present `Handler` processes each message that its sender's role allows, but for answers to this peer's own
questions: only the peer that was asked may answer, once. Who refuses a message raises `Refusal` with the reason.
`Inbox` alone catches it: it counts and logs the refusal, and the transport answers the sender with the reason. The
table of refusals is bounded, and each peer in it gets one line in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from p2p_diloco.core import messages as m
from p2p_diloco.core.rules import Rules
from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.net.shares import ASKERS_MAX, Budget
from p2p_diloco.node import wire
from p2p_diloco.node.board import clean
from p2p_diloco.node.headers import NO_RUN, opened, packed, unpack

if TYPE_CHECKING:
    from p2p_diloco.net.hivemind import HivemindTransport  # would load Hivemind, and tests use others

NOT_YET = "this peer is not in a run yet"
"""The reason for which messages are refused until this peer is in its run."""
LEAVING = "this peer is leaving"
NO_FAULT = NOT_YET, LEAVING
"""Refusals for these reasons are not counted: the sender is not to blame."""

T = TypeVar("T")


class Handler:
    """Processes incoming messages at one stage of a peer's way into the run. This base class takes none. `token`: the
    run's; `rules`: of the run, or, as long as this peer is in none, `NO_RUN`."""

    def __init__(self, token: bytes, rules: Rules = NO_RUN) -> None:
        self.token, self.rules = token, rules

    def nbytes(self, sender: str, message: wire.AnyMessage) -> int:
        """The length in bytes of the payload that comes with a message; 0: none does.

        Raises:
            Refusal: the message is refused.
        """
        raise Refusal(NOT_YET)

    async def take(self, sender: str, message: Any, payload: memoryview | None) -> None:
        """Process a message with its payload, which has the right length. Returns when this is done.

        Raises:
            Refusal: the message is refused, or this peer is leaving.
        """

    def hurries(self, sender: str) -> bool:
        """Count a message without a payload; returns whether the sender sends more of them than an honest peer."""
        return False

    def check_sender(self, sender: str) -> None:
        """Raises Refusal if no message of this peer is taken."""

    def closed(self, peer: str) -> None:
        """Called when a link to or from `peer` broke."""

    def moving(self, peer: str) -> None:
        """Called now and then while a payload to or from `peer` makes progress."""


def group_of(peer: str, grant_of: Callable[[str], Hashable | None]) -> Hashable:
    """Return the group by which a peer's requests are limited: all peers of its grant; the peer alone in an open
    run."""
    grant = grant_of(peer)
    return peer if grant is None else grant


class Inbox:
    """The `net.interface.Inbox` of a node. Its `handler` is replaced at each stage of the peer's way into the run."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        """None until this peer looks for its run."""
        self.role_of: Callable[[str], str | None] = lambda peer: None
        """The role that a peer's invitation to a private run allows; empty if the peer is no member; None in an open
        run."""
        self.grant_of: Callable[[str], Hashable | None] = lambda peer: None
        """The grant of a peer's invitation to a private run; the peer itself if it is no member; None in an open
        run."""
        self.refusals = Refusals()
        self.questions = Questions()

    def knows(self, transport: HivemindTransport) -> None:
        """From now on take the roles, grants and names of peers from the transport."""
        self.role_of, self.grant_of, self.refusals.name_of = transport.role_of, transport.grant_of, transport.name_of

    def admit(self, sender: str, header: bytes) -> int:
        with self.refusals.counted(sender, but=NO_FAULT):
            return self._read(sender, header)[2]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> bool:
        is_short = payload is None
        with self.refusals.counted(sender, but=NO_FAULT):
            handler, message, expected = self._read(sender, header)
            found = 0 if payload is None else payload.nbytes
            if found != expected:
                kind = "long message" if message is None else type(message).__name__
                raise Refusal(f"the payload of a {kind} must have {expected} bytes, but {found} came")
            if message is None:
                assert payload is not None, "its length was checked"
                message, payload = unpack(payload, handler.rules), None
                expected = self._expected(handler, sender, message)
                if expected:
                    raise Refusal(f"a {type(message).__name__} must come as a header")
            if isinstance(message, wire.Answer):
                self.questions.take(sender, message, payload)
            else:
                await handler.take(sender, message, payload)
        return is_short and handler.hurries(sender)

    def _read(self, sender: str, header: bytes) -> tuple[Handler, wire.AnyMessage | None, int]:
        """Returns the present handler, the message, and the length of its payload; None if the payload is the
        message."""
        if (handler := self.handler) is None:
            raise Refusal(NOT_YET)
        handler.check_sender(sender)
        message = opened(header, handler.token, handler.rules)
        if not isinstance(message, int):
            return handler, message, self._expected(handler, sender, message)
        if not handler.rules.fragments:
            raise Refusal("this peer takes no part in the run, so no message as long as this")
        return handler, None, message

    def _expected(self, handler: Handler, sender: str, message: wire.AnyMessage) -> int:
        """The length of the payload that must come with a message."""
        check_role(self.role_of(sender), message)
        if isinstance(message, wire.Answer):
            return self.questions.nbytes(message)
        return handler.nbytes(sender, message)

    def closed(self, peer: str) -> None:
        if not self.questions.closed(peer) and self.handler is not None:
            self.handler.closed(peer)

    def moving(self, peer: str) -> None:
        if not self.questions.moving(peer) and self.handler is not None:
            self.handler.moving(peer)


def check_role(role: str | None, message: wire.AnyMessage) -> None:
    """Raises Refusal if a peer of this role may not send the message.

    A worker may send everything. An aggregator may neither contribute, nor nudge, nor say that it is a worker, nor get
    or serve data of data nodes. An observer may only ask for the run's description and states, and say that it leaves.
    `role`: None in an open run, where every peer may send everything; empty for a peer that is no member.
    """
    match role, message:
        case (None | "worker", _) | ("observer", wire.Describe() | m.Ask() | m.Leave()):
            return
        case "aggregator", m.Ready(weight=0.0):
            return
        case "aggregator", m.Probe(summary) | m.ProbeAck(summary) if summary.role != "aggregator":
            raise Refusal("the peer's invitation lets it aggregate, and not train; start it with --role aggregator")
        case "aggregator", _ if isinstance(message, m.Ready | m.Slice | wire.Nudge | wire.DataMessage):
            raise Refusal(f"an aggregator's invitation allows no {type(message).__name__}")
        case "aggregator", _:
            return
        case "observer", _:
            raise Refusal(f"an observer's invitation allows no {type(message).__name__}")
    raise Refusal("not a member of this run")


# -- questions to other peers


@dataclass(slots=True)
class _Question:
    nbytes_max: int
    read: Callable[[memoryview], Any]
    answer: asyncio.Future[Any]
    heard_at: float


class Questions:
    """The questions that this process has put to other peers, and that are not answered yet."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, wire.Question], _Question] = {}

    async def ask(
        self,
        transport: Transport,
        peer: str,
        asked: wire.Question,
        most: int,
        read: Callable[[memoryview], T],
        token: bytes = wire.ANY_RUN,
    ) -> T:
        """Send a peer a question. `most`: the longest answer, in bytes; `token`: the run's. Returns what `read` makes
        of the answer's payload.

        Raises:
            Refusal, Unreachable: no answer comes, or `read` refuses it.
        """
        loop, silence_s = asyncio.get_running_loop(), transport.limits.read_timeout_s
        question = self._open[peer, asked] = _Question(most, read, loop.create_future(), loop.time())
        try:
            await transport.send(peer, packed(asked, token))
            while not question.answer.done():
                if (left_s := question.heard_at + silence_s - loop.time()) <= 0:
                    raise Unreachable(f"no answer within {silence_s:g} s")
                await asyncio.wait({question.answer}, timeout=left_s)
            found: T = question.answer.result()
            return found
        finally:
            del self._open[peer, asked]
            if question.answer.done():
                question.answer.exception()  # marks the exception as seen: `take` raised it, too

    def nbytes(self, message: wire.Answer) -> int:
        """The length of an answer's payload. Raises Refusal if the message answers no open question."""
        longest = (open.nbytes_max for (_, asked), open in self._open.items() if asked == _asked_by(message))
        if not 0 < message.nbytes <= max(longest, default=0):
            raise Refusal("this peer did not ask for it, or it is longer than allowed")
        return message.nbytes

    def take(self, sender: str, message: wire.Answer, payload: memoryview | None) -> None:
        """Take an answer. Raises Refusal if its sender wasn't asked, or the payload isn't what was asked for."""
        question = self._open.get((sender, _asked_by(message)))
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


def _asked_by(answer: wire.Answer) -> wire.Question:
    match answer:
        case wire.SliceList(name):
            return wire.ListSlices(name)
        case wire.SliceBytes(data_set, index):
            return wire.GetSlice(data_set, index)
    return wire.Describe()


# -- refused messages

PEERS_MAX = 256
"""The most peers that are remembered; the one that was refused longest ago is forgotten first."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tally:
    """The refused messages of one peer."""

    count: int
    why: str
    """Why the last one was refused."""


class Refusals:
    """Counts refused messages by their sender: those that the node refuses with a reason, and those that the replica
    ignores."""

    def __init__(self) -> None:
        self.name_of: Callable[[str], str] = lambda peer: ""
        """The name in a peer's invitation to a private run; empty if the peer has none."""
        self._of: dict[str, Tally] = {}

    def count(self, peer: str, why: str) -> None:
        """Count a refused message of a peer. Only the first one of each peer is logged."""
        why, before = clean(why), self._of.pop(peer, None)  # it may quote the peer's message
        if before is None:
            name = self.name_of(peer)
            who = f"{name} ({peer})" if name else peer
            log.warning("refused a message of %s: %s (logged once for each peer; status has the last reason)", who, why)
        self._of[peer] = Tally(1 if before is None else before.count + 1, why)
        if len(self._of) > PEERS_MAX:
            del self._of[next(iter(self._of))]

    @contextmanager
    def counted(self, peer: str, *, but: Container[str] = ()) -> Iterator[None]:
        """If the block refuses a message of a peer, count the refusal, unless its reason is one of `but`."""
        try:
            yield
        except Refusal as refusal:
            if refusal.reason not in but:
                self.count(peer, refusal.reason)
            raise

    def newest(self, most: int) -> list[tuple[str, Tally]]:
        """The `most` peers whose messages were refused last, the newest last."""
        return list(self._of.items())[-most:]


# -- what others may send. All is counted by group: all peers of one grant in a private run, because the holder of an
# invitation can start any number of peers with it; a single peer in an open run, where anyone can make identities. Even
# peers that join again and again need far less than their allowance.

FETCHES_AT_ONCE, FETCHES_PER_S = 16.0, 1.0
"""The states of the whole model that a group may ask for: at once, and each second."""
FETCH_COST_MIN = 1 / 128
"""The cost of a request that leads to no state or to a small part of one, in whole states."""
NUDGED_EXCHANGES_MAX = 2
"""The most exchanges of the whole model that one nudge brings forward. A peer asks for one exchange; the receiver may
be one exchange behind that peer."""
MESSAGES_AT_ONCE, MESSAGES_PER_S = 64.0, 16.0
"""The messages without a payload that an honest peer sends to another one at most: at once, and for each commit or
second. Five a round are usual, up to 14 on a machine that does much else."""


@dataclass(slots=True)
class Allowances:
    """How many messages each group may still send, and how many states and nudges it may ask for. A group that isn't
    remembered has its full allowance."""

    _messages: Budget = field(default_factory=lambda: Budget(MESSAGES_AT_ONCE, MESSAGES_PER_S))
    _states: Budget = field(default_factory=lambda: Budget(FETCHES_AT_ONCE, FETCHES_PER_S))
    _nudged: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  # by group: see `nudge`

    def message(self, group: Hashable, peers: int, commits: int, now: float) -> bool:
        """Count a message without a payload, at the time `now`; returns whether honest peers send as many. `peers`: how
        many of the group take part in rounds. `commits`: the run's commits so far. A commit counts as a second, because
        honest peers send more if rounds are quick."""
        return self._messages.takes(group, 1 / max(peers, 1), now + commits)

    def fetch(self, group: Hashable, part: float, now: float) -> bool:
        """Count a request for a state, at the time `now`; returns whether it is allowed. `part`: the requested fraction
        of the whole model's state."""
        return self._states.takes(group, max(part, FETCH_COST_MIN), now)

    def nudge(self, group: Hashable, goal: int, commits: int, fragments: int) -> bool:
        """Count a nudge by a peer of this group; returns whether it is allowed. `goal`: the number of commits that the
        nudge asks for. `commits`: the run's commits so far. Both are summed over fragments. A goal up to the last
        granted one is always allowed. A higher goal is allowed only once further commits have followed that goal: as
        many as its nudge brought forward. So one group makes at most every other exchange come early."""
        granted, until = self._nudged.get(group, (0, 0))
        if goal <= granted:
            return True
        if commits < until:
            return False
        early = min(max(goal - commits, fragments), NUDGED_EXCHANGES_MAX * fragments)
        self._nudged.pop(group, None)
        self._nudged[group] = commits + early, commits + 2 * early
        if len(self._nudged) > ASKERS_MAX:
            del self._nudged[next(iter(self._nudged))]
        return True
