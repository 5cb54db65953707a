"""Warns, once, if two peers contribute the same bytes, which shows that they train on the same data in the same order.

Law: looks and warns; changes no mean. Only contributions that this peer averages are compared. A comparison ends at the
first byte that differs, so it costs next to nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import combinations

from p2p_diloco.core.events import Average
from p2p_diloco.tensors.mean import WEIGHT_MIN

log = logging.getLogger(__name__)


class Alike:
    """Compares contributions until two are the same. `named` returns the text by which the log names peers."""

    def __init__(self, named: Callable[[str], str]) -> None:
        self._named, self._warned = named, False

    def look(self, effect: Average) -> None:
        """Compare the contributions that are averaged now. Contributions without progress are left out."""
        if self._warned:
            return
        made = [(peer, memoryview(c.payload)) for peer, c in effect.contributions if c.weight > WEIGHT_MIN]
        for (one, first), (other, second) in combinations(made, 2):
            if first == second and first != memoryview(bytes(len(first))):
                self._warned = True
                log.warning(
                    "%s contribute the same bytes, so one of them is useless: they train on the same data in the same "
                    "order; give each peer data of its own, for instance by a seed that is peer.seed",
                    self._named(f"{one} and {other}"),
                )
                return
