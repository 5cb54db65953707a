"""The sender's end of a payload stream. Payloads leave one after the other, and their answers come back in the same
order.

Law: knows one stream; the caller chooses the next payload. The next payload may be written before the last one is
answered: so the link stays busy, and TCP keeps its estimate of the link's rate. If a stream stalls, every send that
waits on it fails. A retired stream ends after the last answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

from p2p_diloco.net.framing import Accepted, Bulk, FrameError, FrameStream, Progress, Refused
from p2p_diloco.net.interface import Limits, Unreachable
from p2p_diloco.net.pipe import PipeStalled

Verdict = Accepted | Refused | None
"""A receiver's answer to a payload; None: the stream ended before the answer came."""


class PayloadStream:
    """Sends payloads on one stream, writing one at a time. `way`: the stream's path ("direct", "libp2p" or
    "relayed")."""

    def __init__(self, frames: FrameStream, way: str) -> None:
        self.frames, self.way = frames, way
        self._reading = asyncio.Lock()  # sends take it in the order of their writing
        self._may_take_s = deque[float]()  # the longest time of each unanswered payload, cancelled ones included
        self._answered = self._waiting = self.carried_bytes = 0
        self.lent = False
        """Whether a payload is being written. This and `carried_bytes` are kept for direct connections alone, by `Way`.
        """
        self._retired = False
        self._gave_up = ""

    @property
    def fit(self) -> bool:
        """Whether another payload may be written on this stream. False if bytes came while no answer was awaited: they
        would be taken for the next payload's answer."""
        if self._retired or self.ended:
            return False
        return bool(self._may_take_s) or self.frames.pipe.quiet

    @property
    def fresh(self) -> bool:
        """Whether no payload has been written on this stream yet. A fresh stream may be used without checking `fit`: if
        it has ended, the send fails."""
        return not (self._retired or self._answered or self._may_take_s)

    @property
    def ended(self) -> bool:
        return self.frames.pipe.ended is not None

    def retire(self) -> None:
        """Stop accepting payloads, and end the stream once no `send` waits for an answer."""
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
        """Write a message with its payload, and wait for the receiver's answer. `over` is called as soon as the next
        payload may be written; its argument is the future of this payload's writing, which is done or cancelled.
        `reached` is called now and then with the number of this payload's bytes that have arrived.

        A cancelled send does not affect other payloads' answers.

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
            if written.cancel():  # the payload is partly written, and its memory may change from now on
                self._retired = True
                self.frames.pipe.forget_unsent()
            if self._retired:
                self.retire()

    async def _verdict(
        self, place: int, payload_bytes: int, read_timeout_s: float, reached: Callable[[int], None]
    ) -> Verdict:
        """Wait for the answer to the payload with the number `place` on this stream, counted from 0. Until the receiver
        answers, it must report progress.

        Payloads written before this one must arrive first, even if their sends were cancelled; so the deadline includes
        the time that they may take.
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
                    if self._answered > place:  # otherwise the answer is for a cancelled payload
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
