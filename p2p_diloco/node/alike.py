"""Warns, once, if two peers contribute the same bytes, which shows that they train on the same data in the same order.

Law: looks and warns; changes no mean. Only contributions that this peer averages are compared. Each is read at most
once: several peers may send zeros, or the same bytes up to the last, and the node does nothing else meanwhile.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import numpy as np
from blake3 import blake3

from p2p_diloco.core.events import Average
from p2p_diloco.tensors.mean import WEIGHT_MIN

HEAD_BYTES = 4096
"""Contributions are read to their ends only if so many of their first bytes are the same."""

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
        heads = Counter(bytes(payload[:HEAD_BYTES]) for _, payload in made)
        first_with: dict[bytes, str] = {}
        for peer, payload in made:
            if heads[bytes(payload[:HEAD_BYTES])] == 1 or not np.frombuffer(payload, np.uint8).any():
                continue
            other = first_with.setdefault(blake3(payload).digest(), peer)
            if other != peer:
                self._warned = True
                log.warning(
                    "%s contribute the same bytes, so one of them is useless: they train on the same data in the same "
                    "order; give each peer data of its own, for instance by a seed that is peer.seed",
                    self._named(f"{other} and {peer}"),
                )
                return
