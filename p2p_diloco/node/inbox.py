"""Incoming messages, as the transport delivers them: a header is checked before its payload is received.

Law: the present `Handler` processes each message that its sender's role allows. A refusal is answered with its reason,
counted by the transport, and logged once for each peer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.roles import forbidden

log = logging.getLogger(__name__)


class Handler:
    """Processes incoming messages at one stage of a peer's way into the run. This base class serves the first stage: it
    refuses all messages."""

    def read(self, header: bytes) -> tuple[wire.AnyMessage, int]:
        """Decode a header; returns the message and the length of its payload in bytes.

        Raises:
            Refusal: the message is refused.
        """
        raise Refusal("this peer is not in a run yet")

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        """Check a message's payload; returns the message with the payload in it.

        Raises:
            Refusal: the payload can't be used.
        """
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        """Process a message that `check` has returned. Returns when this is done; may raise Refusal."""

    def closed(self, peer: str) -> None:
        """Called when a link to or from `peer` broke."""

    def moving(self, peer: str) -> None:
        """Called now and then while a payload to or from `peer` makes progress."""


class Inbox:
    """The `net.interface.Inbox` of a node. Its `handler` is replaced at each stage of the peer's way into the run."""

    def __init__(self) -> None:
        self.handler = Handler()
        self.role_of: Callable[[str], str | None] = lambda peer: None
        """The role that a peer's invitation to a private run allows; None in an open run."""
        self._complained: set[str] = set()

    def admit(self, sender: str, header: bytes) -> int:
        """Implements `net.interface.Inbox.admit`."""
        with self._complaining(sender):
            return self._read(sender, header)[1]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        """Implements `net.interface.Inbox.deliver`."""
        handler = self.handler
        with self._complaining(sender):
            message, expected = self._read(sender, header)
            found = 0 if payload is None else payload.nbytes
            if found != expected:
                raise Refusal(f"the payload of a {type(message).__name__} must have {expected} bytes, but {found} came")
            message = handler.check(sender, message, payload)
        await handler.take(sender, message)

    def _read(self, sender: str, header: bytes) -> tuple[wire.AnyMessage, int]:
        message, expected = self.handler.read(header)
        if reason := forbidden(self.role_of(sender), message):
            raise Refusal(reason)
        return message, expected

    def closed(self, peer: str) -> None:
        """Implements `net.interface.Inbox.closed`."""
        self.handler.closed(peer)

    def moving(self, peer: str) -> None:
        """Implements `net.interface.Inbox.moving`."""
        self.handler.moving(peer)

    @contextmanager
    def _complaining(self, sender: str) -> Iterator[None]:
        """If the block refuses a message, log the refusal. For each sender only the first refusal is logged."""
        try:
            yield
        except Refusal as refusal:
            if sender not in self._complained:
                self._complained.add(sender)
                log.warning("refused a message of %s: %s (logged once for each peer)", sender, refusal.reason)
            raise
