"""What a replica waits for and works on, as text and numbers for its user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .asynchronous import AsynchronousLog
from .revision import Revision
from .shard import ShardLog
from .state import steps_of

if TYPE_CHECKING:
    from .replica import Replica


def waiting(replica: Replica) -> str:
    """Return one sentence that says what the replica waits for; an empty string if it waits for nothing."""
    if not replica.has_state:
        return _waiting_for_a_state(replica)
    if replica.rules.asynchronous:
        logs = [replica.logs[shard] for shard in replica.own.flight or ()]
        mine = (log for log in logs if isinstance(log, AsynchronousLog) and log.own.mine is not None)
        return next(filter(None, (_waiting_for_an_answer(replica, log) for log in mine)), "")
    flight = replica.own.flight or {}
    open_ones = [replica.logs[shard] for shard, base in flight.items() if replica.logs[shard].version == base]
    led = (_waiting_as_aggregator(replica, log) for log in open_ones if log.lead.holder == replica.me)
    if text := next(filter(None, led), ""):
        return text
    return _waiting_for_commits(replica, open_ones) if open_ones else ""


def round_now(replica: Replica) -> tuple[int, int, int] | None:
    """Return (fragment, contributions received, contributions expected) of a round that the replica aggregates; None if
    no round that it aggregates has received a contribution."""
    for log in replica.logs:
        came = len(log.round.inbox)
        if came and log.lead.holder == replica.me:
            return log.fragment, came, max(came + len(log.waited_for()), log.needed)
    return None


def steps(replica: Replica) -> int:
    """Return how many inner steps a peer that always makes H has made up to the present state."""
    return sum(
        min(steps_of(replica.state(shard), replica.rules, fragment) for shard in shards)
        for fragment, shards in enumerate(replica.rules.fragments)
    )


def ended_by(replica: Replica) -> Revision:
    """Return the revision whose stop ended the run: of the shards' revisions, the highest whose stop the model has
    reached."""
    held, model = {replica.state(shard).revision for shard in range(len(replica.logs))}, replica.roster.mine.model
    return max((one for one in held if replica.rules.ended(model, one)), default=replica.revision)


def _waiting_for_a_state(replica: Replica) -> str:
    donors = ", ".join(replica.catchup.donors())
    if not donors:
        return "waiting for a peer that holds the state of the run"
    got = sum(version is not None for version in replica.versions)
    return f"fetching the state of the run from {donors}: {got} of {len(replica.logs)} shards"


def _waiting_for_an_answer(replica: Replica, log: AsynchronousLog) -> str:
    _, holder = log.lead.target()
    if holder != replica.me:
        return f"waiting for {holder} to answer a submission"
    if text := _waiting_for_promises(log):
        return text
    if missing := log.waited_for():
        return f"waiting for {', '.join(missing)} to hold a commit of shard {log.shard}"
    if (workers := len(log.workers())) < log.needed:
        return _waiting_for_peers(replica, log, workers, "are alive")
    return ""


def _waiting_for_promises(log: ShardLog) -> str:
    missing = ", ".join(sorted(log.unpromised()))
    return f"taking over shard {log.shard}, waiting for a promise of {missing}" if missing else ""


def _waiting_for_peers(replica: Replica, log: ShardLog, there: int, do: str) -> str:
    """Too few peers ``do`` what an outer step needs: which setting asks for more, and what lets the run go on. Only
    ``min_peers`` can be changed once the run is founded."""
    starts = log.needed > replica.rules.needed(log.revision_next, first=False)
    key, mend = ("start_peers", "") if starts else ("min_peers", f", or p2p-diloco set --min-peers {there}")
    return f"waiting for peers: {there} of {log.needed} ({key}) {do}; start more{mend}"


def _waiting_as_aggregator(replica: Replica, log: ShardLog) -> str:
    if text := _waiting_for_promises(log):
        return text
    if missing := log.waited_for():
        paused = (peer for peer in missing if (s := replica.roster.summary(peer)) is not None and s.paused)
        marks = dict.fromkeys(paused, " (paused)")
        return f"waiting for the contributions of {', '.join(peer + marks.get(peer, '') for peer in missing)}"
    if (came := len(log.round.inbox)) < log.needed:
        return _waiting_for_peers(replica, log, came, "have contributed")
    return ""


def _waiting_for_commits(replica: Replica, logs: list[ShardLog]) -> str:
    _, holder = logs[0].lead.target()
    if holder == replica.me:
        return f"making the commit of this round from the contributions; shards left: {len(logs)}"
    return f"waiting for a commit from {holder}; shards left: {len(logs)}"
