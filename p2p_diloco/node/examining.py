"""The means of the last minutes' commits, how each was made, as far as this peer knows, and how one is examined: this
peer gets the contributions that it averages, and computes it again.

Law: a peer keeps the contributions to its own means for a while, since others may ask for them. If they exceed
`KEPT_BYTES`, the oldest are dropped early, but none of a fragment's last commit. An examination finds out whether the
mean is a lie, and records the result in its case. `auditing` decides which means are examined, and what follows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from p2p_diloco.core.messages import Choice, Ready
from p2p_diloco.core.version import Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.common import Common
from p2p_diloco.node.headers import packed
from p2p_diloco.node.outbox import Outcome
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.node.slice_work import check_values
from p2p_diloco.node.wire import Audit, OfMean
from p2p_diloco.tensors.mean import MAGNITUDE_MAX

KEPT_BYTES = 64 * 2**20
"""The bytes of contributions to its own means above which a peer drops the oldest, except those of each fragment's last
commit. Other peers rely on half of this only."""
CASES_MAX = 8192
"""The most means that are remembered."""


@dataclass(slots=True, eq=False)
class Case:
    """One mean, and what became of its audit here. `base`: the version on which its commit was made. `seal`: its
    owner's signature. `choice`: what it averages; the mean's key is that of this choice. `nbytes`: the length of all
    contributions. `readys`, `copies`: what its authors signed and sent, by author, as far as it is here. `since`: when
    the commit was applied or first heard of here, in seconds of the loop's clock. `begun`: whether its audit is queued
    or has started. `wanted`: whether it was queued because another peer waits for it. `taken`: whether the audit has
    started. `asked`: whether this peer has asked others for copies. `askers`: the peers that asked this one for copies.
    `given`: the peers that copies were sent to. `accusers`: the peers that call the mean a lie. `over`: whether the
    audit has ended. `right`: whether it found the mean right. `proves`: whether signatures and copies prove to any peer
    that the mean is a lie. `lie`: what the audit found, empty if nothing, and `found_at`: when."""

    mean: OfMean
    base: Version
    seal: bytes
    choice: Choice
    nbytes: int
    readys: dict[str, Ready] = field(default_factory=dict)
    copies: dict[str, memoryview] = field(default_factory=dict)
    since: float = 0.0
    begun: bool = False
    wanted: bool = False
    taken: bool = False
    asked: bool = False
    askers: set[str] = field(default_factory=set)
    given: set[str] = field(default_factory=set)
    accusers: set[str] = field(default_factory=set)
    over: bool = False
    right: bool = False
    proves: bool = False
    lie: str = ""
    found_at: float = 0.0

    @property
    def owner(self) -> str:
        """The peer that has computed the mean."""
        return self.mean.owner

    @property
    def place(self) -> str:
        """Which mean it is, as text."""
        return f"slice {self.mean.number} of fragment {self.mean.fragment}, epoch {self.base.epoch + 1}"

    @property
    def counted(self) -> list[tuple[str, Ready]]:
        """The contributions that the mean averages, by author."""
        return [(peer, ready) for peer, ready in self.choice.entries if ready.weight]

    def missing(self) -> list[str]:
        """The authors whose slices are missing."""
        return [peer for peer, _ in self.counted if peer not in self.copies]


class Cases:
    """What one peer knows of the means of recent commits."""

    def __init__(self, me: str, keep_s: float) -> None:
        """`keep_s`: how long a mean is remembered; the contributions to this peer's own means, half as long."""
        self._me, self._keep_s = me, keep_s
        self._cases: dict[OfMean, Case] = {}  # of applied commits, oldest first
        self._made: dict[OfMean, Case] = {}  # this peer's own means of rounds that are not over
        self._last: dict[int, str] = {}  # by fragment: the key of the last commit

    def __iter__(self) -> Iterator[Case]:
        return iter(list(self._cases.values()))

    def get(self, mean: OfMean) -> Case | None:
        """The case of this mean; None if no commit with it was applied here, or too long ago. This peer's own mean is a
        case from the time it is made: others may apply its commit earlier than this peer does."""
        return self._cases.get(mean) or self._made.get(mean)

    def made(self, case: Case, now: float) -> None:
        """Remember a mean that this peer has computed."""
        case.since = now
        self._made[case.mean] = case

    def applied(self, fragment: int, key: str, means: Iterable[Case], now: float) -> list[Case]:
        """Remember the means of a commit that was applied here, whose choice has this key. Returns the cases of other
        peers' means. What this peer has made for other choices is forgotten."""
        others = [case for case in means if case.owner != self._me]
        own = [case for mean, case in self._made.items() if (mean.fragment, mean.key) == (fragment, key)]
        self._made = {mean: case for mean, case in self._made.items() if mean.fragment != fragment}
        self._last[fragment] = key
        for case in (*others, *own):
            case.since = now
            self._cases[case.mean] = case
        self.forget(now)
        return others

    def must_be_kept(self, case: Case) -> bool:
        """Whether the owner of this mean must still have the contributions to it, judged by their bytes. The caller
        checks the commit's age."""
        if self._cases.get(case.mean) is not case:
            return False
        means = list(self._cases)
        later = (self._cases[mean] for mean in means[means.index(case.mean) + 1 :])
        nbytes = sum(other.nbytes for other in later if other.owner == case.owner)
        return self._is_last(case) or nbytes <= KEPT_BYTES / 2

    def forget(self, now: float) -> None:
        """Drop means that are too old or too many, and contributions that are too old or beyond `KEPT_BYTES`."""
        while self._cases and (len(self._cases) > CASES_MAX or now - self._first().since > self._keep_s):
            del self._cases[self._first().mean]
        kept = [case for case in self._cases.values() if case.owner == self._me and case.copies]
        nbytes = sum(case.nbytes for case in kept)
        for case in kept:  # oldest first
            too_much = nbytes > KEPT_BYTES and not self._is_last(case)
            if not too_much and now - case.since <= self._keep_s / 2:
                break
            nbytes, case.copies = nbytes - case.nbytes, {}

    def _first(self) -> Case:
        return next(iter(self._cases.values()))

    def _is_last(self, case: Case) -> bool:
        return self._last.get(case.mean.fragment) == case.mean.key


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
