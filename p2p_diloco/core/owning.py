"""An owner's work: it collects slices, and computes the mean of each slice that it owns, for the leader that it has
promised to, and for nobody else.

Law: functions on one fragment's log. A mean needs no θ and no decision. The choice's key names it, not the attempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from . import claims
from .events import Average, Averaged, Complaint, Effect, Send
from .fragment import FragmentLog
from .messages import Choice, Close, Lack, Mean, Ready, Slice, Want
from .round import Phase


def closed(log: FragmentLog, sender: str, close: Close, now: float) -> list[Effect]:
    """Handle another peer's Close: serve it if its leader is the promised one, or would be promised now."""
    round = log.round
    if close.leader != sender:
        return [Complaint(sender, "its Close is another leader's")]
    if (close.term, sender) != (round.term, round.leader):
        if close.term:
            round.refused[sender] = close.term, math.inf
        if not claims.would_promise(log, sender, close.term, now):
            return [claims.vote(log, sender)]
        claims.yields(log, close.term, sender)
    if log.phase is Phase.APPLYING or (round.close is not None and close.rank < round.close.rank):
        return [claims.vote(log, sender)] if log.phase is Phase.APPLYING else []
    if round.close is None or close.rank > round.close.rank:
        round.closes(now)
    round.owners, round.attempt = close.owners, close.attempt
    if close.choice is None:
        return []
    round.close = close
    return compute(log)


def compute(log: FragmentLog) -> list[Effect]:
    """Begin the means that can be computed now."""
    round, close = log.round, log.round.close
    if close is None or close.choice is None or (close.term, close.leader) != (round.term, round.leader):
        return []
    effects: list[Effect] = []
    for number in owned(log, close):
        if (close.key, number) in round.computing or lacked(log, close.choice.entries, number):
            continue
        mine = round.means.get((close.key, number))
        if mine is not None and mine.owner == log.me:
            continue
        round.computing.add((close.key, number))
        round.served = close  # from here on this peer's votes tell this choice
        parts = ((ready.weight, round.slices[number, peer]) for peer, ready in close.choice.entries if ready.weight)
        effects.append(Average(log.fragment, close.base, close.key, number, tuple(parts), close.choice))
    return effects


def owned(log: FragmentLog, close: Close) -> list[int]:
    """Return the slices that a Close gives to this peer."""
    return [number for number, owner in enumerate(close.owners) if owner == log.me]


def lacked(log: FragmentLog, entries: Iterable[tuple[str, Ready]], number: int) -> tuple[str, ...]:
    """Return the authors whose slice with this number is not here, or is not the one that its author signed."""
    return tuple(p for p, ready in entries if ready.weight and not fits(ready, log.round.slices.get((number, p))))


def entry(log: FragmentLog, author: str) -> Ready | None:
    """Return what the closed round counts of this author; None: nothing, or it is not closed."""
    close = log.round.close
    return None if close is None or close.choice is None else dict(close.choice.entries).get(author)


def overdue(log: FragmentLog, choice: Choice, number: int, now: float) -> tuple[str, ...]:
    """Return those of the `lacked` from which nothing is on its way."""
    return tuple(peer for peer in lacked(log, choice.entries, number) if peer == log.me or not log.comes(peer, now))


def fits(ready: Ready | None, part: Slice | None) -> bool:
    """Whether this slice is there, and is the one that its author signed."""
    if ready is None or part is None or not ready.weight:
        return False
    return (part.id, part.hash) == (ready.id, ready.hashes[part.number])


def averaged(log: FragmentLog, done: Averaged, now: float) -> list[Effect]:
    """Handle a computed mean: send it to every live peer, to the leader first, so that the commit is not late."""
    round = log.round
    if (done.key, done.number) not in round.computing or done.base != log.version:
        return []
    round.computing.discard((done.key, done.number))
    mean = Mean(log.fragment, done.base, done.key, done.number, done.hash, log.me, done.payload, done.seal)
    round.means[done.key, done.number], round.moved_at = mean, now
    if log.rules.asynchronous:
        return []  # the commit is offered with its means to those that must hold it
    others = sorted(log.roster.alive(), key=lambda peer: (peer != round.leader, peer))
    return [Send(peer, mean) for peer in others]


def collect(log: FragmentLog, sender: str, part: Slice, now: float) -> list[Effect]:
    """Store a slice of a contribution, from its author or passed on by the leader. Once the round is closed, only those
    that were counted are progress, and no other takes the place of one; once a commit is known, none is, because means
    are lacking, not slices. Else an author could hold the round up."""
    round = log.round
    if sender not in (part.author, round.leader):
        return [Complaint(sender, "a slice came from neither its author nor the leader")]
    closed, ready = round.close is not None and round.close.choice is not None, entry(log, part.author)
    known = round.slices.get((part.number, part.author))
    is_new = known is None or (known.id, known.hash) != (part.id, part.hash)
    if known is None or (known.id <= part.id and not fits(ready, known)):
        round.slices[part.number, part.author] = part
    if closed and not fits(ready, part):
        return []
    round.moved_at = now if is_new and round.commit is None else round.moved_at
    return compute(log)


def answer(log: FragmentLog, sender: str, want: Want, now: float) -> list[Effect]:
    """Tell the leader which slices are missing here for the choice that it asks about; not those on their way."""
    close = log.round.close
    if close is None or close.choice is None or close.key != want.key:
        return []
    asked = [number for number in want.numbers if number in owned(log, close)]
    if not any(lacked(log, close.choice.entries, number) for number in asked):
        return []
    missing = ((number, overdue(log, close.choice, number, now)) for number in asked)
    found = tuple((number, authors) for number, authors in missing if authors)
    return [Send(sender, Lack(log.fragment, close.base, close.key, found))]
