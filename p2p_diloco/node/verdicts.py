"""Which aggregators this peer has found to lie, which other peers have found the same, and when this peer expels them.

Law: only remembers and decides; sends and computes nothing. An aggregator is expelled only if this peer has found its
lie and another peer confirms it, or if no other peer could find it. If others could find the lie but none does, this
peer takes its own machine for faulty, and expels no peer without a confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from p2p_diloco.node.cases import Case

PROOFS_MAX, PROOFS_BYTES = 8, 64 * 2**20
"""The most lies whose proofs are kept for newcomers, and the most bytes of their contributions; the newest proof is
kept however long it is."""
CLAIMED_MAX = 64
"""The most aggregators for which accusations of other peers are remembered."""


@dataclass(slots=True)
class Finding:
    """A lie that an audit of this peer has found. `case`: the commit; `since`: when the lie was found."""

    case: Case
    lie: str
    since: float


class Verdicts:
    """This peer's findings, and other peers' accusations."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long others may take to confirm a finding."""
        self._patience_s = patience_s
        self._found: dict[str, Finding] = {}  # by aggregator: findings that did not expel it yet
        self._accusers: dict[str, set[str]] = {}  # by aggregator
        self._proofs: dict[str, Case] = {}  # by aggregator: lies that can be shown to any peer, oldest first
        self.mistaken: set[str] = set()
        """The peers that accused an aggregator of a lie in a commit that is right."""
        self.expelled: dict[str, str] = {}
        """The peers that were found to lie, with the lie."""
        self.doubt = ""
        """Why this peer takes its own machine for faulty; empty if it doesn't."""

    def finds(self, case: Case, lie: str, now: float) -> None:
        """Record a finding of this peer."""
        if case.aggregator not in self.expelled:
            self._found.setdefault(case.aggregator, Finding(case, lie, now))

    def accused(self, aggregator: str, by: str) -> None:
        """Record that another peer has found a lie of this aggregator."""
        if aggregator not in self._accusers and len(self._accusers) >= CLAIMED_MAX:
            del self._accusers[next(iter(self._accusers))]
        self._accusers.setdefault(aggregator, set()).add(by)

    def acquitted(self, aggregator: str, accusers: Collection[str]) -> None:
        """Record that the commit for which these peers accused an aggregator is right."""
        self.mistaken.update(accusers)
        self._accusers.get(aggregator, set()).difference_update(accusers)

    def settle(self, able: Callable[[str], Collection[str]]) -> list[Finding]:
        """Return the findings that another peer has confirmed, or that no other peer could make, and count their
        aggregators as expelled. `able(aggregator)`: the other live peers that could find this aggregator's lie."""
        settled = [f for who, f in self._found.items() if self._accusers.get(who) or not able(who)]
        for finding in settled:
            case = finding.case
            del self._found[case.aggregator]
            self._accusers.pop(case.aggregator, None)
            self.expelled[case.aggregator] = finding.lie
            if case.proves:
                self._proofs[case.aggregator] = case
        while len(self._proofs) > 1 and (len(self._proofs) > PROOFS_MAX or self._nbytes() > PROOFS_BYTES):
            del self._proofs[next(iter(self._proofs))]
        if settled:
            self.doubt = ""
        return settled

    def overdue(self, now: float) -> list[str]:
        """The aggregators that only this peer has found to lie, although others have had time to find the same."""
        return [who for who, finding in self._found.items() if now - finding.since > self._patience_s]

    def to_tell(self) -> list[Case]:
        """The commits of which this peer tells others that they are lies: unconfirmed findings, and those whose proofs
        are kept for newcomers."""
        return [*(finding.case for finding in self._found.values()), *self._proofs.values()]

    def proof(self, key: tuple[int, str]) -> Case | None:
        """The kept proof that this commit is a lie; None if there is none."""
        return next((case for case in self._proofs.values() if case.key == key), None)

    def _nbytes(self) -> int:
        return sum(case.nbytes for case in self._proofs.values())
