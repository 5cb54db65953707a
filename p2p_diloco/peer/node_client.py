"""The trainer's conversation with its node: requests, answers, and what the node waits for.

Law: requests have numbers; an answer that comes while another one is waited for is kept. No call waits for ever, except
for an answer that depends on other peers, and that wait ends with the node.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from p2p_diloco import errors
from p2p_diloco.errors import NodeDied, P2PDilocoError
from p2p_diloco.node.channel import ChannelClosed, Message, TrainerEnd
from p2p_diloco.node.shared import SharedMemory

REPEAT_S = 10.0
"""How often a wait for the same thing is logged again."""
ANSWER_S = 60.0
"""How long the node may take for an answer that needs no other peer."""

log = logging.getLogger("p2p_diloco")


class NodeClient:
    """The channel to a node and the memory shared with it. `how_it_ended` describes a node that is gone."""

    def __init__(self, channel: TrainerEnd, memory: SharedMemory, how_it_ended: Callable[[], str]) -> None:
        self.memory = memory
        self._channel, self._how_it_ended = channel, how_it_ended
        self._n = 0
        self._told, self._told_at = "", 0.0
        self._kept: dict[int, Message] = {}  # answers, by request, that came before they were waited for

    def tell(self, kind: str, **values: object) -> None:
        """Send a message that has no answer.

        Raises:
            P2PDilocoError: the node has ended; says why.
        """
        try:
            self._channel.send({"kind": kind, **values})
        except ChannelClosed:
            raise self._why_it_ended() from None

    def request(self, kind: str, **values: object) -> int:
        """Send a request; returns its number, which its answer carries.

        Raises:
            P2PDilocoError: the node has ended; says why.
        """
        self._n += 1
        self.tell(kind, n=self._n, **values)
        return self._n

    def ask(self, kind: str, answer: str, **values: Any) -> Message:
        """Send a request that the node answers by itself, or not much later, and wait for that.

        Raises:
            P2PDilocoError: the node has ended, or doesn't answer.
        """
        message = self.wait_for(answer, n=self.request(kind, **values), timeout_s=ANSWER_S)
        if message is None:
            raise NodeDied(f"the node doesn't answer {kind!r} in {ANSWER_S:g} s", mend="see its log above")
        return message

    def wait_for(self, kind: str, *, n: int | None = None, timeout_s: float) -> Message | None:
        """The next message of a kind (and of request `n`), or None if none comes in time.

        What the node waits for meanwhile is logged.

        Raises:
            P2PDilocoError: the node has ended; says why.
        """
        if n is not None and n in self._kept:
            return self._kept.pop(n)
        give_up_at = time.monotonic() + timeout_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            try:
                message = self._channel.receive(min(left_s, 1.0))
            except ChannelClosed:
                raise self._why_it_ended() from None
            match message:
                case None:
                    continue
                case {"kind": "error", "error": wire}:
                    raise errors.from_wire(wire)
                case {"kind": "waiting" | "progress", "text": text}:
                    self._say(text)
                case {"kind": found} if found == kind and (n is None or message.get("n") == n):
                    return message
                case {"kind": "release", "n": other}:
                    self._kept[other] = message
        return None

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if text and (text != self._told or now - self._told_at >= REPEAT_S):
            log.info("%s", text)
            self._told, self._told_at = text, now

    def _why_it_ended(self) -> P2PDilocoError:
        """The reason that the node left behind, or that there is none."""
        with contextlib.suppress(ChannelClosed):
            while (message := self._channel.receive(1.0)) is not None:
                if message["kind"] == "error":
                    return errors.from_wire(message["error"])
        return NodeDied(self._how_it_ended(), mend="see its log above, and start this peer again")
