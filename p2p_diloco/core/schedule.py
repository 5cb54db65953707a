"""Which fragment is due, and after how many inner steps: pure arithmetic on step counts, epochs and speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fragment_interval(sync_every: int, fragments: int, fragment: int = 0) -> int:
    """Return the number of inner steps from the exchange before to that of ``fragment``. Every fragment is exchanged
    once in ``sync_every`` steps: fragment i after floor((i + 1) · sync_every / fragments) of them. So the numbers
    differ by one at most, and the first fragment has the fewest."""
    return (fragment + 1) * sync_every // fragments - fragment * sync_every // fragments


def fragment_due(step: int, sync_every: int, fragments: int) -> int | None:
    """Return the fragment that is due after inner step ``step`` (counted from 1), by the step count alone; None if none
    is due.

    The schedule of Streaming DiLoCo (arXiv 2501.18512, section 2). A running replica uses `fragment_by_log` instead,
    which gives the same result for a peer without faults.
    """
    if step <= 0:
        return None
    made = (step - 1) % sync_every + 1  # of the present sync_every steps
    fragment = -(-made * fragments // sync_every) - 1
    return fragment if (fragment + 1) * sync_every // fragments == made else None


def fragment_by_log(epochs: Sequence[int | None]) -> int | None:
    """Return the fragment that is due next: the one with the lowest epoch. If several fragments have this epoch, the
    first of them is due. ``epochs``: the epoch of each fragment, or None if it is finished. The result is None if all
    fragments are finished."""
    open_ones = [(epoch, fragment) for fragment, epoch in enumerate(epochs) if epoch is not None]
    return min(open_ones)[1] if open_ones else None


def dylu_steps(speed: float, fastest: float, base: int) -> int:
    """Return how many inner steps a peer makes by the rule of dynamic local updates: H_w = max(1, floor(v_w / v_max ·
    H_base)).

    The formula is from arXiv 2401.09135, section 5. Speeds are in inner steps per second; if one is unknown (≤ 0), the
    result is ``base``.
    """
    if speed <= 0 or fastest <= 0:
        return base
    return max(1, math.floor(speed / fastest * base))
