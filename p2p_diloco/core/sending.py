"""This peer's own contribution to one shard: it is sent until a commit counts it or a new version rules it out.

Law: a synchronous contribution counts on the version that it was made on, or not at all. The asynchronous mode is in
`submitting`.
"""

from __future__ import annotations

from .carry import Carried
from .events import Effect, Send
from .messages import Contribution, Stale, State
from .rules import Rules
from .version import Version


class Sending:
    """This peer's present contribution to one shard (``mine``), and which peer has received it."""

    def __init__(self, me: str, rules: Rules) -> None:
        self.me, self.rules = me, rules
        self.mine: Contribution | None = None
        self.handed: str | None = None  # the peer that received the contribution
        self.under_way: str | None = None  # the peer to which the contribution is being sent
        self.refusals = 0  # asynchronous: number of refusals since the trainer last merged

    # -- for the trainer

    def gives_up(self, carried: Carried) -> bool:
        """Whether the uncounted progress has been sent so often that it is now dropped instead of sent again."""
        return carried.sends > self.rules.carry_rounds

    def loads(self, state: State, base: Version | None) -> bool:
        """Whether the trainer should merge this shard now; always True in synchronous mode. Called only if there is a
        newer state or a refusal."""
        return True

    def goes_on(self, state: State | None, base: Version, due: bool) -> bool:
        """Whether the trainer must still wait for this shard's next version, after its contribution on ``base``.
        ``due``: whether this shard is still due, judging by the epochs in the logs."""
        return state is not None and state.version == base and due

    # -- what happens to it

    def begin(self, mine: Contribution) -> None:
        """Begin to send a new contribution."""
        self.mine, self.handed, self.under_way = mine, None, None

    def sendable(self, version: Version | None) -> bool:
        """Whether an aggregator could still count the contribution at this version."""
        return self.mine is not None and self.mine.base == version

    def send_to(self, holder: str) -> list[Effect]:
        """Send the contribution to ``holder``, unless that peer has it already or it is on its way there."""
        if self.mine is None or holder in (self.handed, self.under_way):
            return []
        self.under_way = holder
        return [Send(holder, self.mine)]

    def delivered(self, to: str, message: Contribution, ok: bool) -> None:
        """Record whether the contribution could be delivered to the peer ``to`` (``ok``)."""
        if self.mine is None or message.id != self.mine.id or self.under_way != to:
            return
        self.under_way = None
        if ok:
            self.handed = to

    def wanted(self) -> None:
        """Handle an aggregator's request for the contribution: let it be sent again, even if it was delivered before.
        It goes to the peer that aggregates as far as this peer knows. If that peer has forgotten its claim, it refuses
        the contribution."""
        if self.handed != self.me:
            self.handed = None

    def lost(self, peer: str) -> None:
        """Handle a peer that died or left: the contribution is no longer on its way to that peer."""
        if self.under_way == peer:
            self.under_way = None

    def forgotten_by(self, peer: str) -> None:
        """Handle a peer's restart: the peer has lost what it received."""
        if self.handed == peer:
            self.handed = None

    def stale(self, refusal: Stale, state: State | None) -> None:
        """Handle the refusal of a contribution that is too stale; synchronous mode has no such refusals."""
