"""The learning rate of an inner step: a warm-up, then half a cosine.

Law: arithmetic on whole numbers of steps; nothing is read, kept or trained here. The cosine follows the run's steps, so
that a late peer continues where the others are. The warm-up covers a peer's own first steps, because its inner
optimizer starts without any state, however far the run is.
"""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    *,
    horizon: int | None,
    peak: float,
    warmup_steps: int,
    min_ratio: float,
    own_step: int | None = None,
) -> float:
    """The learning rate of the run's inner step `step`, which is the peer's own number `own_step`; both count from 0,
    and a peer that was there from the beginning need not tell them apart.

    It rises linearly over a peer's own first `warmup_steps` to that of the run: `peak`, and from step `warmup_steps` on
    along half a cosine down to `min_ratio` · `peak` at `horizon`, where it stays. Without a horizon it stays at `peak`.
    """
    own = step if own_step is None else own_step
    risen = min(1.0, (own + 1) / max(1, warmup_steps))
    if horizon is None or step < warmup_steps:
        return peak * risen
    gone = min(1.0, (step - warmup_steps) / max(1, horizon - warmup_steps))
    return peak * risen * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * gone)) / 2)


def run_horizon(*, epochs: int | None, sync_every: int, own_steps: int | None, submitters: int = 1) -> int | None:
    """The inner step at which the schedule ends: the run's end where it is known, else this peer's own. `submitters`:
    peers whose submissions are epochs each; 1 where an epoch is a round of all.
    """
    return own_steps if epochs is None else epochs * sync_every // submitters
