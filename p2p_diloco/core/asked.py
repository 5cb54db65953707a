"""The peers that this replica has asked something lately: their commits, states and versions are answers.

Law: an answer that was not asked for is ignored, except a commit that its author sends, and a state that
`ShardLog.expects_states_of` allows. A question stays open for a while, and for longer while a transfer from or to the
asked peer makes progress. Time is an argument, never read.
"""

from __future__ import annotations

from collections.abc import Iterable

from .events import Effect, Send
from .messages import Commit, Contribution, Fetch, Message, TakeOver, Versions
from .rules import Rules

QUESTIONS = (Contribution, Fetch, TakeOver, Versions)
"""Messages that another peer may answer with commits, a state or versions. In asynchronous mode a Commit is such a
message, too: its receiver may already have a newer version."""


class Asked:
    """When each peer was last asked."""

    def __init__(self, rules: Rules) -> None:
        self._questions = (*QUESTIONS, Commit) if rules.asynchronous else QUESTIONS
        self._open_for = rules.answered_within
        self._when = dict[str, float]()

    def sent(self, effects: Iterable[Effect], now: float) -> None:
        """Record the questions among these effects."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, self._questions):
                self._when[effect.to] = now

    def delivered(self, peer: str, message: Message, now: float) -> None:
        """Record that a message has arrived at the peer: if it is a question, the time for the answer begins now."""
        if isinstance(message, self._questions):
            self._when[peer] = now

    def progresses(self, peer: str, now: float) -> None:
        """Record that a transfer from or to the peer makes progress: an open question stays open for longer."""
        if self.open(peer, now):
            self._when[peer] = now

    def open(self, peer: str, now: float) -> bool:
        """Whether the peer was asked and may still answer."""
        return peer in self._when and now - self._when[peer] < self._open_for

    def tick(self, now: float) -> None:
        """Forget the questions whose time is over."""
        self._when = {peer: when for peer, when in self._when.items() if now - when < self._open_for}
