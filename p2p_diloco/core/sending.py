"""This peer's own contribution to one shard: which peer has it, from the trainer until the log counts or passes it.

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
        self.handed: str | None = None  # the peer that received it
        self.under_way: str | None = None  # the peer that it is being sent to
        self.refusals = 0  # asynchronous: since the trainer last merged

    # -- for the trainer

    def gives_up(self, carried: Carried) -> bool:
        """Whether uncounted progress has been sent too often and is dropped instead of sent again."""
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
        """The contribution to send to this peer; None if the peer has it or it is on its way."""
        if holder in (self.handed, self.under_way):
            return None
        self.under_way = holder
        return self.mine

    def delivered(self, to: str, message: Contribution, ok: bool) -> None:
        """It was delivered to the peer, or was not (``ok``)."""
        if self.mine is None or message.id != self.mine.id or self.under_way != to:
            return
        self.under_way = None
        if ok:
            self.handed = to

    def wanted(self) -> None:
        """An aggregator asks for the contribution: send it again, also to the peer that received it before. If that
        peer has forgotten its claim, its answer shows it."""
        if self.handed != self.me:
            self.handed = None

    def lost(self, peer: str) -> None:
        """The peer died or left."""
        if self.under_way == peer:
            self.under_way = None

    def forgotten_by(self, peer: str) -> None:
        """The peer restarted and lost what it received."""
        if self.handed == peer:
            self.handed = None

    def stale(self, refusal: Stale, state: State | None) -> None:
        """It was refused as too stale; in synchronous mode never."""

    def settle(self, state: State) -> None:
        """The version changed: the contribution may be counted or refused. In synchronous mode the version alone
        decides."""
