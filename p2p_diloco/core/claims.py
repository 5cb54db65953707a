"""Who may write the commit on a version: terms, claims and votes.

Law: functions on one fragment's log. Everybody has promised term 0 to the plan's leader. No promise is given while the
promised leader is able in the promiser's own view. A vote tells the choice for which its sender has begun a mean, and
the commit that it knows: whoever wins completes that one. So of one base nobody makes two commits. Claims and votes are
numbered, because messages overtake each other: an older one than was heard before says nothing.
"""

from __future__ import annotations

import math

from .admission import unsound
from .events import Effect, Note, Send
from .fragment import FragmentLog
from .messages import Choice, Claim, Probe, Vote
from .round import Phase

TURNS_AHEAD = 64
"""A claim may be this many turns of all candidates ahead of the known term."""
GRACES = 8
"""After `Rules.round_timeout` and this many graces any entitled claim is promised: two honest views could else block
each other for ever."""
WORKING = frozenset({Phase.CLOSING, Phase.HOLDING, Phase.APPLYING})
FREE = frozenset({Phase.COLLECTING, Phase.CLAIMING, Phase.LACKING})


# -- questions


def line(log: FragmentLog) -> tuple[str, ...]:
    """Return the candidates for leading this round, in order."""
    return log.held.plan.succession


def able(log: FragmentLog, peer: str) -> bool:
    """Whether the peer may lead: it holds a state of this lineage, or nothing is known of it yet, and this round has
    not passed it over."""
    if peer in log.round.passed:
        return False
    return peer == log.me or log.roster.presumed(peer) or (log.roster.holds_state(peer) and log.is_here(peer))


def entitled(log: FragmentLog, peer: str, term: int) -> bool:
    """Whether the plan lets the peer hold this term."""
    candidates = line(log)
    if term - log.round.term > TURNS_AHEAD * (len(candidates) + 1):
        return False
    if peer in candidates:
        return candidates[term % len(candidates)] == peer
    return not any(able(log, other) for other in candidates)


def rank(log: FragmentLog, term: int, peer: str) -> tuple[bool, int, str]:
    """Return the rank of a claim: a candidate's is greater than any other peer's."""
    return peer in line(log), term, peer


def present(log: FragmentLog) -> tuple[bool, int, str]:
    """Return the rank of the greatest promised claim. While no candidate is able, it is that of any peer."""
    candidate, term, leader = rank(log, log.round.term, log.round.leader)
    return candidate and any(able(log, peer) for peer in line(log)), term, leader


def target(log: FragmentLog) -> tuple[int, str]:
    """Return (term, peer): who should lead now. The leader while it is able; else the next candidate that is; if none
    is, the able peer with the lowest id."""
    term, candidates = log.round.term, line(log)
    if able(log, log.round.leader):
        return term, log.round.leader
    for later in range(term + 1, term + len(candidates) + 1):
        if able(log, candidates[later % len(candidates)]):
            return later, candidates[later % len(candidates)]
    others = [p for p in sorted([*log.roster.holders(), log.me]) if p not in candidates and able(log, p)]
    return (term + len(candidates) + 1, others[0]) if others else (term, log.round.leader)


def succeeds(log: FragmentLog, peer: str) -> bool:
    """Whether the peer should lead now in place of the promised leader, as far as is known here."""
    return peer == target(log)[1] != log.round.leader


def missing(log: FragmentLog) -> list[str]:
    """Return the peers whose promise this peer's claim still needs: live holders of a state of this lineage, and
    candidates that have not been met yet."""
    promised = log.round.promised
    if promised is None:
        return []
    live = [peer for peer in log.roster.holders() if log.is_here(peer)]
    unmet = [peer for peer in line(log) if log.roster.presumed(peer)]
    return [peer for peer in (*live, *unmet) if peer not in promised and peer not in log.round.passed]


def holds_term(log: FragmentLog) -> bool:
    """Whether this peer holds the term and has all promises that it needs."""
    return log.leads and not missing(log)


def spare(log: FragmentLog, peer: str) -> bool:
    """Whether a claim can do without a peer's promise, once that peer had its time: it has not answered at all, or
    it refuses and more than half of the live holders promised. So neither one view nor a lie stops the others."""
    promised = log.round.promised or set()
    others = log.roster.holders()
    return peer not in log.round.votes or 2 * (len(promised & set(others)) + 1) > len(others) + 1


def impatient(log: FragmentLog, now: float) -> bool:
    """Whether this round has lasted so long that any entitled claim is promised."""
    opened = log.round.began if log.round.opened is None else log.round.opened
    return now > opened + log.rules.round_timeout + GRACES * log.grace()


def _is_greater(log: FragmentLog, term: int, peer: str) -> bool:
    """Whether this claim is one that the plan allows, and greater than the greatest promised one."""
    return rank(log, term, peer) > present(log) and entitled(log, peer, term)


