"""Live peers for which a round has waited too long, because they answer probes but do not do their part.

Law: functions on one shard's log, which knows nothing of them. A peer is passed over for one round, and for a while no
plan of this peer lets it aggregate; it still contributes.
"""

from __future__ import annotations

from .events import Effect, Note
from .shard import ShardLog


def pass_over(log: ShardLog, now: float) -> list[Effect]:
    """Pass over live peers for which the round has waited too long. Called once per heartbeat interval, before `tick`
    of any shard."""
    most = {} if log.version is None or log.final or log.frozen else awaited(log)
    since = log.round.awaited = {peer: log.round.awaited.get(peer, now) for peer in most}
    late = [peer for peer, began in since.items() if now - began >= most[peer]]
    log.lead.passed_over.update(late)
    for peer in late:
        log.roster.passes_over(peer, now)
    text = f"shard {log.shard}: the round goes on without {', '.join(late)}, which answers probes but nothing else"
    return [Note("passed", text)] if late else []


def awaited(log: ShardLog) -> dict[str, float]:
    """Return the live peers that the round can't do without, each with the seconds that it waits at most: the peers
    that must hold this peer's proposal, the peers whose promise is missing, or the aggregator that has this peer's
    contribution."""
    rules, lead = log.rules, log.lead
    holders = [] if log.round.proposed is None else log.must_hold(log.round.proposed)
    found = dict.fromkeys(holders, rules.commits_within)
    if lead.holder == log.me:
        return found | dict.fromkeys(log.unpromised(), rules.promises_within)
    handed = log.own.handed == lead.holder and log.own.sendable(log.version)
    able = len(log.roster.workers()) >= log.needed
    return found | ({lead.holder: rules.commits_within} if handed and able else {})
