"""The learning rate of an inner step: a warm-up, then half a cosine.

Law: arithmetic on whole numbers of steps; nothing is read, kept or trained here. Steps are those of the
run, not of the peer, so that whoever joins late starts where the others are.
"""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, horizon: int | None, peak: float, warmup_steps: int, min_ratio: float
) -> float:
    """The learning rate of inner step `step`, counted from 0.

    It rises linearly and reaches `peak` at the last of `warmup_steps`, then falls along half a cosine to
    `min_ratio` · `peak` at `horizon`, where it stays. Without a horizon it stays at `peak`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if horizon is None:
        return peak
    gone = min(1.0, (step - warmup_steps) / max(1, horizon - warmup_steps))
    return peak * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * gone)) / 2)


def run_horizon(*, epochs: int | None, sync_every: int, own_steps: int | None, submitters: int = 1) -> int | None:
    """The inner step at which the schedule ends: the run's end where it is known, else this peer's own. `submitters`:
    peers whose submissions are epochs each; 1 where an epoch is a round of all.
    """
    return own_steps if epochs is None else epochs * sync_every // submitters
