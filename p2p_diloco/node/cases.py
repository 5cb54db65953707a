"""The means of the last minutes' commits, and how each of them was made, as far as this peer knows.

Law: only remembers; sends and judges nothing. A peer keeps the contributions to its own means for a while, since others
may ask for them. If they exceed `KEPT_BYTES`, the oldest are dropped early, but none of a fragment's last commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from p2p_diloco.core.messages import Choice, Ready
from p2p_diloco.core.version import Version
from p2p_diloco.node.wire import OfMean

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
    started. `asked`: whether this peer has asked others for copies. `askers`: the peers that asked this one for
    copies. `given`: by peer that copies were sent to, whether it lacks them again. `accusers`: the peers that call the
    mean a lie. `over`: whether the audit has ended. `right`: whether it found the mean right. `proves`: whether
    signatures and copies prove to any peer that the mean is a lie. `lie`: what the audit found, empty if nothing, and
    `found_at`: when."""

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
    given: dict[str, bool] = field(default_factory=dict)
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
        self._own = deque[Case]()  # this peer's means whose contributions are kept
        self._own_bytes = 0

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
        self._own.extend(own)
        self._own_bytes += sum(case.nbytes for case in own)
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
        while self._own and self._drops(self._own[0], now):
            case = self._own.popleft()
            self._own_bytes -= case.nbytes
            case.copies = {}

    def _first(self) -> Case:
        return next(iter(self._cases.values()))

    def _is_last(self, case: Case) -> bool:
        return self._last.get(case.mean.fragment) == case.mean.key

    def _drops(self, case: Case, now: float) -> bool:
        too_much = self._own_bytes > KEPT_BYTES and not self._is_last(case)
        return too_much or now - case.since > self._keep_s / 2
