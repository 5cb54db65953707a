"""Error feedback for one slice: the sender keeps a lossy codec's error and adds it to its next contribution.

Law: let r be the residual, Δ a pseudo-gradient, and q the values decoded from the bytes of Δ + r, which were sent. Once
the contribution is counted, the trainer subtracts Δ from its progress, and r becomes r + Δ − q. Until then r stays,
because the next Δ includes this one. So at any time

    decoded and counted + r + uncounted progress = all progress − dropped progress

at every owner. If the lineage that counted the contribution loses to one that did not, Δ is dropped, and the
change of r is undone: the residual without the last contribution is kept, so that this is exact. Only if a lineage wins
that counts a contribution which was dropped before, r is delivered twice: the rounding error of one contribution.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from p2p_diloco.core.carry import Outcome
from p2p_diloco.core.version import ContributionId
from p2p_diloco.tensors.flat import blocks


class Feedback:
    """Keeps the residual of one slice, fp32 [numel]. It starts at 0, and stays in memory as long as the node runs."""

    def __init__(self, numel: int) -> None:
        self.residual = torch.zeros(numel, device="cpu")
        # the residual for the other fate (counted or not) of the last contribution
        self._other = torch.zeros(numel, device="cpu")
        self._counted = True  # whether the last contribution is counted
        self._apart = True  # whether the last contribution was sent without the residual, or was dropped
        self._oldest: ContributionId | None = None  # first contribution that included the present residual
        self._newest: ContributionId | None = None  # last contribution that included the present residual

    def added(self, delta: Tensor) -> Tensor:
        """Return Δ + r, which is to be encoded. The result is valid until the next call of any method."""
        return torch.add(delta, self.residual, out=self._other)

    def sent(self, id: ContributionId, decoded: Iterable[Tensor]) -> None:
        """Record that the last result of `added` was sent as the contribution `id`. `decoded`: the decoded blocks of
        the bytes that were sent."""
        for (part,), values in zip(blocks(self._other), decoded, strict=True):
            part.sub_(values)
        if self._counted or self._oldest is None:
            self._oldest = id
        self._newest, self._counted, self._apart = id, False, False

    def sent_apart(self, id: ContributionId) -> None:
        """Record that a contribution was sent without the residual. The residual then stays the same even if the
        contribution is counted."""
        if self._counted:
            self._oldest = None  # the present residual has never been sent
        self._counted, self._apart = False, True

    def sent_nothing(self, id: ContributionId) -> None:
        """Record that zeros were sent instead of the last result of `added`, which was not finite. The residual may be
        the cause, so it is reset to 0."""
        self.residual.zero_()
        self._oldest = None
        self.sent_apart(id)

    def merge(self, outcome: Outcome, counted: ContributionId | None) -> None:
        """Update the residual when the trainer merges the slice with this outcome. `counted`: this peer's last
        contribution that the merged state counts.

        If the progress is dropped, r was not delivered. But if a contribution older than the last one is counted, r was
        delivered with it and must not be sent twice. The error of that older contribution is not known; it is nearly
        the error of the last contribution, which is used instead.
        """
        if outcome.counted:
            if not (self._counted or self._apart):
                self._turn()
            self._counted = True
        elif outcome.dropped:
            if (self._counted and not self._apart) is not self._rode_in(counted):
                self._turn()
            self._oldest, self._counted, self._apart = None, True, True

    def _rode_in(self, counted: ContributionId | None) -> bool:
        """Whether the contribution `counted` included the present residual: it did if it is `_oldest` or later."""
        oldest, newest = self._oldest, self._newest
        if counted is None or oldest is None or newest is None:
            return False
        return counted.incarnation in (oldest.incarnation, newest.incarnation) and counted >= oldest

    def _turn(self) -> None:
        self.residual, self._other = self._other, self.residual