def would_promise(log: FragmentLog, peer: str, term: int, now: float) -> bool:
    """Whether this peer would promise such a claim now."""
    if not _is_greater(log, term, peer):
        return False
    if log.phase in WORKING and log.leads:
        return False
    if now < log.round.idle.get(peer, (0, now))[1]:
        return False  # it had its turn in this round, and did nothing: else it could claim again and again
    if log.leads and log.unproven:
        return True  # it was away: the others may have had to go on without it
    if peer == log.round.leader and log.rules.asynchronous:
        return True  # it was away, and claims anew
    return impatient(log, now) or log.phase is Phase.CLAIMING or not able(log, log.round.leader)


def vote(log: FragmentLog, to: str) -> Send:
    """Return this peer's vote."""
    round = log.round
    told = round.commit if log.phase in (Phase.LACKING, Phase.APPLYING) else None
    return Send(to, Vote(log.fragment, log.held.version, round.term, round.leader, round.served, told, log.turns))


# -- claiming


def advance(log: FragmentLog, now: float) -> list[Effect]:
    """Claim the term if it is this peer's turn. Give a promise that was refused, if it may be given now."""
    if log.phase not in FREE:
        return []
    if effects := promise(log, now):
        return effects
    term, peer = target(log)
    round, unproven = log.round, log.unproven and log.rules.asynchronous and not log.round.term
    if peer == log.me and log.leads and unproven:
        term = len(line(log))  # its own next turn: in asynchronous mode others may have gone on without it
    elif peer != log.me or log.leads:
        return []
    why = "does nothing" if round.leader in round.passed else "is gone"
    text = f"fragment {log.fragment}: this peer leads the round to epoch {log.epoch + 1}; {round.leader} {why}"
    note = [Note("takeover", text)] if round.leader != log.me else []
    _claim(log, term)
    return [*note, *announce(log)]


def _claim(log: FragmentLog, term: int) -> None:
    """Claim this term from now on, without any promise yet."""
    log.turns += 1
    log.round.term, log.round.leader, log.round.promised, log.round.votes = term, log.me, set(), {}
    if log.phase is Phase.COLLECTING:
        log.round.phase = Phase.CLAIMING


def announce(log: FragmentLog) -> list[Effect]:
    """Return this peer's claim, for every holder of a state. It is repeated while this peer holds the term, because a
    peer that reaches the version later does not know of it. One that has yielded says so instead: others may still
    hold to it."""
    if log.round.led and not log.leads:
        word = Vote(log.fragment, log.held.version, log.round.term, log.round.leader, turn=log.turns)
        return [Send(peer, word) for peer in log.roster.holders() if peer != log.round.leader]
    if not log.leads or not log.round.term:
        return []
    claim = Claim(log.fragment, log.held.version, log.round.term, log.turns)
    return [Send(peer, claim) for peer in log.roster.holders()]


def claimed(log: FragmentLog, sender: str, message: Claim, now: float) -> list[Effect]:
    """Handle another peer's claim: promise it, or refuse it and remember it."""
    round = log.round
    if _is_old(log, sender, message):
        return []
    if sender == round.leader and message.term == round.term:
        round.since = message.turn
        return [vote(log, sender)]
    if not _is_greater(log, message.term, sender):
        return [vote(log, sender)]
    round.refused[sender] = message.term, message.turn
    given = promise(log, now)
    if given or log.leads or not able(log, round.leader):
        return given or [vote(log, sender)]
    log.roster.probe(round.leader, now)  # either it answers, or it is found dead: then the promise follows
    return [vote(log, sender), Send(round.leader, Probe(log.roster.mine))]


def promise(log: FragmentLog, now: float) -> list[Effect]:
    """Promise the greatest of the claims that were refused, if one may be promised now."""
    due = [(term, peer) for peer, (term, _) in log.round.refused.items() if would_promise(log, peer, term, now)]
    if not due:
        return []
    yields(log, *max(due, key=lambda claim: rank(log, *claim)))
    return [vote(log, log.round.leader)]


def yields(log: FragmentLog, term: int, leader: str) -> None:
    """Accept another peer's claim. What this peer wanted to commit is void; what it made for it stays known by
    ``served``. A new leader has all its time before it. One that claims again has so once, because it was away; not
    each time."""
    round = log.round
    if leader != round.leader or leader not in round.idle:
        round.waited.pop(leader, None)
    if leader == round.leader:
        round.idle.setdefault(leader, (0, -math.inf))
    log.turns, round.led = log.turns + 1, round.led or log.leads
    round.term, round.leader, round.promised, round.votes = term, leader, None, {}
    told, number = round.refused.pop(leader, (term, math.inf))
    round.since = number if told == term else math.inf
    round.passed.discard(leader)
    if log.phase in (Phase.CLAIMING, Phase.CLOSING, Phase.HOLDING):
        round.phase, round.commit = Phase.COLLECTING, None


# -- votes


