"""Asks another peer for the layout of the run's model.

Law: only the peer that was asked may send a description; until it comes, every other message is refused.
"""

from __future__ import annotations

import asyncio
import logging

import msgpack

from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.node import wire
from p2p_diloco.node.inbox import Handler, Inbox
from p2p_diloco.tensors.layout import Layout

DESCRIPTION_BYTES_MAX = 16 * 2**20
"""The longest description of a model that is accepted."""
DESCRIBE_S = 3.0
"""Deadline for one peer's description of the run's model."""

log = logging.getLogger(__name__)


class DescriptionInbox(Handler):
    """The inbox's handler while this peer waits for another peer's description of the run's model. It refuses all other
    messages."""

    def __init__(self, token: bytes, peer: str) -> None:
        self._token, self._peer = token, peer
        self.layout: asyncio.Future[Layout] = asyncio.get_running_loop().create_future()

    def read(self, header: bytes) -> tuple[wire.AnyMessage, int]:
        """Implements `inbox.Handler.read`."""
        message = wire.unpack(header, self._token)
        if not isinstance(message, wire.Description):
            raise Refusal("this peer still waits for the description of its run's model")
        if not 0 < message.nbytes <= DESCRIPTION_BYTES_MAX:
            raise Refusal("the description is longer than allowed")
        return message, message.nbytes

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        """Implements `inbox.Handler.check`."""
        if sender != self._peer or self.layout.done():
            raise Refusal("this peer did not ask for a description of a model")
        try:
            self.layout.set_result(Layout.from_wire(msgpack.unpackb(payload)))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise Refusal(f"the description of the model can't be read: {error}") from None
        return message


async def ask_for_layout(transport: Transport, inbox: Inbox, token: bytes, peer: str) -> Layout | None:
    """Ask a peer to describe the run's model; returns the layout, or None if no description came in time."""
    before, waiting = inbox.handler, DescriptionInbox(token, peer)
    inbox.handler = waiting
    try:
        await transport.send(peer, wire.pack(wire.Describe(), token))
        return await within(DESCRIBE_S, waiting.layout)
    except (Refusal, Unreachable, asyncio.TimeoutError) as error:
        log.debug("%s didn't describe the run's model: %r", peer, error)
        return None
    finally:
        inbox.handler = before
