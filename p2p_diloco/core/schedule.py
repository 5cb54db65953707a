"""Which fragment is due when, and how many inner steps: pure arithmetic on step counts, epochs and speeds."""

from __future__ import annotations

import math
from collections.abc import Sequence


def fragment_interval(sync_every: int, fragments: int) -> int:
    """Inner steps between two exchanges: every fragment is exchanged once in ``sync_every`` steps."""
    return sync_every // fragments


def fragment_due(step: int, sync_every: int, fragments: int) -> int | None:
    """The fragment due after inner step ``step`` (counted from 1) by the step count alone, if any.

    The schedule of Streaming DiLoCo (arXiv 2501.18512, section 2). A running replica asks its log instead
    (`fragment_by_log`), which agrees with this for a peer without faults.
    """
    interval = fragment_interval(sync_every, fragments)
    if step <= 0 or step % interval:
        return None
    return (step // interval - 1) % fragments


def fragment_by_log(epochs: Sequence[int | None]) -> int | None:
    """The fragment due next: that of the lowest epoch, then of the lowest index. None stands for a finished
    fragment."""
    open_ones = [(epoch, fragment) for fragment, epoch in enumerate(epochs) if epoch is not None]
    return min(open_ones)[1] if open_ones else None


def dylu_steps(speed: float, fastest: float, base: int) -> int:
    """Dynamic local updates (arXiv 2401.09135, section 5): H_w = max(1, floor(v_w / v_max · H_base)).

    Speeds in inner steps per second; an unknown one (≤ 0) gives the base.
    """
    if speed <= 0 or fastest <= 0:
        return base
    return max(1, math.floor(speed / fastest * base))
