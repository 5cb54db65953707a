"""The commits of the last minutes, and how each of them was made, as far as this peer knows.

Law: only remembers; sends and judges nothing. A peer keeps the contributions of its own commits for a while, since
others may ask for them. If they exceed `KEPT_BYTES`, the oldest are dropped early, but none of a shard's last commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from p2p_diloco.core.messages import Counted
from p2p_diloco.node.seals import Sealed

KEPT_BYTES = 256 * 2**20
"""The bytes of contributions to its own commits above which a peer drops the oldest, except those of each shard's last
commit. Other peers rely on half of this only."""
CASES_MAX = 8192
"""The most commits that are remembered."""

Key = tuple[int, str]
"""A shard, and the digest of the version that a commit of this shard led to."""


@dataclass(slots=True)
class Case:
    """One commit, and what became of its audit here. `base`: the digest of the version that the commit was made on.
    `digest`, `epoch`: those of the version that it made. `counted`: the contributions that it counts. `nbytes`: the
    length of all their payloads. `chosen`: whether the lot fell on this commit. `copies`: the payloads that are here,
    by author. `since`: when the commit was accepted or first heard of here, in seconds of the loop's clock. `begun`:
    whether its audit is queued or has started. `wanted`: whether it was queued because another peer waits for it.
    `taken`: whether the audit has started. `asked`: whether this peer has asked others for copies. `askers`: the
    peers that asked this one for copies. `given`: by peer that copies were sent to, whether it lacks them again.
    `accusers`: the peers that call the commit a lie. `over`: whether the audit has ended. `right`: whether it found the
    commit right. `proves`: whether seals and copies prove to any peer that the commit is a lie."""

    shard: int
    base: str
    digest: str
    epoch: int
    aggregator: str
    counted: tuple[Counted, ...]
    sealed: Sealed
    nbytes: int
    chosen: bool = False
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

    @property
    def key(self) -> Key:
        """The case's key."""
        return self.shard, self.digest

    def missing(self) -> list[str]:
        """The authors whose payloads are missing."""
        return [counted.peer for counted in self.counted if counted.peer not in self.copies]

    def seals(self) -> list[tuple[Counted, bytes]]:
        """The contributions with their seals."""
        return list(zip(self.counted, self.sealed.parts, strict=True))


class Cases:
    """The commits that were accepted here in the last `keep_s` seconds, oldest first. The contributions to this peer's
    own commits are kept for half as long."""

    def __init__(self, me: str, keep_s: float) -> None:
        self._me, self._keep_s = me, keep_s
        self._expected: dict[int, Case] = {}  # by shard: the commit that was computed last, and isn't accepted yet
        self._cases: dict[Key, Case] = {}
        self._last: dict[int, Case] = {}  # by shard
        self._own = deque[Case]()  # this peer's commits whose contributions are kept
        self._own_bytes = 0

    def __iter__(self) -> Iterator[Case]:
        return iter(list(self._cases.values()))

    def get(self, key: Key) -> Case | None:
        """The case of this commit; None if it wasn't accepted here, or too long ago. This peer's own last commit of a
        shard is a case from the time it is made: others may accept it earlier than this peer does."""
        last = self._expected.get(key[0])
        return last if last is not None and last.key == key and last.aggregator == self._me else self._cases.get(key)

    def expect(self, case: Case) -> None:
        """Remember a commit whose outer step was computed here. It becomes a case once its version is accepted."""
        self._expected[case.shard] = case

    def appended(self, key: Key, now: float) -> Case | None:
        """Handle the accepted version `key` of a shard. Returns the case of the commit that made it; None if `expect`
        was told of no such commit."""
        case = self._expected.pop(key[0], None)
        if case is None or case.key != key:
            return None
        case.since = now
        self._cases[key] = self._last[case.shard] = case
        if case.aggregator == self._me:
            self._own.append(case)
            self._own_bytes += case.nbytes
        self.forget(now)
        return case

    def must_be_kept(self, case: Case) -> bool:
        """Whether the aggregator of this commit must still have the commit's contributions, judged by their bytes. The
        caller checks the commit's age."""
        if self._cases.get(case.key) is not case:
            return False
        keys = list(self._cases)
        later = (self._cases[key] for key in keys[keys.index(case.key) + 1 :])
        nbytes = sum(other.nbytes for other in later if other.aggregator == case.aggregator)
        return self._last[case.shard] is case or nbytes <= KEPT_BYTES / 2

    def forget(self, now: float) -> None:
        """Drop commits that are too old or too many, and contributions that are too old or beyond `KEPT_BYTES`."""
        while self._cases and (len(self._cases) > CASES_MAX or now - self._first().since > self._keep_s):
            del self._cases[self._first().key]
        while self._own and self._drops(self._own[0], now):
            case = self._own.popleft()
            self._own_bytes -= case.nbytes
            case.copies = {}

    def _first(self) -> Case:
        return next(iter(self._cases.values()))

    def _drops(self, case: Case, now: float) -> bool:
        too_much = self._own_bytes > KEPT_BYTES and self._last[case.shard] is not case
        return too_much or now - case.since > self._keep_s / 2
