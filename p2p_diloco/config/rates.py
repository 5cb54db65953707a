"""The rates of the outer step in a run with outer=auto: they begin as plain averaging, and rise to the run's own.

Law: pure functions of the settings and of the epoch. Each result is a few sums, products and quotients of doubles,
which every machine rounds alike, so all peers compute the same bits and no commit has to carry them.
"""

from __future__ import annotations

Rates = tuple[float, float]
"""The learning rate and the momentum of an outer step."""

ROUNDS_HALF, STEPS_HALF = 5, 100
"""The momentum of the outer step after epoch e is e / (e + ROUNDS_HALF + STEPS_HALF / H), until it is the run's own:
one half after 5 rounds and 100 inner steps (docs/decisions/0079-rates-that-begin-as-averaging.md)."""

EACH_ALONE: Rates = (0.5, 0.0)
"""The rates in asynchronous mode if every submission is an outer step of its own."""
BUFFERED_MOMENTUM_MAX = 0.5
"""The highest momentum with Delayed Nesterov: a buffer holds less work than a synchronous round, and some is stale."""


def rising(epoch: float, sync_every: int, full: Rates) -> Rates:
    """The rates of the outer step that follows `epoch` outer steps. `full`: the rates that are reached in the end."""
    lr, momentum = full
    risen = min(momentum, epoch / (epoch + ROUNDS_HALF + STEPS_HALF / sync_every))
    share = risen / momentum if momentum else 1.0
    return 1.0 + share * (lr - 1.0), risen
