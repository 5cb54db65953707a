"""What a replica waits for and works on, as text and numbers for its user."""

from __future__ import annotations

from . import claims, closing, holding
from .fragment import FragmentLog
from .replica import Replica
from .revision import Revision
from .round import Phase
from .state import steps_of


def steps(replica: Replica) -> int:
    """Return how many inner steps a peer that always makes H has made up to the present state."""
    return sum(steps_of(log.held, replica.rules) for log in replica.logs)


def ended_by(replica: Replica) -> Revision:
    """Return the revision whose stop ended the run: of the fragments' revisions, the highest whose stop the model has
    reached."""
    held, model = {log.held.revision for log in replica.logs}, replica.roster.mine.model
    return max((one for one in held if replica.rules.ended(model, one)), default=replica.revision)


def owned(replica: Replica) -> tuple[int, ...]:
    """Return the slices of the whole model whose next mean this peer computes, as far as it knows."""
    return tuple(
        index
        for log in replica.logs
        if log.state is not None
        for index, owner in zip(log.rules.fragments[log.fragment], log.round.owners, strict=True)
        if owner == replica.me
    )


def round_now(replica: Replica) -> tuple[int, int, int] | None:
    """Return (fragment, contributions received, contributions expected) of a round that the replica leads; None if no
    round that it leads has received a contribution."""
    for log in replica.logs:
        came = len(closing.weighted(log))
        if came and log.leads:
            missing = closing.waited_for(log, replica.now)
            return log.fragment, came, max(came + len(missing), closing.needed(log))
    return None


def waiting(replica: Replica) -> str:
    """Return one sentence that says what the replica waits for; an empty string if it waits for nothing."""
    if fetched := [log for log in replica.logs if log.state is None or log.phase is Phase.FETCHING]:
        return _waiting_for_a_state(replica, fetched)
    own = replica.own
    if not own.flying or own.fragment is None:
        return ""
    log = replica.logs[own.fragment]
    _, leader = claims.target(log)
    if leader == replica.me:
        return _waiting_as_leader(log, replica.now)
    if log.rules.asynchronous:
        return f"waiting for {leader} to answer a submission"
    if log.phase in (Phase.LACKING, Phase.APPLYING):
        owners = {owner for number, owner in enumerate(log.round.owners) if _lacks(log, number)}
        return f"waiting for the means of {', '.join(sorted(owners - {log.me}))}" if owners - {log.me} else ""
    summary = log.roster.summary(leader)
    late = () if summary is None else dict(summary.awaits).get(log.fragment, ())
    return f"waiting for a commit from {leader}" + (f", which waits for {', '.join(late)}" if late else "")


def _lacks(log: FragmentLog, number: int) -> bool:
    commit = log.round.commit
    return commit is not None and (commit.key, number) not in log.round.means


def _waiting_for_a_state(replica: Replica, fetched: list[FragmentLog]) -> str:
    fetches = [fetch for log in fetched if (fetch := replica.fetching.fetches.get(log.fragment)) is not None]
    donors = sorted({donor for fetch in fetches for donor in fetch.donors})
    if not donors and (asked := replica.roster.holders()):
        back = "who is back from a checkpoint first waits for others (restart_wait)"
        return f"asking for the state of the run; {back}: {', '.join(asked)}"
    if not donors:
        return "waiting for a peer that holds the state of the run"
    slices, got = sum(log.slices for log in replica.logs), sum(len(fetch.staged) for fetch in fetches)
    got += sum(log.slices for log in replica.logs if log not in fetched)
    since = "" if got < slices else ", and the means of the rounds since"
    if any(2 * len(fetch.staged) < fetch.most[0] for fetch in fetches):  # they were of versions that are over
        since = ", fewer than before: rounds are too short for this link"
    return f"fetching the state of the run, {got} of {slices} slices{since}, from {', '.join(donors)}"


def _waiting_as_leader(log: FragmentLog, now: float) -> str:
    if missing := claims.missing(log):
        return f"taking over fragment {log.fragment}, waiting for a promise of {', '.join(sorted(missing))}"
    if log.phase is Phase.HOLDING:
        lacking = ", ".join(holding.must_hold(log))
        return f"waiting for {lacking} to hold a commit of fragment {log.fragment}" if lacking else ""
    if log.phase is Phase.CLOSING and log.round.close is not None:
        means = log.means_of(log.round.close.key)
        owners = {owner for number, owner in enumerate(log.round.close.owners) if number not in means} - {log.me}
        return f"waiting for the means of {', '.join(sorted(owners))}" if owners else ""
    if not log.rules.asynchronous and (late := closing.waited_for(log, now)):
        paused = (peer for peer in late if (s := log.roster.summary(peer)) is not None and s.paused)
        marks = dict.fromkeys(paused, " (paused)")
        return f"waiting for the contributions of {', '.join(peer + marks.get(peer, '') for peer in late)}"
    there, do = len(closing.weighted(log)), "have contributed"
    if log.rules.asynchronous:
        there, do = sum(s.role == "worker" and bool(s.heads) for s in log.roster.summaries().values()), "are alive"
    return _waiting_for_peers(log, there, do) if there < closing.needed(log) else ""


def _waiting_for_peers(log: FragmentLog, there: int, do: str) -> str:
    """Too few peers ``do`` what an outer step needs: which setting asks for more, and what lets the run go on. Only
    ``min_peers`` can be changed once the run is founded."""
    needed = closing.needed(log)
    starts = needed > log.rules.needed(log.revision_next, first=False)
    key, mend = ("start_peers", "") if starts else ("min_peers", f", or p2p-diloco set --min-peers {there}")
    return f"waiting for peers: {there} of {needed} ({key}) {do}; start more{mend}"
