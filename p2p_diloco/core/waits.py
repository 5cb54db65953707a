"""Live peers for which a round has waited too long, because they answer probes but do not do their part.

Law: functions on one fragment's log, called once per heartbeat interval. A peer that leads and does nothing is passed
over for this round, and named late in this peer's next choice. A peer that does not vote is only gone on without.
"""

from __future__ import annotations

from . import claims, closing, holding, owning
from .events import Effect, Note
from .fragment import FragmentLog
from .round import Phase

TURNS = 4
"""A peer that led and did nothing is promised nothing for so many graces, so that others can make the commit; twice as
long each further time in one round, TURNS times at most."""


def pass_over(log: FragmentLog, now: float) -> list[Effect]:
    """Add an interval to each wait, and go on without those for which it has lasted too long."""
    round, step = log.round, log.rules.probe_every
    most = {} if log.phase is Phase.FINAL else awaited(log, now)
    round.waited |= {peer: round.waited.get(peer, -step) + step for peer in most}
    claims_it = round.promised is not None and log.leads and log.phase is not Phase.HOLDING
    over = sorted(peer for peer, longest in most.items() if round.waited[peer] >= longest)
    over = [peer for peer in over if not claims_it or claims.spare(log, peer)]
    if not over:
        return []
    round.passed |= set(over)
    if not claims_it:
        log.late |= set(over)
        for peer in over if log.rules.asynchronous else ():
            log.roster.costs_a_deadline(peer, now)
        for peer in () if log.leads else over:
            times = round.idle.get(peer, (0, now))[0]
            round.idle[peer] = times + 1, now + TURNS * log.grace() * (1 << min(times, TURNS))
    text = (
        f"fragment {log.fragment}: the round goes on without {', '.join(over)}, which answers probes but nothing else"
    )
    return [Note("passed", text)]


def awaited(log: FragmentLog, now: float) -> dict[str, float]:
    """Return the live peers that the round can't do without, each with the longest wait for it."""
    round = log.round
    if log.leads:
        promises = log.rules.promises_within if log.rules.asynchronous else 2 * log.rules.settle
        held = holding.must_hold(log) if log.phase is Phase.HOLDING else []
        confirms = {p: log.grace() if holding.was_waited_for(log, p) else log.holds_within() for p in held}
        return confirms | dict.fromkeys(claims.missing(log), promises)
    leader, since = round.handed
    if leader != claims.target(log)[1] or not claims.able(log, leader):
        return {}
    if leader != round.leader and leader in round.heard and not claims.impatient(log, now):
        return {}  # it should claim, and holds to another peer, which may be gone for this peer alone
    moving = now - round.moved_at < log.grace() and log.phase is not Phase.COLLECTING
    few = len(closing.workers(log)) < closing.needed(log)
    if few or moving or (excuses(log, leader) and _has_time(log, since, now)):
        return {}
    grace = max(log.grace(), log.rules.promises_within) if log.rules.asynchronous else log.grace()
    times = 3 if log.phase is Phase.LACKING else 1  # a claimant first tries to have a told commit's means
    return {leader: times * grace + 2 * log.rules.probe_every}


def _has_time(log: FragmentLog, since: float, now: float) -> bool:
    most = log.holds_within() if log.rules.asynchronous else log.rules.round_timeout
    return now - since < most + log.grace()


def excuses(log: FragmentLog, leader: str) -> list[str]:
    """Return whom the leader says that it waits for, as far as this peer would wait for them itself: so a leader can't
    hide behind a peer that has long sent, nor behind its own trainer in round after round. A leader at an older version
    waits for parts of another round; in asynchronous mode, where it reaches each version last, that is no sign."""
    summary = log.roster.summary(leader)
    if summary is None:
        return []
    if not log.rules.asynchronous and summary.heads and summary.heads[log.fragment][0] < log.epoch:
        return []
    return [peer for peer in dict(summary.awaits).get(log.fragment, ()) if _would_wait(log, leader, peer)]


def _would_wait(log: FragmentLog, leader: str, peer: str) -> bool:
    round, summary = log.round, log.roster.summary(peer)
    if summary is None or (peer == leader and (log.rules.asynchronous or closing.misses_often(log, peer))):
        return False
    if log.rules.asynchronous:
        return peer != log.me
    close = round.close if round.close is not None and round.close.leader == leader else None
    if peer == log.me:
        owned = () if close is None else [(close.key, number) for number in owning.owned(log, close)]
        return any(at not in round.means or (leader, *at) not in round.delivered for at in owned)
    sent = bool(summary.sent) and summary.sent[log.fragment] >= log.epoch
    there = _numbers(log, None if close is None else close.key)
    owns = any(owner == peer and number not in there for number, owner in enumerate(round.owners))
    return (closing.works(log, peer, summary) and not sent) or (sent and owns)


def _numbers(log: FragmentLog, key: str | None) -> set[int]:
    return {number for of, number in log.round.means if key in (None, of)}


def awaits(log: FragmentLog, now: float) -> tuple[str, ...]:
    """Return whom this peer waits for as the acting leader, for its Summary."""
    if not log.leads:
        return ()
    if log.phase is Phase.HOLDING:
        found = set(holding.must_hold(log))
    elif log.phase is Phase.CLOSING and log.round.close is not None:
        means = log.means_of(log.round.close.key)
        found = {owner for number, owner in enumerate(log.round.close.owners) if number not in means}
    else:
        asked = [] if log.rules.asynchronous else closing.to_ask(log, now)
        found = {*asked, *claims.missing(log)}
    return tuple(sorted(found))[:8]


def watched(log: FragmentLog, now: float) -> set[str]:
    """Return the peers that are probed in each interval because this round waits for them."""
    if log.phase is Phase.FINAL:
        return set()
    leader = log.round.handed[0] and log.round.leader
    found = {leader, *excuses(log, leader), *claims.missing(log)}
    if log.round.readys:
        found |= set(awaits(log, now))
    return found - {log.me, ""}
