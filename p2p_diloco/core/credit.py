"""How many of the samples that contributions tell a commit counts.

Law: what a commit counts follows from what it lists, so every replica counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

SAMPLES_TIMES = 4
"""A contribution's samples count at most this many times the median of its commit's, if three or more tell some: so no
member can drive a version, or end a run after its samples, by what it says of itself. Of three, one that says
anything at all makes the sum at most twice the truth. In asynchronous mode the median is that of what each member told
last."""


def credited(told: Sequence[int], others: Sequence[int] = ()) -> list[int]:
    """Return how many samples a commit counts for each of its contributions, which tell this many. ``others``: what
    members told last whom it does not count."""
    some = [samples for samples in (*told, *others) if samples]
    most = SAMPLES_TIMES * median_low(some) if len(some) >= 3 else max(some, default=0)
    return [min(samples, most) for samples in told]
