"""The link: the outgoing, ordered stream to one peer that carries small messages.

Law: knows one stream. `links` opens it and keeps it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

from p2p_diloco.net.attempts import within
from p2p_diloco.net.frame_stream import FrameStream
from p2p_diloco.net.framing import Accepted, FrameError, Message, Refused
from p2p_diloco.net.interface import Limits, Refusal, Unreachable
from p2p_diloco.net.pipe import PipeBroken, PipeStalled


class Link:
    """Sends small messages on one stream. The receiver answers them in the same order."""

    def __init__(self, frames: FrameStream, limits: Limits) -> None:
        self._frames = frames
        self._limits = limits
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.relayed = False
        """Whether the stream goes through a relay."""
        self.heard_at = -math.inf
        """When the last answer came, by the loop's clock."""

    async def send(self, header: bytes) -> None:
        """Send a message and wait for its answer. The link ends if no answer comes in time.

        Raises:
            Refusal: the receiver refused the message, with its reason.
            Unreachable: the link broke, or no answer came in time.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # its send may be cancelled
        self._waiting.append(answer)
        self._frames.write(Message(header))
        try:
            await self._frames.pipe.drain(self._limits.write_timeout_s)
            await within(self._limits.read_timeout_s, answer)
        except (PipeBroken, PipeStalled) as error:
            self.fail(str(error))
            raise Unreachable(f"{self._frames.peer}: {error}") from None
        except asyncio.TimeoutError:
            why = f"no answer within {self._limits.read_timeout_s:g} s"
            self.fail(why)
            raise Unreachable(f"{self._frames.peer}: {why}") from None

    async def read_answers(self) -> str:
        """Read answers until the link ends, and pass each to the `send` that waits for it; returns the reason why the
        link ended."""
        frame_s = self._limits.read_timeout_s
        try:
            while (frame := await self._frames.read(idle_s=None, frame_s=frame_s)) is not None:
                if not isinstance(frame, (Accepted, Refused)) or not self._waiting:
                    raise FrameError(f"a {type(frame).__name__} frame was not asked for")
                self.heard_at = asyncio.get_running_loop().time()
                answer = self._waiting.popleft()
                if answer.done():  # its send was cancelled
                    continue
                if isinstance(frame, Refused):
                    answer.set_exception(Refusal(frame.reason))
                else:
                    answer.set_result(None)
        except (FrameError, PipeStalled) as error:
            return str(error)
        return self._frames.pipe.ended or "the link was closed"

    def fail(self, why: str) -> None:
        """End the link: every send that waits on it raises `Unreachable`."""
        self._frames.pipe.abort()
        while self._waiting:
            if not (answer := self._waiting.popleft()).done():
                answer.set_exception(Unreachable(f"{self._frames.peer}: {why}"))
