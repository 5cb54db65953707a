"""The positions of a trainer's data follow its progress: each pair of the log's carry and the trainer's take."""

from __future__ import annotations

import pytest

from p2p_diloco.core.data_use import Fate
from p2p_diloco.core.events import Carry
from p2p_diloco.node.data_side import fate
from p2p_diloco.node.local_progress import Take


@pytest.mark.parametrize(
    ("carry", "take", "expected"),
    [
        (None, None, Fate.KEEP),
        (Carry.KEEP, Take.KEEP, Fate.KEEP),
        (Carry.SUBTRACT, Take.SUBTRACT, Fate.COUNTED),
        (Carry.SUBTRACT, Take.MIX, Fate.COUNTED),
        (Carry.SUBTRACT, Take.DROP, Fate.COUNTED_ALONE),
        (Carry.RESTORE, Take.RESTORE, Fate.RESTORED),
        (Carry.KEEP, Take.SENT, Fate.SENT),
        (Carry.KEEP, Take.DROP, Fate.DROPPED),
        (Carry.DROP, Take.DROP, Fate.DROPPED),
        (Carry.SUBTRACT, Take.FORGET, Fate.DROPPED),
        (None, Take.FORGET, Fate.DROPPED),
    ],
)
def test_positions_follow_the_take(carry: Carry | None, take: Take | None, expected: Fate) -> None:
    """If the trainer loads only the global value, what was sent is counted if the log says so, and all else is gone."""
    assert fate(carry, take) is expected
