"""Sends messages to other peers over streams, and receives theirs.

Law: joins `sending` and `receiving`; decides nothing.
"""

from __future__ import annotations

from p2p_diloco.net.interface import Inbox, Limits, Traffic, Written, unnoticed
from p2p_diloco.net.links import Dial
from p2p_diloco.net.receiving import Receiver
from p2p_diloco.net.sending import Sender
from p2p_diloco.net.streams import Streams


class Exchange:
    """This peer's sender and receiver, and the state that their streams share. `dial` opens a stream to a peer, as
    described in `Sender`."""

    def __init__(self, inbox: Inbox, *, limits: Limits, traffic: Traffic, dial: Dial) -> None:
        self.streams = Streams(inbox, limits, traffic)
        self.sender = Sender(self.streams, dial)
        self.receiver = Receiver(self.streams)

    async def send(self, peer: str, header: bytes, payload: memoryview | None, written: Written = unnoticed) -> None:
        await self.sender.send(peer, header, payload, written)

    async def close(self) -> None:
        """End every stream and direct connection. A `send` that still waits for an answer raises `Unreachable`."""
        self.streams.closing = True
        self.sender.end()
        await self.streams.close()
        if self.sender.direct is not None:
            await self.sender.direct.close()
