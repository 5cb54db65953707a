"""This peer's own contribution to one shard, from the trainer until it is answered for: the record of its fate.

Law: a synchronous contribution counts on the version that it was made on, or not at all. Asynchronous: `submitting`.
"""

from __future__ import annotations

from .carry import Carried
from .messages import Contribution, Stale, State
from .rules import Rules
from .version import Version


class Sending:
    def __init__(self, me: str, rules: Rules) -> None:
        self.me, self.rules = me, rules
        self.mine: Contribution | None = None
        self.handed: str | None = None  # the peer that has it
        self.under_way: str | None = None  # the peer that it is being sent to
        self.refusals = 0  # asynchronous: since the trainer last merged

    # -- for the trainer

    def gives_up(self, carried: Carried) -> bool:
        """Whether progress that is not counted has been sent so often that it is dropped rather than sent again."""
        return carried.sends > self.rules.carry_rounds

    def loads(self, state: State, base: Version | None) -> bool:
        """Whether the trainer, whose base is another than the present version, merges this shard now."""
        return True

    def goes_on(self, state: State | None, base: Version, due: bool) -> bool:
        """Whether the exchange of the contribution made on ``base`` goes on; ``due``: the shard is due."""
        return state is not None and state.version == base and due

    # -- what happens to it

    def begin(self, mine: Contribution) -> None:
        """The trainer's pseudo-gradient is ready."""
        self.mine, self.handed, self.under_way = mine, None, None

    def sendable(self, version: Version | None) -> bool:
        """Whether an aggregator could still count it."""
        return self.mine is not None and self.mine.base == version

    def send_to(self, holder: str) -> Contribution | None:
        """It is to go to this peer: what to send, unless the peer has it or soon will."""
        if holder in (self.handed, self.under_way):
            return None
        self.under_way = holder
        return self.mine

    def delivered(self, to: str, message: Contribution, ok: bool) -> None:
        """It reached the peer, or didn't."""
        if self.mine is None or message.id != self.mine.id or self.under_way != to:
            return
        self.under_way = None
        if ok:
            self.handed = to

    def wanted(self) -> None:
        """An aggregator lacks what it was handed: hand it over again. If another peer asks, the one that has it may
        have forgotten its claim: asked again, it says so."""
        if self.handed != self.me:
            self.handed = None

    def lost(self, peer: str) -> None:
        """The peer has died or left."""
        if self.under_way == peer:
            self.under_way = None

    def forgotten_by(self, peer: str) -> None:
        """The peer restarted, and what it was handed is gone."""
        if self.handed == peer:
            self.handed = None

    def stale(self, refusal: Stale, state: State | None) -> None:
        """It is refused as too far behind. Here it never is."""

    def settle(self, state: State) -> None:
        """The version is another: the contribution may be answered for. Here the version alone tells."""
