"""What a codec of few bits loses, kept by the sender for its next contribution: one shard's residual.

Law: a residual is what counted contributions were to say and did not. Let r be the residual, Δ a pseudo-gradient and
q what is decoded from the bytes of Δ + r, which were sent. Once these are counted the trainer takes Δ out of its
progress, and r becomes r + Δ − q. Until then r stays, for the next Δ holds this one; and where a lineage that counted
them gives way to one that doesn't, r is what it was. So at any time

    what is counted, decoded + r + uncounted progress = all progress, less what was dropped

whoever aggregates. Both residuals are kept, with and without the last contribution, so that going over from one to
the other, and back, is exact and computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from p2p_diloco.core.events import Carry
from p2p_diloco.core.version import ContributionId
from p2p_diloco.tensors.flat import blocks


class Feedback:
    """The residual of one shard, [numel] fp32, which begins at 0: it lives as long as the node."""

    def __init__(self, numel: int) -> None:
        self.residual = torch.zeros(numel)
        self._other = torch.zeros(numel)  # the residual if the last contribution were counted, or weren't
        self._counted = True  # whether the last contribution is
        self._oldest: ContributionId | None = None  # of those whose progress rides in the last
        self._last: ContributionId | None = None

    def added(self, delta: Tensor) -> Tensor:
        """Δ + r, to be encoded; good until the next call of anything here."""
        return torch.add(delta, self.residual, out=self._other)

    def sent(self, id: ContributionId, decoded: Iterable[Tensor]) -> None:
        """What was `added` last has become a contribution, from whose bytes these blocks are decoded."""
        for (part,), values in zip(blocks(self._other), decoded, strict=True):
            part.sub_(values)
        self._note(id)

    def sent_apart(self, id: ContributionId) -> None:
        """A contribution was sent without the residual, which stays as it is even if that is counted."""
        self._other.copy_(self.residual)
        self._note(id)

    def sent_nothing(self, id: ContributionId) -> None:
        """What was `added` last can't be sent, and zeros are: the residual may be why, and begins anew."""
        self.residual.zero_()
        self.sent_apart(id)

    def merge(self, carry: Carry, counted: ContributionId | None) -> None:
        """Follow what the trainer does with its progress; `counted`: the table's entry for this peer.

        DROP has two reasons. Nothing that was sent is counted, but it is too old: it took no part of r along. Or an
        older contribution than the last one is counted: r went along with that one, and must not be sent twice. What
        the two lost is much the same, and the last one's is at hand.
        """
        match carry:
            case Carry.SUBTRACT | Carry.RESTORE:
                self._turn()
                self._counted = carry is Carry.SUBTRACT
            case Carry.DROP:
                if self._rode_in(counted):
                    self._turn()
                self._counted = True

    def _note(self, id: ContributionId) -> None:
        if self._counted or self._oldest is None:
            self._oldest = id
        self._last, self._counted = id, False

    def _rode_in(self, counted: ContributionId | None) -> bool:
        """Whether what is counted is one of the contributions since `_oldest`."""
        oldest, last = self._oldest, self._last
        if counted is None or oldest is None or last is None:
            return False
        return counted.incarnation in (oldest.incarnation, last.incarnation) and counted >= oldest

    def _turn(self) -> None:
        self.residual, self._other = self._other, self.residual
