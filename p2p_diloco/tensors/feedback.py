"""What a codec of few bits loses, kept by the sender for its next contribution: one shard's residual.

Law: a residual is what counted contributions were to say and did not. Let r be the residual, Δ a pseudo-gradient and
q what is decoded from the bytes of Δ + r, which were sent. Once these are counted the trainer takes Δ out of its
progress, and r becomes r + Δ − q. Until then r stays, for the next Δ holds this one; and where a lineage that counted
them gives way to one that doesn't, r is what it was. So at any time

    what is counted, decoded + r + uncounted progress = all progress, less what was dropped

whoever aggregates. Both residuals are kept, with and without the last contribution, so that going over from one to
the other, and back, is exact and computes nothing. Of a contribution that was given up for its age Δ − q is kept, for
a lineage that counts it may win yet: then its Δ was not dropped after all, and r has gone out with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_diloco.core.events import Carry
from p2p_diloco.core.version import ContributionId
from p2p_diloco.tensors.flat import blocks


@dataclass(slots=True)
class GivenUp:
    """The contributions, first to last, that took one residual along and were dropped for their age; and Δ − q of the
    last, which is what the residual gains when one of them is counted after all.
    """

    first: ContributionId
    last: ContributionId
    gain: Tensor
    counted: bool = False

    def follow(self, counted: ContributionId | None) -> bool:
        """Whether the lineage with this entry says otherwise than the one before. One that counts later contributions
        says nothing: it may count these too.
        """
        before = self.counted
        if counted is None or counted < self.first:
            self.counted = False
        elif counted <= self.last:
            self.counted = True
        return self.counted is not before


class Feedback:
    """The residual of one shard, [numel] fp32, which begins at 0: it lives as long as the node."""

    def __init__(self, numel: int) -> None:
        self.residual = torch.zeros(numel)
        self._other = torch.zeros(numel)  # the residual if the last contribution with it were counted, or weren't
        self._counted = True  # whether the last contribution is
        self._apart = True  # whether that one was sent without the residual
        self._oldest: ContributionId | None = None  # of those whose progress, and the residual, ride in the last
        self._newest: ContributionId | None = None  # the last of them
        self._given_up: GivenUp | None = None

    def added(self, delta: Tensor) -> Tensor:
        """Δ + r, to be encoded; good until the next call of anything here."""
        return torch.add(delta, self.residual, out=self._other)

    def sent(self, id: ContributionId, decoded: Iterable[Tensor]) -> None:
        """What was `added` last has become a contribution, from whose bytes these blocks are decoded."""
        for (part,), values in zip(blocks(self._other), decoded, strict=True):
            part.sub_(values)
        if self._counted or self._oldest is None:
            self._oldest = id
        self._newest, self._counted, self._apart = id, False, False

    def sent_apart(self, id: ContributionId) -> None:
        """A contribution was sent without the residual, which stays as it is even if that is counted."""
        if self._counted:
            self._oldest = None  # nothing has taken the residual along since it is what it is
        self._counted, self._apart = False, True

    def sent_nothing(self, id: ContributionId) -> None:
        """What was `added` last can't be sent, and zeros are: the residual may be why, and begins anew."""
        self.residual.zero_()
        self._oldest = self._given_up = None
        self.sent_apart(id)

    def merge(self, carry: Carry, counted: ContributionId | None) -> None:
        """Follow what the trainer does with its progress; `counted`: the table's entry for this peer.

        DROP has two reasons. Nothing that was sent is counted, but it is too old: it took no part of r along, unless it
        is counted after all. Or an older contribution than the last one is counted: r went along with that one, and
        must not be sent twice. What the two lost is much the same, and the last one's is at hand.
        """
        match carry:
            case Carry.SUBTRACT | Carry.RESTORE:
                if not self._apart:
                    self._turn()
                self._counted = carry is Carry.SUBTRACT
            case Carry.DROP:
                if self._rode_in(counted):
                    self._turn()
                elif self._oldest is not None and self._newest is not None:
                    self._given_up = GivenUp(self._oldest, self._newest, self._other - self.residual)
                self._counted = True
        if (given_up := self._given_up) is not None and given_up.follow(counted):
            for residual in (self.residual, self._other):  # what was sent since had r in it, too
                residual.add_(given_up.gain, alpha=1 if given_up.counted else -1)

    def _rode_in(self, counted: ContributionId | None) -> bool:
        """Whether what is counted is one of the contributions since `_oldest`."""
        oldest, newest = self._oldest, self._newest
        if counted is None or oldest is None or newest is None:
            return False
        return counted.incarnation in (oldest.incarnation, newest.incarnation) and counted >= oldest

    def _turn(self) -> None:
        self.residual, self._other = self._other, self.residual
