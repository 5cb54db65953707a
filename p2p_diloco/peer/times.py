"""Adds up a trainer's time by part, such as transfers and merges: in total, in the last exchange and in the last round.

Law: reads the clock and adds; decides nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from p2p_diloco.node.ledger import GROUP, INNER, OF_EXCHANGE, OF_TRAINING, PAUSED, Ledger, last_round, told
from p2p_diloco.node.shared import SharedMemory

TOLD_EVERY_S = 60.0
"""Seconds between two log lines with the shares of a round's time."""

log = logging.getLogger("p2p_diloco")


class Times:
    """The times of one trainer since its start. The times of the last round are written into the shared memory."""

    def __init__(self, memory: SharedMemory, clock: Callable[[], float]) -> None:
        """`clock` returns the seconds since some fixed moment."""
        self._memory, self._clock = memory, clock
        self._ledger = Ledger(OF_TRAINING, clock)
        self._hidden = dict.fromkeys(OF_EXCHANGE, 0.0)
        self.exchanges = 0
        """The number of exchanges that were merged."""
        self.last_sync_time_s = self._total_s = 0.0
        self._round_began, self._told_at = self._ledger.stood, -math.inf

    def part(self, name: str) -> AbstractContextManager[None]:
        """A block whose time is counted for the part `name`."""
        return self._ledger.part(name)

    @property
    def waiting_s(self) -> float:
        """Seconds for which training has stood still. These are all seconds except inner steps and pauses."""
        return sum(seconds for part, seconds in self._ledger.stood.items() if part not in (INNER, PAUSED))

    @property
    def group_s(self) -> float:
        """Seconds for which training has waited for its averaging group, so far."""
        return self._ledger.stood[GROUP]

    def exchanged(self, waited_since: float, stood: Mapping[str, float], hidden: Mapping[str, float]) -> float:
        """Divide the time for which training waited for an exchange among the parts. `waited_since`: the value of
        `group_s` before the wait; the time to divide is the increase since then. `stood`, `hidden`: the node's seconds
        by part, while training stood still and while training went on. Returns the sum of `hidden`."""
        self._ledger.split(GROUP, waited_since, stood)
        for part, seconds in hidden.items():
            self._hidden[part] += seconds
        return float(sum(hidden.values()))

    def landed(self, took_s: float, hidden_s: float) -> None:
        """Record that the result of an exchange is merged, which ends the round. `took_s`: the duration of the
        exchange, its hidden time included."""
        self.exchanges += 1
        self.last_sync_time_s = took_s
        self._total_s += took_s
        self._memory.waiting_s = self.waiting_s
        before, now = self._round_began, self._clock()
        self._round_began = self._ledger.stood
        spent = {part: seconds - before[part] for part, seconds in self._round_began.items()}
        self._memory.last_round = last = last_round(spent, hidden_s, time.time())
        if now - self._told_at >= TOLD_EVERY_S:
            self._told_at, all_s = now, sum(spent.values()) - spent[PAUSED]
            log.info("round %d took %.2f s: %s", self.exchanges, all_s, told(last))

    def totals(self) -> dict[str, float]:
        """Total seconds by part, under their names in `Metrics`."""
        return {
            "total_sync_time_s": self._total_s,
            "waiting_time_s": self.waiting_s,
            "hidden_time_s": sum(self._hidden.values()),
            **{f"{part}_time_s": seconds for part, seconds in self._ledger.stood.items()},
            **{f"hidden_{part}_time_s": seconds for part, seconds in self._hidden.items()},
        }
