"""What a replica waits for and works on, as text and numbers for its user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .asynchronous import AsynchronousLog
from .shard import ShardLog

if TYPE_CHECKING:
    from .replica import Replica


def waiting(replica: Replica) -> str:
    """Return one sentence that says what the replica waits for; an empty string if it waits for nothing."""
    if not replica.has_state:
        return _waiting_for_a_state(replica)
    if replica.rules.asynchronous:
        logs = [replica.logs[shard] for shard in replica.own.flight or ()]
        waits = (log.waiting() for log in logs if isinstance(log, AsynchronousLog) and log.own.mine is not None)
        return next(filter(None, waits), "")
    flight = replica.own.flight or {}
    open_ones = [replica.logs[shard] for shard, base in flight.items() if replica.logs[shard].version == base]
    mine = (_waiting_as_aggregator(replica, log) for log in open_ones if log.lead.holder == replica.me)
    if text := next(filter(None, mine), ""):
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


def _waiting_for_a_state(replica: Replica) -> str:
    donors = ", ".join(replica.catchup.donors())
    if not donors:
        return "waiting for a peer that holds the state of the run"
    got = sum(version is not None for version in replica.versions)
    return f"fetching the state of the run from {donors}: {got} of {len(replica.logs)} shards"


def _waiting_as_aggregator(replica: Replica, log: ShardLog) -> str:
    if unpromised := log.unpromised():
        return f"taking over shard {log.shard}, waiting for a promise of {', '.join(sorted(unpromised))}"
    if missing := log.waited_for():
        paused = (peer for peer in missing if (s := replica.roster.summary(peer)) is not None and s.paused)
        marks = dict.fromkeys(paused, " (paused)")
        return f"waiting for the contributions of {', '.join(peer + marks.get(peer, '') for peer in missing)}"
    if (came := len(log.round.inbox)) < log.needed:
        least = replica.rules.needed(log.revision_next, first=False)
        key = "start_peers" if log.needed > least else "min_peers"
        return f"waiting for peers: {came} of {log.needed} ({key}) have contributed"
    return ""


def _waiting_for_commits(replica: Replica, logs: list[ShardLog]) -> str:
    _, holder = logs[0].lead.target()
    return f"waiting for a commit from {holder}; shards left: {len(logs)}"
