"""Incoming messages, as the transport delivers them: a header is checked before its payload is received.

Law: the present `Handler` processes each message that its sender's role allows. A refusal is answered with its reason
and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from p2p_diloco.core import messages as m
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.events import LEAVING
from p2p_diloco.node.refusals import Refusals
from p2p_diloco.node.wire import Describe, GetSlice, ListSlices, Nudge, SliceBytes, SliceList

if TYPE_CHECKING:
    from p2p_diloco.net.hivemind import HivemindTransport  # would load Hivemind, and tests use others

NOT_YET = "this peer is not in a run yet"
"""The reason for which messages are refused until this peer is in its run."""
NO_FAULT = NOT_YET, LEAVING
"""Refusals for these reasons are not counted: the sender is not to blame."""


class Handler:
    """Processes incoming messages at one stage of a peer's way into the run. This base class serves the first stage: it
    refuses all messages."""

    def read(self, sender: str, header: bytes) -> tuple[wire.AnyMessage, int]:
        """Decode a header; returns the message and the length of its payload in bytes.

        Raises:
            Refusal: the message is refused.
        """
        raise Refusal(NOT_YET)

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        """Check whether the sender may send the message now, and check the message's payload; returns the message with
        the payload in it.

        Raises:
            Refusal: the sender has sent too many such messages, or the payload can't be used.
        """
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        """Process a message that `check` has returned. Returns when this is done.

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
        self.handler = Handler()
        self.role_of: Callable[[str], str | None] = lambda peer: None
        """The role that a peer's invitation to a private run allows; empty if the peer is no member; None in an open
        run."""
        self.grant_of: Callable[[str], Hashable | None] = lambda peer: None
        """The grant of a peer's invitation to a private run; the peer itself if it is no member; None in an open
        run."""
        self.refusals = Refusals()

    def knows(self, transport: HivemindTransport) -> None:
        """From now on take the roles, grants and names of peers from the transport."""
        self.role_of, self.grant_of, self.refusals.name_of = transport.role_of, transport.grant_of, transport.name_of

    def admit(self, sender: str, header: bytes) -> int:
        with self.refusals.counted(sender, but=NO_FAULT):
            return self._read(sender, header)[1]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> bool:
        handler = self.handler
        with self.refusals.counted(sender, but=NO_FAULT):
            message, expected = self._read(sender, header)
            found = 0 if payload is None else payload.nbytes
            if found != expected:
                raise Refusal(f"the payload of a {type(message).__name__} must have {expected} bytes, but {found} came")
            await handler.take(sender, handler.check(sender, message, payload))
        return payload is None and handler.hurries(sender)

    def _read(self, sender: str, header: bytes) -> tuple[wire.AnyMessage, int]:
        message, expected = self.handler.read(sender, header)
        self.handler.check_sender(sender)
        check_role(self.role_of(sender), message)
        return message, expected

    def closed(self, peer: str) -> None:
        self.handler.closed(peer)

    def moving(self, peer: str) -> None:
        self.handler.moving(peer)


def check_role(role: str | None, message: wire.AnyMessage) -> None:
    """Raises Refusal if a peer of this role may not send the message.

    A worker may send everything. An aggregator may neither contribute, nor nudge, nor say that it is a worker, nor get
    or serve data of data nodes. An observer may only ask for the run's description and states, and say that it leaves.
    `role`: None in an open run, where every peer may send everything; empty for a peer that is no member.
    """
    match role, message:
        case (None | "worker", _) | ("observer", Describe() | m.Ask() | m.Leave()):
            return
        case "aggregator", m.Ready(weight=0.0):
            return
        case "aggregator", m.Probe(summary) | m.ProbeAck(summary) if summary.role != "aggregator":
            raise Refusal("the peer's invitation lets it aggregate, and not train; start it with --role aggregator")
        case "aggregator", m.Ready() | m.Slice() | Nudge() | ListSlices() | SliceList() | GetSlice() | SliceBytes():
            raise Refusal(f"an aggregator's invitation allows no {type(message).__name__}")
        case "aggregator", _:
            return
        case "observer", _:
            raise Refusal(f"an observer's invitation allows no {type(message).__name__}")
    raise Refusal("not a member of this run")
