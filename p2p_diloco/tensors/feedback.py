"""Error feedback for one shard: the sender keeps what a lossy codec drops and adds it to its next contribution.

Law: let r be the residual, Δ a pseudo-gradient, and q the values decoded from the bytes of Δ + r, which were sent. Once
the contribution is counted, the trainer takes Δ out of its progress, and r becomes r + Δ − q. Until then r stays, for
the next Δ includes this one. If a lineage that counted it loses to one that did not, r goes back. So at any time

    decoded and counted + r + uncounted progress = all progress − dropped progress

on every aggregator. Both residuals are kept, with and without the last contribution, so that switching between them is
exact. For a contribution that was dropped for its age Δ − q is kept: a lineage that counts it may still win, and then
its Δ was not dropped, and r went out with it.
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
    """Contributions `first` to `last` took one residual along and were dropped for their age. `gain` is Δ − q of the
    last: the residual gains it if one of them is counted after all.
    """

    first: ContributionId
    last: ContributionId
    gain: Tensor
    counted: bool = False

    def follow(self, counted: ContributionId | None) -> bool:
        """Whether the verdict changes with a lineage whose table has this entry. An entry beyond `last` changes
        nothing: that lineage may or may not count these.
        """
        before = self.counted
        if counted is None or counted < self.first:
            self.counted = False
        elif counted <= self.last:
            self.counted = True
        return self.counted is not before


class Feedback:
    """The residual of one shard, [numel] fp32. It starts at 0 and lives as long as the node."""

    def __init__(self, numel: int) -> None:
        self.residual = torch.zeros(numel)
        self._other = torch.zeros(numel)  # the residual if the last contribution's fate were the other one
        self._counted = True  # the last contribution is counted
        self._apart = True  # the last contribution was sent without the residual
        self._oldest: ContributionId | None = None  # first contribution that included the present residual
        self._newest: ContributionId | None = None  # last one of these
        self._given_up: GivenUp | None = None

    def added(self, delta: Tensor) -> Tensor:
        """Δ + r, to be encoded; valid until the next call of any method."""
        return torch.add(delta, self.residual, out=self._other)

    def sent(self, id: ContributionId, decoded: Iterable[Tensor]) -> None:
        """The last result of `added` was sent as contribution `id`; `decoded` are the blocks of its bytes."""
        for (part,), values in zip(blocks(self._other), decoded, strict=True):
            part.sub_(values)
        if self._counted or self._oldest is None:
            self._oldest = id
        self._newest, self._counted, self._apart = id, False, False

    def sent_apart(self, id: ContributionId) -> None:
        """A contribution was sent without the residual, which stays the same even if that is counted."""
        if self._counted:
            self._oldest = None  # the present residual has never been sent
        self._counted, self._apart = False, True

    def sent_nothing(self, id: ContributionId) -> None:
        """Zeros were sent in place of the last result of `added`, which was not finite. The residual may be the cause,
        so it starts again at 0."""
        self.residual.zero_()
        self._oldest = self._given_up = None
        self.sent_apart(id)

    def merge(self, carry: Carry, counted: ContributionId | None) -> None:
        """Follow what the trainer does with its progress; `counted`: the table's entry for this peer.

        DROP has two causes. Either the progress is not counted but too old: then r was not delivered, unless a lineage
        counts it after all. Or an older contribution than the last one is counted: r went out with that one and must
        not be sent twice. Its loss is nearly that of the last contribution, which is at hand.
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
            for residual in (self.residual, self._other):  # later contributions included r, too
                residual.add_(given_up.gain, alpha=1 if given_up.counted else -1)

    def _rode_in(self, counted: ContributionId | None) -> bool:
        """Whether the counted contribution is one of those since `_oldest`."""
        oldest, newest = self._oldest, self._newest
        if counted is None or oldest is None or newest is None:
            return False
        return counted.incarnation in (oldest.incarnation, newest.incarnation) and counted >= oldest

    def _turn(self) -> None:
        self.residual, self._other = self._other, self.residual
