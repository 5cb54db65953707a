"""Live peers for which a round has waited too long, because they answer probes but do not do their part.

Law: functions on one shard's log; the log does not call them. A peer that does not commit or confirm is passed over for
one round, and for a while no plan that this peer writes lets that peer aggregate; it still contributes. A peer that
does not promise may know a greater claim, so it is not passed over: the round only goes on without its promise.
"""

from __future__ import annotations

from .events import Effect, Note
from .shard import ShardLog


def pass_over(log: ShardLog, now: float) -> list[Effect]:
    """Pass over live peers for which the round has waited too long. Called once per heartbeat interval, before `tick`
    of any shard. All waits of a round for the same peer are added up; a claim in between does not reset the sum."""
    most = {} if log.version is None or log.final or log.frozen else awaited(log)
    waited, step = log.round.awaited, log.rules.probe_every
    log.round.lasted += step
    log.lead.overdue = log.round.lasted + step >= log.rules.commits_within  # others may already pass this peer over
    waited |= {peer: waited.get(peer, -step) + step for peer in most}
    late = {peer for peer in most if waited[peer] >= most[peer]}
    nearly = {peer for peer in most if waited[peer] + log.rules.settle >= most[peer]}
    excused = set(log.unpromised())
    if log.lead.promised_by is not None:
        log.lead.promised_by |= late & excused
    log.lead.passed_over |= late - excused
    for peer in nearly - excused:  # early: the round ends once any peer passes this one over
        log.roster.passes_over(peer, now)
    names = ", ".join(sorted(late))
    text = f"shard {log.shard}: the round goes on without {names}, which answers probes but nothing else"
    return [*([Note("passed", text)] if late else []), *absent(log), *_believe(log, now)]


def _believe(log: ShardLog, now: float) -> list[Effect]:
    """Handle again the refusal in which the holder of the term named another peer, unless it has claimed since."""
    said, log.lead.disowned = log.lead.disowned, None
    return [] if said is None else log.outdated(*said, now)


def is_ahead(peer: str, log: ShardLog) -> None:
    """Handle the report of ``peer`` that it holds a newer version of this shard. This replica's own claim then waits
    for that version, because a commit would make a fork; but not without end, because the report may be false."""
    if peer not in log.lead.ahead:
        log.lead.ahead.add(peer)
        log.round.awaited.pop(peer, None)


def forgive_all_but(lost: str, log: ShardLog) -> None:
    """Handle the loss of a peer. Its claims may have kept other peers from doing their part. So the round counts the
    waits for the other peers from zero, and no longer passes over any of them. Each peer is forgiven once in a round:
    otherwise two peers that come and go in turns could delay the round without end."""
    lead, awaited = log.lead, log.round.awaited
    forgiven = {*lead.passed_over, *awaited} - {lost} - lead.forgiven
    lead.forgiven |= forgiven
    lead.passed_over -= forgiven
    log.round.awaited = {peer: waited for peer, waited in awaited.items() if peer not in forgiven}


def absent(log: ShardLog) -> list[Effect]:
    """Log each live worker that has missed several rounds in a row, once."""
    members, misses = log.roster.members, log.attendance.misses_often
    often = {peer for peer, member in members.items() if not member.missed and misses(peer)}
    missing = [peer for peer in log.roster.workers() if peer in often] if often else []
    for peer in missing:
        members[peer].missed = True
    times = log.rules.misses_max
    text = f"says that it works, and has missed {times} rounds in a row: rounds wait for it only briefly (noted once)"
    return [Note("missed", f"{peer} {text}") for peer in missing]


def awaited(log: ShardLog) -> dict[str, float]:
    """Return the live peers that the round can't do without, each with the longest time in seconds that the round waits
    for it: the peers that must hold this peer's proposal, the peers whose promise is missing, or the aggregator that
    has this peer's contribution. If this peer has no contribution of its own to send, but others sent it theirs because
    they believed that it aggregates, it waits for the aggregator, too."""
    rules, lead = log.rules, log.lead
    holders = [] if log.round.proposed is None else log.must_hold(log.round.proposed)
    found = dict.fromkeys(holders, rules.confirms_within)
    if lead.holder == log.me:
        # a peer that was lately passed over might delay every round by withholding its promise
        passed, shorter = log.roster.passed, min(rules.dead_after, rules.promises_within)
        promises = {p: shorter if passed(p) else rules.promises_within for p in log.unpromised()}
        return found | promises | {p: rules.answered_within for p in promises if p in lead.ahead}  # its state is coming
    _, holder = lead.target()  # not the known holder, if this peer has passed that one over
    sent = log.own.handed == holder if log.own.sendable(log.version) else bool(log.round.inbox)
    if not sent or holder in (log.me, *lead.passed_over) or len(log.roster.workers()) < log.needed:
        return found
    return found | {holder: rules.commits_within}
