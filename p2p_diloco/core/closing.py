"""Whom a synchronous round waits for, how long, and when it may close.

Law: questions about one fragment's log; only `missed`, `shows` and `open_round` record something. A round waits until
its deadline for a worker known to hold the base, and only a usual round for one that missed two of its last eight
rounds, or that is costly because others of its grant did; for one that may still be fetching the base a usual round
too, doubled with each miss. One that missed all eight (if it is costly, two) is waited for in every fourth round alone:
else it could double each round for good. A newcomer, which came in the middle of the round, is not waited for, but
counts in the quorum.
"""

from __future__ import annotations

import math
from collections import deque

from . import claims
from .events import Effect, Note
from .fragment import FragmentLog
from .messages import Choice, Summary
from .round import Phase

ROUNDS_SEEN, MISSES_MAX, DOUBLINGS_MAX = 8, 2, 5
"""A peer that missed MISSES_MAX of its last ROUNDS_SEEN rounds is waited for only as long as a usual round takes. For
one that may still be fetching a state this doubles with each miss, DOUBLINGS_MAX times at most."""
TRIED_EVERY = 4
"""Every TRIED_EVERY-th round waits for a peer that missed all of them, as long as a usual round takes: it may be back.
"""


def shows(log: FragmentLog, peer: str, epoch: int) -> None:
    """Record that a message proves that the peer has reached this epoch."""
    log.shown[peer] = max(epoch, log.shown.get(peer, -1))


def missed(log: FragmentLog, choice: Choice, now: float) -> list[Effect]:
    """Record who of those waited for a closed round left out; if nobody, how long it took. Log each that misses
    several, once. In asynchronous mode nobody is waited for."""
    counted = {peer for peer, _ in choice.entries}
    if counted >= set(_expected(log)):
        log.usual[1].append(now - log.round.began)
    if log.rules.asynchronous:
        return []
    for peer in {*counted, *_expected(log)} - {log.me}:
        log.misses.setdefault(peer, deque(maxlen=ROUNDS_SEEN)).append(peer not in counted)
    log.misses = {peer: seen for peer, seen in log.misses.items() if peer in log.roster.peers}
    log.shown = {peer: epoch for peer, epoch in log.shown.items() if peer in log.roster.peers}
    often = [p for p in _expected(log) if p not in counted and misses_often(log, p)]
    for peer in often:
        log.roster.costs_a_deadline(peer, now)
    text = f"says that it works, and has missed {MISSES_MAX} rounds: they wait briefly for it (noted once)"
    return [Note("missed", f"{peer} {text}") for peer in often if log.roster.is_new("missed", peer)]


def works(log: FragmentLog, peer: str, summary: Summary) -> bool:
    """Whether the peer trains on a state of this lineage."""
    return summary.role == "worker" and bool(summary.heads) and not summary.idle and log.is_here(peer)


def evidence(log: FragmentLog, peer: str) -> int:
    """Return the highest epoch that the peer has reached, or has contributed to; -1: none is known."""
    member = log.held.roll.get(peer)
    return max(reached(log, peer), -1 if member is None else member.epoch)


def reached(log: FragmentLog, peer: str) -> int:
    """Return the highest epoch that the peer is known to hold."""
    summary = log.roster.summary(peer)
    said = summary.epochs[log.fragment] if summary is not None and summary.heads else -1
    return max(said, log.shown.get(peer, -1))


def all_hold(log: FragmentLog) -> bool:
    """Whether all whom the last commit counts, and all that are known to be in the run, hold what it has led to. A peer
    that was found dead may be back soon, and then asks for the commit's means."""
    counted = {peer for commit, _ in log.last[-1:] for peer, _ in commit.choice.entries}
    known = {peer for peer, record in log.roster.peers.items() if record.left is None and not record.expelled}
    return all(reached(log, peer) >= log.epoch for peer in {*counted, *known} - {log.me})


def workers(log: FragmentLog) -> list[str]:
    """Return the live peers that train on a state of this lineage."""
    return [peer for peer, summary in log.roster.summaries().items() if works(log, peer, summary)]


