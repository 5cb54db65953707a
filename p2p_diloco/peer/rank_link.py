"""The connection between rank 0 of a peer and one of its other ranks.

Law: messages and errors, in both directions. The end of the connection ends this peer.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from p2p_diloco import errors
from p2p_diloco.errors import P2PDilocoError, RankDied
from p2p_diloco.node.channel import ChannelClosed, Message, TrainerEnd

LEAVING = "close(), or the end of the with block,"
"""The name of the call by which a rank leaves the run."""


class RankLink:
    """One end of the connection. `who` is the name of the rank at the other end."""

    def __init__(self, who: str, sock: socket.socket) -> None:
        self._who, self._connection = who, TrainerEnd(sock)

    def send(self, kind: str, **values: object) -> None:
        """Send a message to the other rank.

        Raises:
            RankDied: the other rank has ended.
        """
        try:
            self._connection.send({"kind": kind, **values})
        except ChannelClosed:
            raise self.died() from None

    def receive(self, timeout_s: float) -> Message | None:
        """Wait for the other rank's next message. None if no message comes in time.

        Raises:
            RankDied: the other rank has ended.
            P2PDilocoError: the error with which the other rank failed.
        """
        try:
            message = self._connection.receive(timeout_s)
        except ChannelClosed:
            raise self.died() from None
        if message is not None and message["kind"] == "error":
            raise errors.from_wire(message["error"])
        return message

    def fail(self, error: P2PDilocoError) -> None:
        """Send the error with which this rank failed, if the other rank still listens."""
        with suppress(ChannelClosed):
            self._connection.send({"kind": "error", "error": error.to_wire()}, timeout_s=1.0)

    def died(self) -> RankDied:
        """The error to raise because the other rank has ended."""
        return RankDied(f"{self._who} has ended", mend="see its log, and start the group again")

    def close(self) -> None:
        """Close the connection. The other rank notices it at its next call."""
        self._connection.close()
