"""Which commits and contributions may count at all, whatever their tensors are: judged by author, term and numbers.

Law: pure functions. What a message may add is far less than what a message can hold, so no accepted number keeps a
later message from being sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from .leadership import Leadership
from .messages import Commit, Contribution, State
from .rules import Rules
from .version import SALT_BITS, ContributionId

AHEAD_MAX = 86_400_000 << SALT_BITS
"""An incarnation may be ahead of all that are known by a day: a clock may be wrong, but not by more."""


def objection(commit: Commit, state: State, lead: Leadership, rules: Rules) -> str:
    """Return why this commit can't follow the state; empty if it can. ``lead``: who may write the next commit."""
    if not lead.entitles(commit.aggregator, commit.term):
        return f"{commit.aggregator} may not write it under term {commit.term}"
    latest = latest_incarnation(state.counted, lead.roster.mine.incarnation)
    for counted in commit.contributions:
        if not rules.fits(counted.weight, counted.samples) or counted.id.incarnation > latest:
            return f"the weight, the samples or the incarnation of {counted.peer} is out of range"
    return ""


def in_range(contribution: Contribution, state: State | None, lead: Leadership, rules: Rules) -> bool:
    """Whether the numbers of this contribution are such that a commit may count it. ``state``: the present one."""
    latest = latest_incarnation({} if state is None else state.counted, lead.roster.mine.incarnation)
    incarnations = contribution.oldest <= contribution.id and contribution.id.incarnation <= latest
    return incarnations and rules.fits(contribution.weight, contribution.samples)


def latest_incarnation(counted: Mapping[str, ContributionId], own: int) -> int:
    """Return the highest incarnation that a contribution may have: not far beyond those that are ``counted`` and this
    peer's ``own``. After a contribution of a higher one was counted, no later one of its author might fit into a
    message."""
    return max([own, *(known.incarnation for known in counted.values())]) + AHEAD_MAX
