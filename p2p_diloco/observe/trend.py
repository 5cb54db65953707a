"""Remembers the losses and the speed of a run while someone looks at it, and draws each as a line of little bars.

Law: values in, texts out; keeps the newest `KEPT` values of each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from p2p_diloco.observe.snapshot import TRAINING, Snapshot

KEPT = 600
BARS = "▁▂▃▄▅▆▇█"


class Trend:
    """The losses and the speed of a run at each look at it."""

    def __init__(self) -> None:
        self.loss: deque[float] = deque(maxlen=KEPT)
        """The mean of the losses that the peers reported last."""
        self.held_out: deque[float] = deque(maxlen=KEPT)
        """The mean of the held-out losses that the peers reported last."""
        self.speed: deque[float] = deque(maxlen=KEPT)
        """Inner steps a second of all peers together."""

    def saw(self, seen: Snapshot) -> None:
        """Add the values of one snapshot. Only peers in a state of `TRAINING` count."""
        if seen.run.loss is not None:
            self.loss.append(seen.run.loss)
        if seen.run.held_out_loss is not None:
            self.held_out.append(seen.run.held_out_loss)
        self.speed.append(sum(peer.steps_per_second or 0.0 for peer in seen.peers if seen.state(peer) in TRAINING))


def sparkline(values: Sequence[float], width: int) -> str:
    """The finite values as at most `width` bars, from the least to the greatest height. If there are more values than
    bars, each bar is the mean of equally many neighbours. An empty text for fewer than two finite values."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2:
        return ""
    bars = min(width, len(values))
    edges = [round(len(values) * bar / bars) for bar in range(bars + 1)]
    means = [fmean(values[first:end]) for first, end in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / span * len(BARS)))] for mean in means)
