"""What a commit of the ledger says of the data, and what it does to the tables.

Law: pure. Only one thing is a judgement of the commit's author: which peers are gone, by its roster. All else follows
from the contributions that the commit counts (`leases`), so every replica computes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .events import Contribute
from .leases import WEIGHT_MIN, Claim, Tables, after, holders, short
from .lives import life_of
from .messages import Commit, Contribution, Counted, State
from .roster import Roster
from .rules import Rules


def with_uses(mine: Contribution, event: Contribute, rules: Rules) -> Contribution:
    """Return the contribution ``mine`` with the data that it was made from, as in ``event``. In a contribution to
    another shard than the ledger, only the data sets are named."""
    named = event.uses if mine.shard == rules.ledger else tuple(replace(use, used=(), wants=0) for use in event.uses)
    return replace(mine, uses=named) if named else mine


def is_empty(what: Contribution | Counted) -> bool:
    """Whether a contribution is empty: in a run with data, its author has trained nothing since its last one."""
    return bool(what.uses) and what.weight <= WEIGHT_MIN


def weight_of(event: Contribute) -> float:
    """Return the weight of a submission: 1, unless it is empty in a run with data."""
    return WEIGHT_MIN if event.uses and event.weight <= WEIGHT_MIN else 1.0


def counted(peer: str, contribution: Contribution) -> Counted:
    """Return what a commit lists of a contribution."""
    return Counted(peer, contribution.id, contribution.weight, contribution.samples, contribution.uses)


def submissions(commit: Commit) -> int:
    """Return how many contributions a commit counts that are not empty."""
    return sum(not is_empty(one) for one in commit.contributions)


def tables_after(state: State, commit: Commit, rules: Rules) -> Tables:
    """Return the tables of the data after this commit; none in any shard but the ledger."""
    if state.shard != rules.ledger or not (state.tables or any(one.uses for one in commit.contributions)):
        return ()
    claims: list[Claim] = [(one.peer, life_of(one.id.incarnation), one.uses) for one in commit.contributions]
    recall = rules.recall * (max(1, len(holders(state.tables))) if rules.asynchronous else 1)
    return after(state.tables, claims, commit.gone, commit.version.epoch, recall)


def named(candidates: Iterable[str], state: State) -> tuple[str, ...]:
    """Return the peers that a state names: those that may write the next commit, and the holders of leases. So a lease
    holder that this peer has never met is presumed live until a probe fails."""
    return (*candidates, *sorted(holders(state.tables)))


def gone(state: State, roster: Roster) -> tuple[str, ...]:
    """Return the holders of leases that are dead, have left or are expelled; once all data is given out, also those
    whose trainer is idle."""
    if not state.tables:
        return ()
    ends = short(state.tables)
    return tuple(peer for peer in sorted(holders(state.tables)) if _is_gone(peer, roster, ends=ends))


def _is_gone(peer: str, roster: Roster, *, ends: bool) -> bool:
    if roster.presumed(peer):
        return False
    summary = roster.summary(peer)
    return summary is None or (ends and peer != roster.me and summary.idle)
