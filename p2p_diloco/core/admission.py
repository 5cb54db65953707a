"""Which commits and contributions may count at all, whatever their tensors are: judged by author, term and numbers.

Law: pure functions. What a message may add is far less than what a message can hold, so no accepted number keeps a
later message from being sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from .events import Complaint
from .leadership import Leadership
from .leases import objection as misuse
from .lending import is_empty
from .lives import SALT_BITS, life_of
from .messages import Commit, Contribution, Counted, Plan, State
from .revision import FOUNDED
from .rules import Rules
from .version import ContributionId

AHEAD_MAX = 86_400_000 << SALT_BITS
"""An incarnation may be ahead of all that are known by a day: a clock may be wrong, but not by more."""

COUNTED_MAX = 12_000
"""The most peers that a run counts. With 75 bytes each, the header of a shard's state still fits into a message."""

NEWCOMERS_MAX, PLANNED_MAX = 64, 16
"""A commit counts at most so many peers that no commit has counted before, and its plan names at most so many that
neither it, nor an earlier commit, nor the plan before it knows. Such peers may be invented: each one that is counted
takes room in the state for ever, and a round may wait for each one that is named until it is found dead."""


def objection(commit: Commit, state: State, lead: Leadership, rules: Rules) -> str:
    """Return why this commit can't follow the state; empty if it can. ``lead``: who may write the next commit."""
    if not lead.entitles(commit.aggregator, commit.term):
        return f"{commit.aggregator} may not write it under term {commit.term}"
    latest = latest_incarnation(state.counted, lead.roster.mine.incarnation)
    for counted in commit.contributions:
        if not rules.fits(counted.weight, counted.samples, state.revision) or counted.id.incarnation > latest:
            return f"the weight, the samples or the incarnation of {counted.peer} is out of range"
        if misweighed(counted, rules):
            return f"it counts a submission of {counted.peer} with another weight than 1"
        if why := misused(counted.peer, counted, state, rules):
            return f"it counts a contribution of {counted.peer}, but {why}"
    listed = {counted.peer for counted in commit.contributions}
    if len(listed) < len(commit.contributions):
        return "it counts two contributions of one peer"
    if again := [c.peer for c in commit.contributions if c.peer in state.counted and c.id <= state.counted[c.peer]]:
        return f"it counts a contribution of {again[0]} that was counted before"
    if len(listed - state.counted.keys()) > _room(state):
        return "it counts too many peers that no commit has counted before"
    if len(_strangers(commit.plan, listed | {commit.aggregator}, state)) > PLANNED_MAX and state.counted:
        return "its plan names too many peers that no commit has counted before"
    return ""


def unfit(peer: str, contribution: Contribution, state: State | None, lead: Leadership, rules: Rules) -> str:
    """Return why no commit may count this contribution of a peer; empty if one may. ``state``: the present one."""
    counted = {} if state is None else state.counted
    latest = latest_incarnation(counted, lead.roster.mine.incarnation)
    incarnations = contribution.oldest <= contribution.id and contribution.id.incarnation <= latest
    revision = FOUNDED if state is None else state.revision
    if not incarnations or not rules.fits(contribution.weight, contribution.samples, revision):
        return "it has a number out of range"
    if misweighed(contribution, rules):
        return "a submission has the weight 1"
    if not rules.asynchronous and (why := misused(peer, contribution, state, rules)):
        return why
    full = peer not in counted and len(counted) >= COUNTED_MAX
    return f"the run has counted {COUNTED_MAX} peers, and counts no further one" if full else ""


def misweighed(what: Contribution | Counted, rules: Rules) -> bool:
    """Return whether this is a submission in asynchronous mode with another weight than 1. It is refused, and not
    counted as 1: its author has sealed its weight, so the commit would not fit to the seal."""
    return rules.asynchronous and not is_empty(what) and what.weight != 1.0


def misused(peer: str, what: Contribution | Counted, state: State | None, rules: Rules) -> str:
    """Return why the next commit may not count the data that a peer's contribution was made from; empty if it may."""
    if not any(use.used for use in what.uses) and (state is None or state.shard != rules.ledger):
        return ""
    if state is None or state.shard != rules.ledger:
        return "only a contribution to the ledger can say which data was used"
    return misuse(state.tables, peer, life_of(what.id.incarnation), what.uses)


def countable(inbox: Mapping[str, Contribution], state: State) -> tuple[tuple[str, Contribution], ...]:
    """Return the contributions that the next commit may count, sorted by peer: not too many of peers that no commit has
    counted before."""
    left_out = set(sorted(inbox.keys() - state.counted.keys())[_room(state) :])
    return tuple((peer, contribution) for peer, contribution in sorted(inbox.items()) if peer not in left_out)


def bounded(plan: Plan, contributors: set[str], me: str, state: State) -> Plan:
    """Return the plan of this peer's next commit without the names that are too many. The later commits name them."""
    most = PLANNED_MAX if state.counted else COUNTED_MAX
    left_out = set(sorted(_strangers(plan, contributors | {me}, state))[most:])
    if not left_out:
        return plan
    group, succession = (tuple(p for p in names if p not in left_out) for names in (plan.group, plan.succession))
    return Plan(group, succession)


def _strangers(plan: Plan, known: set[str], state: State) -> set[str]:
    """Return the peers that the plan names, and neither the plan before it nor any commit."""
    return {*plan.group, *plan.succession} - {*state.plan.group, *state.plan.succession} - state.counted.keys() - known


def _room(state: State) -> int:
    """Return how many peers that no commit has counted before the next commit may count. The first commit of a run
    counts only such peers."""
    left = COUNTED_MAX - len(state.counted)
    return min(left, NEWCOMERS_MAX) if state.counted else left


def not_entitled(shard: int, sender: str, holder: str, term: int) -> Complaint:
    """Return the complaint that ``sender`` names a holder of a term that this holder may not hold."""
    return Complaint(sender, f"a claim to shard {shard} is refused: {holder} may not hold term {term}")


def latest_incarnation(counted: Mapping[str, ContributionId], own: int) -> int:
    """Return the highest incarnation that a contribution may have: not far beyond those that are ``counted`` and this
    peer's ``own``. After a contribution of a higher one was counted, no later one of its author might fit into a
    message."""
    return max([own, *(known.incarnation for known in counted.values())]) + AHEAD_MAX