def is_newcomer(log: FragmentLog, peer: str) -> bool:
    """Whether the peer came in the middle of this round: it held this epoch already when it was first known, and has
    shown nothing since. What an earlier life of it did says nothing."""
    record, member = log.roster.peers.get(peer), log.held.roll.get(peer)
    if record is None or record.summary is None or not record.came or peer in log.shown:
        return False
    counted = member is not None and member.id.incarnation == record.summary.incarnation
    return record.came[log.fragment] >= log.epoch and not counted


def _expected(log: FragmentLog) -> list[str]:
    """Return the workers that this round waits for at first."""
    return [peer for peer in workers(log) if not is_newcomer(log, peer)]


def misses_often(log: FragmentLog, peer: str) -> bool:
    """Whether rounds no longer wait long for a peer, because it has missed several of the last ones."""
    return sum(log.misses.get(peer, ())) >= MISSES_MAX


def waits_until(log: FragmentLog, peer: str) -> float:
    """Return when the round gives a missing peer up; inf: it has not opened."""
    opened, usual, costly = log.round.opened, log.usual_round(), log.roster.is_costly(peer)
    if opened is None:
        return math.inf
    seen = log.misses.get(peer, deque())
    if all(seen) and len(seen) >= (MISSES_MAX if costly else ROUNDS_SEEN):
        return opened + (0.0 if log.epoch % TRIED_EVERY else usual)
    summary = log.roster.summary(peer)
    if log.round.term and summary is not None and summary.sent and summary.sent[log.fragment] >= log.epoch:
        return opened + log.grace()  # it says that its Ready is out: those that contribute wait no longer
    if evidence(log, peer) >= log.epoch:
        return opened + (usual if misses_often(log, peer) or costly else log.rules.round_timeout)
    return opened + min(log.rules.round_timeout, usual * (1 << min(sum(seen), DOUBLINGS_MAX)))


def waited_for(log: FragmentLog, now: float) -> list[str]:
    """Return the peers that the round waits for now."""
    return [p for p in _expected(log) if p not in log.round.readys and now < waits_until(log, p)]


def needed(log: FragmentLog) -> int:
    """Return how many contributions the next commit needs at least."""
    return log.rules.needed(log.revision_next, first=not log.epoch)


def weighted(log: FragmentLog) -> list[str]:
    """Return the peers whose contributions have come; not those that only aggregate."""
    return [peer for peer, ready in log.round.readys.items() if ready.weight > 0]


def quorum(log: FragmentLog, now: float) -> int:
    """Return with how many contributions the round may close: half of those that take part, but two if several do; of a
    pair one is enough only if a revision says so."""
    newcomers = [peer for peer in workers(log) if is_newcomer(log, peer)]
    part = len({*weighted(log), *waited_for(log, now), *newcomers})
    least = 1 if log.revision_next.min_peers == 1 else 2
    return max(needed(log), min(part, max(least, math.ceil(part / 2))))


def open_round(log: FragmentLog, now: float) -> None:
    """Let the waits begin once half of a quorum has contributed, and two where two are needed: one early contribution
    opens nothing."""
    least = quorum(log, now)
    if log.round.opened is None and len(weighted(log)) >= min(least, max(2, math.ceil(least / 2))):
        log.round.opened, log.round.in_vain = now, 0.0


def may_close(log: FragmentLog, now: float) -> bool:
    """Whether the round may close now."""
    return len(weighted(log)) >= quorum(log, now) and not waited_for(log, now)


def closes_at(log: FragmentLog) -> float:
    """Return when this peer will close the round if nothing arrives; inf: not by itself."""
    if log.phase is not Phase.COLLECTING or not claims.holds_term(log):
        return math.inf
    missing = [peer for peer in _expected(log) if peer not in log.round.readys]
    moments = sorted({waits_until(log, peer) for peer in missing} - {math.inf})
    return next((moment for moment in moments if may_close(log, moment)), math.inf)


def to_ask(log: FragmentLog, now: float) -> list[str]:
    """Return the peers to ask for their contributions."""
    missing = waited_for(log, now)
    if missing or len(weighted(log)) >= needed(log):
        return missing
    return [peer for peer in workers(log) if peer not in log.round.readys]
