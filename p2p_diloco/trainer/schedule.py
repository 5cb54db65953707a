"""The learning rate of an inner step: a warm-up, then half a cosine.

Law: pure functions of step counts. The cosine follows the run's steps, so that a late peer continues where the others
are. The warm-up covers a peer's own first steps, because its inner optimizer starts without any state, however far the
run is.
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
    """Return the learning rate of the run's inner step `step`. `own_step` is the number of this step among the peer's
    own steps; both count from 0. For a peer that has taken part from the beginning they are equal, and `own_step` may
    be left out.

    The run's rate is `peak` up to step `warmup_steps`, then half a cosine down to `min_ratio` · `peak` at `horizon`,
    where it stays; without a horizon it stays at `peak`. Over a peer's own first `warmup_steps` its rate rises linearly
    to the run's.
    """
    own = step if own_step is None else own_step
    risen = min(1.0, (own + 1) / max(1, warmup_steps))
    if horizon is None or step < warmup_steps:
        return peak * risen
    gone = min(1.0, (step - warmup_steps) / max(1, horizon - warmup_steps))
    return peak * risen * (min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * gone)) / 2)


def run_horizon(*, epochs: int | None, sync_every: int, own_steps: int | None, submitters: int = 1) -> int | None:
    """Return the inner step at which the schedule ends: the run's last step if it is known, else this peer's last step;
    None if neither is known. `submitters`: in asynchronous mode the number of peers, because each peer's submission
    makes an epoch; otherwise 1."""
    return own_steps if epochs is None else epochs * sync_every // submitters
