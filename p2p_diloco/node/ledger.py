"""Divides time among named parts, and sums the seconds of each. Every moment belongs to exactly one part.

Law: independent of what the parts are; reads only the given clock. If several parts are active, the time counts for the
one that is first in the ledger's order; if none is active, for the last part of that order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from p2p_diloco.node.status import SHARES, LastRound

INNER, PAUSED, MERGE, PSEUDO_GRADIENT = "inner", "paused", "merge", "pseudo_gradient"
CODEC, GROUP, TRANSFER, OUTER_STEP = "codec", "group", "transfer", "outer_step"

OF_EXCHANGE = (OUTER_STEP, CODEC, TRANSFER, GROUP)
"""The parts into which the node divides an exchange's time, in the ledger's order. All time that belongs to no other
part counts as waiting for the averaging group."""
OF_TRAINING = (PSEUDO_GRADIENT, *OF_EXCHANGE, MERGE, PAUSED, INNER)
"""The parts of a trainer's time."""

Seconds = dict[str, float]
"""Seconds by part."""


class Ledger:
    """Sums seconds by part, in two columns. Time before the moment `stands_since()` goes to the column `hidden`,
    because training went on then. Later time goes to the column `stood`, because training stood still.

    `clock` and `stands_since` use the same clock, which another process may use too.
    """

    def __init__(
        self,
        order: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        stands_since: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        self._order, self._clock, self._stands_since = tuple(order), clock, stands_since
        self._under_way = dict.fromkeys(self._order, 0)
        self._at = clock()
        self.begin()

    def begin(self) -> None:
        """Set all sums to zero. Parts that are active stay active."""
        self._at = self._clock()
        self._stood, self._hidden = (dict.fromkeys(self._order, 0.0) for _ in range(2))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block for this part. Several parts may be active at once, and one part several
        times at once."""
        self._settle()
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._settle()
            self._under_way[name] -= 1

    def split(self, name: str, before: float, seconds: Mapping[str, float]) -> None:
        """In the column `stood`, move seconds from the part `name` to other parts; `seconds` holds how many go to each.
        At most as many are moved as `name` has gained since its sum was `before`."""
        for other, share in seconds.items():
            if other != name:
                moved = min(share, self._stood[name] - before)
                self._stood[name] -= moved
                self._stood[other] += moved

    @property
    def stood(self) -> Seconds:
        """The seconds for which training stood still, by part, up to now."""
        self._settle()
        return dict(self._stood)

    @property
    def hidden(self) -> Seconds:
        """The seconds for which training went on, by part, up to now."""
        self._settle()
        return dict(self._hidden)

    def _settle(self) -> None:
        """Add the time since the last call to the sum of the first active part; if none is active, of the last part."""
        began, self._at = self._at, self._clock()
        part = next((name for name in self._order if self._under_way[name]), self._order[-1])
        stood = min(max(0.0, self._at - self._stands_since()), self._at - began)
        self._stood[part] += stood
        self._hidden[part] += self._at - began - stood


def last_round(stood: Mapping[str, float], hidden_s: float, ended: float) -> LastRound:
    """Make the `LastRound` of a round, without pauses, rounded to 0.1 ms. `stood`: the round's seconds by part.
    `hidden_s`: the seconds of its exchange during which training went on. `ended`: its end, in seconds since 1970."""
    spent = {**stood, "encode": stood[PSEUDO_GRADIENT] + stood[CODEC], "hidden": hidden_s}
    return LastRound(*(round(number, 4) for number in (*(spent[name] for name in SHARES), ended)))


def told(last: LastRound) -> str:
    """Return the shares of a round's time as text."""
    *spent, hidden = (f"{name.replace('_', ' ')} {share:.1%}" for name, share in last.shares.items())
    return f"{', '.join(spent)}; of its exchange {hidden}"
