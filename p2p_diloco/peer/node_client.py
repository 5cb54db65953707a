"""Sends the trainer's requests to its node and receives the answers. Logs the node's reports on what the node waits
for.

Law: requests have numbers; an answer that comes during the wait for another one is kept. Every wait has a deadline,
unless the answer depends on other peers; even that wait ends when the node ends. Only one thread at a time uses the
node, because an answer to one would be received by another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from p2p_diloco import errors
from p2p_diloco.errors import NodeDied, P2PDilocoError, UsageError
from p2p_diloco.node.channel import ChannelClosed, Message, TrainerEnd
from p2p_diloco.node.shared import SharedMemory

REPEAT_S = 10.0
"""Seconds after which a wait with the same reason is logged again."""
ANSWER_S = 60.0
"""The usual deadline for an answer of the node that needs no other peer."""

log = logging.getLogger("p2p_diloco")


class NodeClient:
    """The trainer's end of the channel to a node, and the memory that both share. `how_it_ended` returns a sentence
    that says how the node's process ended."""

    def __init__(self, channel: TrainerEnd, memory: SharedMemory, how_it_ended: Callable[[], str]) -> None:
        self.memory = memory
        self._channel, self._how_it_ended = channel, how_it_ended
        self.answer_s = ANSWER_S
        """Deadline for an answer of the node that needs no other peer."""
        self.say: Callable[[str], None] = partial(log.info, "%s")
        """Called with each report of the node on what the node waits for."""
        self._using = threading.RLock()
        self._n = 0
        self._told, self._told_at = "", 0.0
        self._error: P2PDilocoError | None = None  # the node's own: a later call must report the same
        self._kept: dict[int, Message] = {}  # answers that came before a call waited for them, by request

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A block in which only this thread uses the node. It may be nested. Another thread's block waits for the end
        of this one, as long as for an answer.

        Raises:
            UsageError: another thread's block did not end in time.
        """
        if not self._using.acquire(timeout=self.answer_s):
            wrong = f"another thread has been in a step or another call of this peer for {self.answer_s:g} s"
            mend = "call it in the thread that trains; epoch, global_step and metrics can be read in any thread"
            raise UsageError(wrong, mend=mend)
        try:
            yield
        finally:
            self._using.release()

    def tell(self, kind: str, **values: object) -> None:
        """Send the node a message that needs no answer.

        Raises:
            P2PDilocoError: the node has ended; the error says why.
        """
        with self.turn():
            try:
                self._channel.send({"kind": kind, **values})
            except ChannelClosed:
                raise self.why_it_ended() from None

    def request(self, kind: str, **values: object) -> int:
        """Send the node a request. Returns the request's number, which the node's answer repeats.

        Raises:
            P2PDilocoError: the node has ended; the error says why.
        """
        with self.turn():
            self._n += 1
            self.tell(kind, n=self._n, **values)
            return self._n

    def ask(self, kind: str, answer: str, **values: Any) -> Message:
        """Send the node a request, and wait for the answer. The node must be able to answer without other peers.

        Raises:
            P2PDilocoError: the node has ended, or doesn't answer.
        """
        with self.turn():
            message = self.wait_for(answer, n=self.request(kind, **values), timeout_s=self.answer_s)
        if message is None:
            raise NodeDied(f"the node did not answer {kind!r} within {self.answer_s:g} s", mend="see its log above")
        return message

    def wait_for(self, kind: str, *, n: int | None = None, timeout_s: float) -> Message | None:
        """Wait for the next message of this kind (and with the number `n`, if given). None if no such message comes in
        time.

        The node's reports of what it waits for are logged.

        Raises:
            P2PDilocoError: the node has ended; the error says why.
        """
        with self.turn():
            return self._next(kind, n, timeout_s)

    def _next(self, kind: str, n: int | None, timeout_s: float) -> Message | None:
        if n is not None and n in self._kept:
            return self._kept.pop(n)
        give_up_at = time.monotonic() + timeout_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                message = self._channel.receive(min(left_s, 1.0))
            except ChannelClosed:
                raise self.why_it_ended() from None
            match message:
                case None:
                    continue
                case {"kind": "error", "error": wire}:
                    self._error = errors.from_wire(wire)
                    raise self._error
                case {"kind": "waiting" | "progress", "text": text}:
                    self.report(text)
                case {"kind": found} if found == kind and (n is None or message.get("n") == n):
                    return message
                case {"kind": "release", "n": other}:
                    self._kept[other] = message
        return None

    def report(self, text: str) -> None:
        """Log what this peer waits for, unless the same was logged less than REPEAT_S ago."""
        now = time.monotonic()
        if text and (text != self._told or now - self._told_at >= REPEAT_S):
            self.say(text)
            self._told, self._told_at = text, now

    def why_it_ended(self) -> P2PDilocoError:
        """The error that the node sent before its end, or an error that says how its process ended."""
        with contextlib.suppress(ChannelClosed):
            while self._error is None and (message := self._channel.receive(1.0)) is not None:
                if message["kind"] == "error":
                    self._error = errors.from_wire(message["error"])
        return self._error or NodeDied(self._how_it_ended(), mend="see its log above, and start this peer again")
