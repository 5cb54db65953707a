"""Messages on their way in, as the transport delivers them: a header is judged before its payload is let through.

Law: what is done with a message is the present `Handler`'s. A refusal is answered with its reason, counted by the
transport, and logged once for each peer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire

log = logging.getLogger(__name__)


class Handler:
    """What is done with messages at one stage of a peer's way into the run. This one is the first: all are refused."""

    def read(self, header: bytes) -> tuple[wire.AnyMessage, int]:
        """The message, and how many bytes of payload belong to it.

        Raises:
            Refusal: the message isn't taken.
        """
        raise Refusal("this peer is not in a run yet")

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        """The message with its payload.

        Raises:
            Refusal: the payload can't be used.
        """
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        """Returns once the message is handled. May raise Refusal."""

    def closed(self, peer: str) -> None:
        """A link broke."""

    def moving(self, peer: str) -> None:
        """A transfer with a peer goes on."""


class Inbox:
    """What the transport calls, as `net.interface.Inbox`. `handler` is replaced as the peer comes into the run."""

    def __init__(self) -> None:
        self.handler = Handler()
        self._complained: set[str] = set()

    def admit(self, sender: str, header: bytes) -> int:
        """As `net.interface.Inbox.admit`."""
        with self._complaining(sender):
            return self.handler.read(header)[1]

    async def deliver(self, sender: str, header: bytes, payload: memoryview | None) -> None:
        """As `net.interface.Inbox.deliver`."""
        handler = self.handler
        with self._complaining(sender):
            message, expected = handler.read(header)
            found = 0 if payload is None else payload.nbytes
            if found != expected:
                raise Refusal(f"a {type(message).__name__} carries {expected} bytes, {found} came")
            message = handler.check(sender, message, payload)
        await handler.take(sender, message)

    def closed(self, peer: str) -> None:
        """As `net.interface.Inbox.closed`."""
        self.handler.closed(peer)

    def moving(self, peer: str) -> None:
        """As `net.interface.Inbox.moving`."""
        self.handler.moving(peer)

    @contextmanager
    def _complaining(self, sender: str) -> Iterator[None]:
        """Log the first refusal of each peer."""
        try:
            yield
        except Refusal as refusal:
            if sender not in self._complained:
                self._complained.add(sender)
                log.warning("refused a message of %s: %s (said once for each peer)", sender, refusal.reason)
            raise
