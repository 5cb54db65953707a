"""Examines one mean: gets the contributions that it averages, and computes it again.

Law: finds out whether the mean is a lie, and records the result in its case. `auditing` decides which means are
examined, and what follows from a lie.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from functools import partial

from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.cases import Case, Cases
from p2p_diloco.node.common import Common
from p2p_diloco.node.encoding import check_values
from p2p_diloco.node.headers import packed
from p2p_diloco.node.outbox import Outcome
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.node.wire import Audit
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

SLICES = 30
"""A wait is counted in this many parts, so that a suspension of this process counts as at most one part."""
LOOK = 1 / 4
"""The time between two looks at who is live, as a multiple of the wait for the next copy."""

LATE = 2.0
"""If more time than this has passed since the last look, as a multiple of the interval, this process was suspended."""


class Contact:
    """The live peers, each with the time of the look since which it has been live at every look. `look` is called at
    regular intervals. It is a break if a peer is missing at a look, or if this process was suspended between two looks.
    An absence that is shorter than an interval may go unseen."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s`: the time between two looks, in seconds."""
        self._interval_s, self._looked = interval_s, math.inf
        self._since: dict[str, float] = {}

    def look(self, alive: Iterable[str], now: float) -> None:
        """Record that these peers are live now."""
        suspended = now - self._looked > LATE * self._interval_s
        before, self._looked = {} if suspended else self._since, now
        self._since = {peer: before.get(peer, now) for peer in alive}

    def since(self, peer: str) -> float:
        """Since when the peer has been live without a break; inf if it is not live, or was first seen after the last
        look."""
        return self._since.get(peer, math.inf)


class Examiner:
    """Examines means for one peer. `cases`: the means that this peer remembers. `wait_s`: how long it waits for the
    next copy, in seconds."""

    def __init__(self, common: Common, cases: Cases, wait_s: float) -> None:
        self._work, self._outbox, self._run = common.work, common.outbox, common.run
        self._roster, self._token, self._me = common.replica.roster, common.run.token, common.transport.peer_id
        self._cases, self._wait_s, self._clock = cases, wait_s, asyncio.get_running_loop().time
        self.contact = Contact(LOOK * wait_s)
        """Since when each peer has been live; updated every `LOOK * wait_s` seconds."""
        self.came = asyncio.Event()
        """Set when a copy has come."""
        self.examined = 0
        """How many means this peer has computed again."""

    async def lie(self, case: Case) -> str:
        """Get the contributions to a mean, and judge the mean. Returns the owner's lie as text; empty if the mean is
        right, or if this peer can't find out."""
        was, in_time = self._roster.summary(case.owner), self._must_show(case)
        near = {case.owner, *case.askers, *case.accusers}
        # of a peer that has restarted, and so refuses, this one may hear late: so the second wait isn't cut short
        if not (await self._gathered(case, near, hasty=True) or await self._gathered(case, set(self._roster.alive()))):
            now = self._roster.summary(case.owner)
            same = was is not None and now is not None and was.incarnation == now.incarnation
            hides = same and in_time and self._cases.must_be_kept(case)  # a peer that restarts loses what it kept
            return f"it doesn't show the contributions to its mean of {case.place}" if hides else ""
        self.examined += 1
        place = self._run.layout.slices_of(case.mean.fragment)[case.mean.number]
        for peer, _ in case.counted:
            try:
                check_values(case.copies[peer], self._run.codecs(place.index)[0], place.numel, MAGNITUDE_MAX)
            except Refusal as refusal:
                case.proves = True
                return f"its mean of {case.place} counts an impossible contribution of {peer}: {refusal.reason}"
        # computed again before the mean is called wrong: a bit may change in this machine's memory
        case.right = await self._is_mean(case, place.index) or await self._is_mean(case, place.index)
        case.proves = not case.right
        return "" if case.right else f"it signed a wrong mean of {case.place}"

    def _must_show(self, case: Case) -> bool:
        """Whether the owner, if asked now, must still have the contributions to its mean, judged by age alone. It
        may have dropped them if the commit is old. A commit may be older than its case says if it came late, because
        this peer and the owner had no contact; so they must have had contact since before it came."""
        return self.is_young(case) and self.contact.since(case.owner) <= case.since - self._wait_s

    def is_young(self, case: Case) -> bool:
        """Whether the commit came at most `wait_s` ago. Owners keep the contributions for longer than that."""
        return self._clock() - case.since <= self._wait_s

    async def _is_mean(self, case: Case, index: int) -> bool:
        """Whether the mean of the contributions is the one that the owner has signed."""
        parts = [(peer, ready.weight, case.copies[peer]) for peer, ready in case.counted]
        return case.mean.hash == hash_of(await asyncio.to_thread(self._work.mean_of, index, parts))

    async def _gathered(self, case: Case, asked: set[str], *, hasty: bool = False) -> bool:
        """Ask these peers for the contributions to a mean, and wait for them. Returns whether all came. Gives up if
        none has come for `wait_s`, or if the owner is gone and no peer accuses it. `hasty`: also if each peer has
        refused."""
        header, slices, missing = packed(Audit(case.mean), self._token), 0, case.missing()
        waited_for = asked - {self._me}

        def answered(peer: str, outcome: Outcome) -> None:
            if hasty and isinstance(outcome, Refusal):
                waited_for.discard(peer)
                self.came.set()

        case.asked = True
        for peer in asked - {self._me} if missing else ():
            self._outbox.put(peer, header, answer=partial(answered, peer))
        while waited_for and missing and slices < SLICES and (case.accusers or self._roster.live(case.owner)):
            self.came.clear()
            before, waiting = missing, asyncio.create_task(self.came.wait())
            woken, _ = await asyncio.wait({waiting}, timeout=self._wait_s / SLICES)
            waiting.cancel()
            missing = case.missing()
            # what wakes it may be a copy for another audit, and that is no part of the wait
            slices = slices + (not woken) if missing == before else 0
        return not missing
