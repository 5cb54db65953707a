"""What of a submission can still be counted. What becomes of an exchange is in test_asynchronous.py."""

from __future__ import annotations

import pytest

from p2p_diloco.core.messages import Contribution
from p2p_diloco.core.submitting import settled
from p2p_diloco.core.version import ContributionId, Version


@pytest.mark.parametrize(
    ("counted", "oldest", "id", "is_settled"),
    [
        (None, (1, 1), (1, 1), False),
        ((1, 1), (1, 1), (1, 1), True),
        ((1, 1), (1, 2), (1, 2), False),
        ((1, 1), (1, 1), (1, 3), True),
        ((1, 9), (2, 1), (2, 1), False),
        ((3, 1), (2, 1), (2, 1), True),
        ((3, 1), (2, 1), (4, 1), False),
    ],
)
def test_what_can_not_be_counted_any_more(
    counted: tuple[int, int] | None, oldest: tuple[int, int], id: tuple[int, int], is_settled: bool
) -> None:
    """It is counted, or a part of it; another life's numbers say nothing, unless they are the greater."""
    contribution = Contribution(0, Version(0, 0, 0, ""), ContributionId(*id), ContributionId(*oldest), 1.0, 1)
    assert settled(contribution, None if counted is None else ContributionId(*counted)) is is_settled
