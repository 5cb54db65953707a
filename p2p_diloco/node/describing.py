"""Describes the run's model to other peers, and asks another peer to describe it: its layout, and the model's card.

Law: only the peer that was asked may send a description; until the description comes, every other message is refused.
A description without a card, or with a card that is too long, still describes the layout.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgpack

from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.node import headers, wire
from p2p_diloco.node.inbox import Handler, Inbox
from p2p_diloco.tensors.card import CARD_BYTES_MAX
from p2p_diloco.tensors.layout import Layout

DESCRIPTION_BYTES_MAX = 16 * 2**20
"""The longest description of a model that is accepted of any run."""
BYTES_OF_ONE = 1024
"""The most bytes of one parameter, buffer or slice in a description."""
DESCRIBE_S = 3.0
"""Deadline for one peer's description of the run's model."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Described:
    """A peer's description of the run's model. `card`: the model's packed card; empty if the peer has none."""

    layout: Layout
    card: bytes = b""

    def pack(self) -> memoryview:
        return memoryview(msgpack.packb({**self.layout.to_wire(), "card": self.card}))

    @classmethod
    def unpack(cls, payload: object) -> Described:
        """Decode a description. Raises ValueError, TypeError or UnpackException if it isn't one."""
        wire = msgpack.unpackb(payload)
        layout = Layout.from_wire(wire)
        card = wire.get("card", b"")
        return cls(layout, card if isinstance(card, bytes) and len(card) <= CARD_BYTES_MAX else b"")


class Describing:
    """This peer's description of the run's model, as it is handed out. A trainer whose model has buffers replaces its
    `card` now and then."""

    def __init__(self, layout: Layout, card: bytes) -> None:
        self._layout, self.card = layout, card
        self._packed: tuple[bytes, memoryview] | None = None  # the last packed card, and the description with it

    def packed(self) -> memoryview:
        """The encoded description with the present card."""
        if self._packed is None or self._packed[0] is not self.card:
            self._packed = self.card, Described(self._layout, self.card).pack()
        return self._packed[1]


class DescriptionInbox(Handler):
    """The inbox's handler while this peer waits for another peer's description of the run's model. It refuses all other
    messages, and descriptions that are too long for a model of `count` parameters, buffers and slices: decoded, a
    hostile one takes a hundred times its bytes."""

    def __init__(self, token: bytes, peer: str, count: int) -> None:
        self._token, self._peer = token, peer
        self._bytes_max = min(DESCRIPTION_BYTES_MAX, CARD_BYTES_MAX + BYTES_OF_ONE * (64 + count))
        self.described: asyncio.Future[Described] = asyncio.get_running_loop().create_future()

    def read(self, sender: str, header: bytes) -> tuple[wire.AnyMessage, int]:
        message = headers.of_nodes(header, self._token)
        if not isinstance(message, wire.Description):
            raise Refusal("this peer still waits for the description of its run's model")
        if not 0 < message.nbytes <= self._bytes_max:
            raise Refusal("the description is empty, or longer than allowed")
        return message, message.nbytes

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        if sender != self._peer or self.described.done():
            raise Refusal("this peer did not ask for a description of a model")
        try:
            self.described.set_result(Described.unpack(payload))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise Refusal(f"the description of the model can't be read: {error}") from None
        return message


async def ask_to_describe(transport: Transport, inbox: Inbox, token: bytes, peer: str, count: int) -> Described | None:
    """Ask a peer to describe the run's model; returns None if no description came in time. `count`: about how many
    parameters, buffers and slices the model has; a description that is much longer is refused."""
    before, waiting = inbox.handler, DescriptionInbox(token, peer, count)
    inbox.handler = waiting
    try:
        await transport.send(peer, headers.packed(wire.Describe(), token))
        return await within(DESCRIBE_S, waiting.described)
    except (Refusal, Unreachable, asyncio.TimeoutError) as error:
        log.debug("%s didn't describe the run's model: %r", peer, error)
        return None
    finally:
        inbox.handler = before
