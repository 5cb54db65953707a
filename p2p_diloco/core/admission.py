"""Which commits and contributions may count: judged by their author, term and numbers, without a look at their tensors.

Law: pure functions. The limits are so far below the capacity of a message that, after any accepted message, all numbers
and lists still fit into the next message.
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

AHEAD_MAX = 366 * 86_400_000 << SALT_BITS
"""An incarnation may be at most a year ahead of all known ones. It is the time at which a peer started: in a long run
all others may have started months ago, and a run may have been off for as long."""

COUNTED_MAX = 12_000
"""The most peers whose contributions a run counts. A shard's state lists them in its header; with 75 bytes for each
peer, the header still fits into a message."""

NEWCOMERS_MAX, PLANNED_MAX = 64, 16
"""Limits on unknown peers, which may be invented. NEWCOMERS_MAX: the most peers that one commit may count for the first
time; each takes room in the state for ever. PLANNED_MAX: the most peers in a commit's plan that neither this commit, an
earlier commit nor the previous plan contains; a round may wait for each of them until that peer is found dead."""


def objection(commit: Commit, state: State, lead: Leadership, rules: Rules) -> str:
    """Return why this commit can't follow the state; empty if it can. ``lead``: who may write the next commit."""
    if not lead.entitles(commit.aggregator, commit.term):
        return f"{commit.aggregator} may not write it under term {commit.term}"
    if commit.revision < state.revision:
        return "it would set the shard back to an earlier revision"
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
    """Return why no commit may count this contribution of a peer; empty if one may. ``state``: the shard's present
    state; None if this replica holds none."""
    counted = {} if state is None else state.counted
    latest = latest_incarnation(counted, lead.roster.mine.incarnation)
    incarnations = contribution.oldest <= contribution.id and contribution.id.incarnation <= latest
    revision = FOUNDED if state is None else state.revision
    if not incarnations or not rules.fits(contribution.weight, contribution.samples, revision):
        return "it has a number out of range"
    if misweighed(contribution, rules):
        return "the weight of a submission must be 1"
    if not rules.asynchronous and (why := misused(peer, contribution, state, rules)):
        return why
    full = peer not in counted and len(counted) >= COUNTED_MAX
    return f"the run has counted {COUNTED_MAX} peers, and counts no further one" if full else ""


def misweighed(what: Contribution | Counted, rules: Rules) -> bool:
    """Whether this is a submission in asynchronous mode that is not empty and whose weight is not 1. Such a submission
    is refused. It can't be counted with weight 1 instead: its author's seal covers the weight, so the commit would not
    match the seal."""
    return rules.asynchronous and not is_empty(what) and what.weight != 1.0


def misused(peer: str, what: Contribution | Counted, state: State | None, rules: Rules) -> str:
    """Return why the next commit may not count the data that a peer's contribution was made from; empty if it may."""
    if not any(use.used for use in what.uses) and (state is None or state.shard != rules.ledger):
        return ""
    if state is None or state.shard != rules.ledger:
        return "only a contribution to the ledger can say which data was used"
    return misuse(state.tables, peer, life_of(what.id.incarnation), what.uses)


def countable(inbox: Mapping[str, Contribution], state: State) -> tuple[tuple[str, Contribution], ...]:
    """Return the contributions that the next commit may count, sorted by peer. The number of those from new peers,
    which no commit has counted before, is limited."""
    left_out = set(sorted(inbox.keys() - state.counted.keys())[_room(state) :])
    return tuple((peer, contribution) for peer, contribution in sorted(inbox.items()) if peer not in left_out)


def bounded(plan: Plan, contributors: set[str], me: str, state: State) -> Plan:
    """Return ``plan``, the plan of this peer's next commit, without the unknown peers above the limit (PLANNED_MAX).
    Later commits name these peers."""
    most = PLANNED_MAX if state.counted else COUNTED_MAX
    left_out = set(sorted(_strangers(plan, contributors | {me}, state))[most:])
    if not left_out:
        return plan
    group, succession = (tuple(p for p in names if p not in left_out) for names in (plan.group, plan.succession))
    return Plan(group, succession)


def _strangers(plan: Plan, known: set[str], state: State) -> set[str]:
    """Return the peers of this plan that are not in ``known``, not in the previous plan, and not counted by any
    commit."""
    return {*plan.group, *plan.succession} - {*state.plan.group, *state.plan.succession} - state.counted.keys() - known


def _room(state: State) -> int:
    """Return how many new peers the next commit may count. A peer is new if no commit has counted it; in the first
    commit of a run all peers are new."""
    left = COUNTED_MAX - len(state.counted)
    return min(left, NEWCOMERS_MAX) if state.counted else left


def not_entitled(shard: int, sender: str, holder: str, term: int) -> Complaint:
    """Return the complaint about a message in which ``sender`` names ``holder`` as the holder of this term, although
    the plan does not let ``holder`` hold it."""
    return Complaint(sender, f"a claim to shard {shard} is refused: {holder} may not hold term {term}")


def latest_incarnation(counted: Mapping[str, ContributionId], own: int) -> int:
    """Return the highest incarnation that a contribution may have: at most AHEAD_MAX above all ``counted`` ones and
    this peer's ``own``. Without this limit one peer could use an incarnation so high that its next one fits into no
    message."""
    return max([own, *(known.incarnation for known in counted.values())]) + AHEAD_MAX