def voted(log: FragmentLog, sender: str, message: Vote) -> None:
    """Record a vote: a promise for this peer's claim, or a word for another leader."""
    round = log.round
    if _is_old(log, sender, message):
        return
    if log.leads and message.leader != log.me:
        _voted_for_another(log, sender, message)
    elif log.leads:
        if message.term == round.term and round.promised is not None:
            round.promised.add(sender)
            round.votes[sender] = message
        elif message.term == round.term:
            round.votes.pop(sender, None)  # it held to another one, and is back
    else:
        if sender == round.leader != message.leader and message.turn > round.since:
            round.passed.add(sender)  # it held the term, and now holds to another peer
            if message.leader == log.me and log.phase in FREE and _is_greater(log, message.term, log.me):
                _claim(log, message.term)  # each yielded to the other: the greater claim stands
        if message.leader != log.me:
            _remember(log, message)


def _is_old(log: FragmentLog, sender: str, message: Claim | Vote) -> bool:
    """Whether a newer claim or vote of the sender has been heard in this round. Else remember this one's number."""
    newest = log.round.heard.get(sender, 0)
    log.round.heard[sender] = max(newest, message.turn)
    return message.turn < newest


def _voted_for_another(log: FragmentLog, sender: str, message: Vote) -> None:
    """Record, as the leader, a vote for another one. Yield if that one can't be refused any longer."""
    round = log.round
    round.votes[sender] = message
    if round.promised is not None:
        round.promised.discard(sender)
    if (most := overtaken(log)) is not None:
        passed = most[1] in round.passed
        yields(log, *most)
        round.passed |= {most[1]} if passed else set()
    elif _gives_up(log, message):
        yields(log, message.term, message.leader)


def _gives_up(log: FragmentLog, vote: Vote) -> bool:
    """Whether this peer, as the leader, gives its claim up for that of the vote."""
    if _remember(log, vote):
        return (log.phase in FREE and bool(missing(log))) or _outvoted(log)
    return log.phase in (Phase.CLAIMING, Phase.COLLECTING) and bool(missing(log)) and _is_needless(log, vote)


def _remember(log: FragmentLog, message: Vote) -> bool:
    """Remember the claim that a vote is for, if it is a greater one that may be promised. Return whether it is."""
    term, leader = message.term, message.leader
    if not (_is_greater(log, term, leader) and able(log, leader)):
        return False
    if log.round.refused.get(leader, (None, 0))[0] != term:
        log.round.refused[leader] = term, math.inf
    return True


def overtaken(log: FragmentLog) -> tuple[int, str] | None:
    """Return the claim of a later term that most live holders of a state hold to: they will promise only a still later
    one, even if that peer is gone. Of several such claims, the middle one: one voter may lie."""
    others, votes = log.roster.holders(), log.round.votes
    told = sorted((votes[p].term, votes[p].leader) for p in others if p in votes and votes[p].term > log.round.term)
    if 2 * len(told) <= len(others):
        return None
    term, leader = told[(len(told) - 1) // 2]
    return min(term, log.round.term + TURNS_AHEAD * (len(line(log)) + 1)), leader


def _is_needless(log: FragmentLog, vote: Vote) -> bool:
    """Whether more than half of the live holders hold to a peer that this peer, too, sees able again: they will not
    promise its claim, under which it has closed nothing."""
    others, votes = log.roster.holders(), log.round.votes
    same = [p for p in others if p in votes and (votes[p].term, votes[p].leader) == (vote.term, vote.leader)]
    return 2 * len(same) > len(others) and able(log, vote.leader)


def _outvoted(log: FragmentLog) -> bool:
    """Whether more than half of the plan's owners vote for a greater claim: then nobody would serve this peer."""
    owners = set(log.held.plan.owners) - {log.me}
    return 2 * sum(serves_another(log, peer) for peer in owners) > len(owners)


def serves_another(log: FragmentLog, peer: str) -> bool:
    """Whether a peer has promised a greater claim of another: it computes no mean for this leader any more."""
    vote = log.round.votes.get(peer)
    return vote is not None and rank(log, vote.term, vote.leader) > present(log)


def told_choice(log: FragmentLog) -> Choice | None:
    """Return the choice of the greatest Close for which this peer, or one that promised, has begun a mean. A voter may
    lie, so only a sound one is completed."""
    told = [log.round.served, *(vote.served for vote in log.round.votes.values() if vote.leader == log.me)]
    closes = sorted((close for close in told if close is not None), key=lambda close: close.rank, reverse=True)
    choices = (close.choice for close in closes if close.choice is not None)
    return next((choice for choice in choices if not unsound(choice, log.held, log.rules)), None)


def forgotten_by(log: FragmentLog, peer: str) -> None:
    """Handle a peer's restart or loss: its votes and claims are void."""
    log.round.votes.pop(peer, None)
    log.round.refused.pop(peer, None)
    log.round.heard.pop(peer, None)
    if log.round.promised is not None:
        log.round.promised.discard(peer)
