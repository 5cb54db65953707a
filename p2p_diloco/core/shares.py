"""How large a part of a fragment each peer should aggregate, so that the round ends as soon as the links allow.

Law: exact arithmetic on the bandwidths that peers report; every peer gets the same result to the last digit.

N peers take part, with P bytes of contributions each; peer i aggregates the share s_i of the slices, Σ s_i = 1. It
sends its contributions to the other aggregators, (1 − s_i) P, and its commits to the N − 1 others, s_i P each; it
receives as much. So its link of b_i bytes a second, each way, is busy for
    t_i = P · (1 + (N − 2) s_i) / b_i
(a peer that only aggregates keeps its link busy no longer than that), and the round takes max t_i at best. Even with
s_i = 0 a link is busy for P / b_i, so no round is shorter than the longest of these times. That longest time is the
optimum if the other peers can do all other work within it; else all links should be busy equally long:
    T / P = max(max 1 / b_i, (N − 2 + m) / Σ b_i)       the sum over the m peers that may aggregate
    0 ≤ s_i ≤ (T b_i / P − 1) / (N − 2)
Within these limits the shares are as equal as possible. With two peers, each sends P bytes, no matter
which of them aggregates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from fractions import Fraction

STEP = 2**0.5
"""The ratio of each bandwidth to the median is rounded to a power of this number, because measurements vary and equal
peers should share equally."""
STEPS_MAX = 40
"""Ratios are limited to the range from STEP**-STEPS_MAX to STEP**STEPS_MAX."""


def shares(links: Mapping[str, float], members: Collection[str]) -> dict[str, Fraction]:
    """Return each member's share of the aggregation. ``members`` are the peers that may aggregate; their shares add up
    to 1.

    links: peer → bandwidth > 0, in any unit, of all peers that take part, the members among them.
    """
    steps, beside = rounded(links), len(links) - 2
    if beside <= 0:
        return dict.fromkeys(members, Fraction(1, len(members)))
    alone = 1 / min(steps.values())
    together = (beside + len(members)) / sum((steps[peer] for peer in members), Fraction(0))
    longest = max(alone, together)
    return _levelled({peer: (longest * steps[peer] - 1) / beside for peer in members})


def rounded(bandwidths: Mapping[str, float]) -> dict[str, Fraction]:
    """Return each bandwidth as a ratio to the median, rounded to a power of STEP and limited to STEPS_MAX steps up or
    down. A member may tell a number so small that ratios would be 0 or infinite."""
    median, most = statistics.median_low(bandwidths.values()), 2.0**STEPS_MAX
    ratios = {peer: min(max(each / median, 1 / most), most) for peer, each in bandwidths.items()}
    return {peer: _step(round(2 * math.log2(ratio))) for peer, ratio in ratios.items()}


def filled(bandwidths: Mapping[str, float]) -> dict[str, float]:
    """Return the bandwidths with each unknown one (0) replaced by the median of the known ones, or by 1 if none is
    known."""
    known = [each for each in bandwidths.values() if each > 0]
    usual = statistics.median_low(known) if known else 1.0
    return {peer: each or usual for peer, each in bandwidths.items()}


def _step(number: int) -> Fraction:
    """Return STEP raised to the power ``number``. The power is limited to the range from -STEPS_MAX to STEPS_MAX."""
    number = max(-STEPS_MAX, min(STEPS_MAX, number))
    whole, half = divmod(number, 2)
    return Fraction(2.0**whole * (STEP if half else 1))


def _levelled(most: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Divide 1 among the peers as equally as their limits allow. ``most`` gives each peer's limit; the limits must add
    up to 1 or more."""
    left, found = Fraction(1), dict[str, Fraction]()
    waiting = sorted(most, key=lambda peer: (most[peer], peer))
    for number, peer in enumerate(waiting):
        found[peer] = min(most[peer], left / (len(waiting) - number))
        left -= found[peer]
    assert left == 0, "the limits of all peers must add up to 1 or more"
    return found
