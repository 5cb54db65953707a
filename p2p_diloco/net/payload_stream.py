"""Payloads on one stream, one after the other, and their answers in the same order.

Law: knows a single stream; the caller chooses the next payload. It may be written as soon as the one before is: so the
link stays busy while the answer is on its way, and TCP keeps what it has learned of it. A stream that falls silent ends
for every send that waits on it. A retired stream ends after the last answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

from p2p_diloco.net.frame_stream import FrameStream
from p2p_diloco.net.framing import Accepted, Bulk, FrameError, Progress, Refused
from p2p_diloco.net.interface import Limits, Unreachable
from p2p_diloco.net.pipe import PipeStalled

Verdict = Accepted | Refused | None
"""A receiver's answer to a payload; None: the stream ended before it came."""


class PayloadStream:
    """The sender's end. One payload at a time is being written. `way`: "direct", "libp2p" or "relayed"."""

    def __init__(self, frames: FrameStream, way: str) -> None:
        self.frames, self.way = frames, way
        self._reading = asyncio.Lock()  # held in the order of writing
        self._may_take_s = deque[float]()  # of each unanswered payload, cancelled ones included
        self._answered = self._waiting = 0
        self._retired = False
        self._gave_up = ""

    @property
    def fit(self) -> bool:
        """Whether one more payload may be written. Bytes that came unasked would be taken for its answer."""
        if self._retired or self.ended:
            return False
        return bool(self._may_take_s) or self.frames.pipe.quiet

    @property
    def fresh(self) -> bool:
        """Whether no payload was written yet. The first one may be, though the stream may have ended: it finds out."""
        return not (self._retired or self._answered or self._may_take_s)

    @property
    def ended(self) -> bool:
        """Whether the stream is over."""
        return self.frames.pipe.ended is not None

    def retire(self) -> None:
        """Write no more payloads; end once no send waits for an answer."""
        self._retired = True
        if not self._waiting:
            self.frames.pipe.abort()

    async def send(
        self,
        header: bytes,
        payload: memoryview,
        *,
        limits: Limits,
        over: Callable[[asyncio.Future[None]], None],
        reached: Callable[[int], None],
    ) -> Verdict:
        """Write a message with its payload, and wait for its answer. `over` is called with the finished writing as soon
        as the next payload may be written; `reached`, now and then, with the number of bytes that have arrived.

        Cancelling it leaves the answers to other payloads alone.

        Raises:
            Unreachable: a deadline passed, or the bytes that came are no answer.
        """
        peer, place = self.frames.peer, self._answered + len(self._may_take_s)
        self._may_take_s.append(limits.transfer_timeout_s(len(payload)))
        self._waiting += 1
        self.frames.write(Bulk(header, len(payload)))
        written = self.frames.pipe.write_view(payload)
        written.add_done_callback(over)
        try:
            async with self._reading:
                if self._gave_up:
                    raise PipeStalled(self._gave_up)
                return await self._verdict(place, len(payload), limits.read_timeout_s, reached)
        except (FrameError, PipeStalled) as error:
            self._gave_up = str(error)
            self.frames.pipe.abort()
            raise Unreachable(f"{peer}: {error}") from None
        finally:
            self._waiting -= 1
            if written.cancel():  # the payload is half written, and its memory may change from now on
                self._retired = True
                self.frames.pipe.forget_unsent()
            if self._retired:
                self.retire()

    async def _verdict(
        self, place: int, payload_bytes: int, read_timeout_s: float, reached: Callable[[int], None]
    ) -> Verdict:
        """The answer to the payload that was written as the `place`th. The receiver must show progress until then.

        Cancelled payloads before it have to arrive first, and may take as long as each of them may.
        """
        received_bytes, clock = -1, asyncio.get_running_loop().time
        total_s = sum(islice(self._may_take_s, place - self._answered + 1))
        give_up_at = clock() + total_s
        while (left_s := give_up_at - clock()) > 0:
            read_s = min(read_timeout_s, left_s)
            match await self.frames.read(idle_s=read_s, frame_s=read_s):
                case Accepted() | Refused() as verdict:
                    self._answered += 1
                    self._may_take_s.popleft()
                    if self._answered > place:  # else it answers a cancelled payload
                        if isinstance(verdict, Accepted):
                            reached(payload_bytes)
                        return verdict
                case None:
                    return None
                case Progress() if self._answered < place:
                    pass
                case Progress(count) if received_bytes < count <= payload_bytes:
                    received_bytes = count
                    reached(count)
                case frame:
                    raise FrameError(f"a {type(frame).__name__} frame was not asked for")
        raise PipeStalled(f"the payload took longer than {total_s:g} s")
