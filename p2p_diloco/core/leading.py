"""What the acting leader does: it collects contributions, closes the round with a choice, sees to it that every
slice gets its mean, and makes the commit.

Law: functions on one fragment's log; `closing` says when a round may close, `claims` who holds the term. All that the
leader chooses is in the choice; who computes which mean, and how often it tries, changes nothing in the next version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from . import applying, claims, closing, owning
from .admission import countable, is_counted, may_be_gone, unfit, unsound
from .events import Complaint, Effect, Note, Send
from .fragment import FragmentLog
from .messages import Choice, Close, Lack, Ready, Slice, Want, What
from .plan import may_own, owner_order
from .round import Phase
from .state import DEMOTED_FOR, append, commit_of, key_of

LEFT_OUT_TURNS, DOUBLINGS_MAX = 4, 3
"""A leader that has waited in vain for the slices of a newcomer's contribution leaves it out in so many of its next
turns; twice as many each further time, DOUBLINGS_MAX times at most."""


def collect(log: FragmentLog, sender: str, ready: Ready, now: float) -> list[Effect]:
    """Store a contribution. All peers store those that they get: the leader may change."""
    incarnation = log.roster.mine.incarnation
    if why := unfit(sender, ready, log.held, log.rules, incarnation):
        return [Complaint(sender, f"its contribution is refused: {why}")]
    known = log.round.readys.get(sender)
    if (known is not None and known.id >= ready.id) or is_counted(log.held, sender, ready):
        return []
    log.round.readys[sender] = ready
    closing.shows(log, sender, log.epoch)
    closing.open_round(log, now)
    return [] if log.leads or sender == log.me else [claims.vote(log, sender)]


def advance(log: FragmentLog, now: float) -> list[Effect]:
    """Close the round if this peer may, or go on with what is told by those that promised."""
    if log.phase is Phase.CLAIMING and claims.holds_term(log):
        log.round.phase = Phase.COLLECTING
        log.round.opened = None
        closing.open_round(log, now)
        if (told := claims.told_choice(log)) is not None:
            return close(log, told, now)
    if log.phase is not Phase.COLLECTING or not claims.holds_term(log):
        return []
    closing.open_round(log, now)
    return close(log, choose(log), now) if closing.may_close(log, now) else []


def choose(log: FragmentLog) -> Choice:
    """Return this peer's choice: all contributions that may be counted, and who is gone or late."""
    entries = countable(_delivered(log), log.held)
    names = [peer for peer, _ in entries]
    gone = tuple(sorted(peer for peer in may_be_gone(log.held, names) if _is_gone(log, peer)))
    late = tuple(sorted(peer for peer in log.late if peer in log.held.roll))
    return Choice(log.me, log.round.term, entries, gone, late, log.revision_next)


def _delivered(log: FragmentLog) -> Mapping[str, Ready]:
    """Return the contributions without those of newcomers that lately delivered no slices, or with the grant of one;
    all, if half of them or fewer would be left. Who was counted before stays: a link may be cut."""
    readys = log.round.readys
    kept, by_weight = dict(readys), len(closing.weighted(log))
    for peer, ready in readys.items():
        until = max(log.undelivered.get(who, (0, -1))[1] for who in (peer, ready.grant))
        if peer not in log.held.roll and until >= log.epoch:
            del kept[peer]
    left = sum(ready.weight > 0 for ready in kept.values())
    return kept if left >= max(closing.needed(log), 2, by_weight // 2 + 1) else readys


def _did_not_deliver(log: FragmentLog, who: str) -> None:
    """Record that a contribution's slices did not come."""
    times, turn = log.undelivered.get(who, (0, 0))[0], len(log.held.plan.succession)
    log.undelivered[who] = times + 1, log.epoch + turn * (LEFT_OUT_TURNS << min(times, DOUBLINGS_MAX))


def _is_gone(log: FragmentLog, peer: str) -> bool:
    return not log.roster.live(peer) and not log.roster.presumed(peer)


def close(log: FragmentLog, choice: Choice, now: float) -> list[Effect]:
    """Close the round with this choice: tell the owners, and if others than the plan's own slices now, the authors."""
    round = log.round
    if why := unsound(choice, log.held, log.rules):
        return [Note("choice", f"this peer can't close its round: {why}")]
    key = key_of(log.fragment, log.held.version, choice)
    if log.founding and round.attempt < 0:
        round.owners = append(log.held, choice, key, (), log.rules).plan.owners
    owners = _owners(log)
    again = round.close is not None and round.close.key == key
    round.closes(now)
    round.attempt += 1
    held = log.fragment, log.held.version, round.term, log.me, round.attempt, key
    round.close = Close(*held, choice, owners)
    round.phase, round.owners, round.asked = Phase.CLOSING, owners, {}
    round.lacks = round.lacks if again else {}
    round.moved_at, round.half_at = now, None
    effects: list[Effect] = [Send(peer, round.close) for peer in sorted(set(owners) - {log.me})]
    if owners != log.held.plan.owners or log.founding:
        authors = {peer for peer, _ in choice.entries} | set(round.readys)
        short = Close(*held, None, owners)
        effects += [Send(peer, short) for peer in sorted(authors - set(owners) - {log.me})]
    return effects + owning.compute(log) + commit(log)


def _owners(log: FragmentLog) -> tuple[str, ...]:
    """Return the owner of each slice now: the one before, or the next in the slice's own order that can be."""
    plan, round = log.held.plan, log.round
    able = may_own(log.held.roll, plan.succession, log.epoch)
    able = [peer for peer in able if _may_work(log, peer)] or [log.me]
    key = f"{log.rules.run}/{log.fragment}/{log.epoch}"
    return tuple(
        owner if _may_work(log, owner) else owner_order(key, number, able)[0]
        for number, owner in enumerate(round.owners)
    )


def _may_work(log: FragmentLog, peer: str) -> bool:
    if peer in log.round.excluded or not claims.able(log, peer):
        return False
    return not (log.roster.away(peer) or claims.serves_another(log, peer))


def commit(log: FragmentLog) -> list[Effect]:
    """Make the commit once every mean is here: send it to every live peer, also to those that fetch, and apply it."""
    round = log.round
    if log.phase is not Phase.CLOSING or round.close is None:
        return []
    means = {number: mean for number, mean in log.means_of(round.close.key).items() if applying.is_owned(log, mean)}
    if len(means) < log.slices or not claims.holds_term(log):
        return []
    ordered = tuple(means[number] for number in range(log.slices))
    hashes, owners = tuple(mean.hash for mean in ordered), tuple(mean.owner for mean in ordered)
    round.commit, round.phase = commit_of(log.held, round.close, hashes, owners, log.rules), Phase.LACKING
    return [*(Send(peer, round.commit) for peer in log.roster.alive()), *applying.apply(log)]


# -- while means are missing


def lacks(log: FragmentLog, sender: str, message: Lack, now: float) -> list[Effect]:
    """Handle an owner's answer: fetch the slices that it lacks from their authors and pass them on, so that a cut link
    between the two costs a detour only. An owner that lacks again what was passed on is replaced."""
    round = log.round
    if round.close is None or log.phase is not Phase.CLOSING or message.key != round.close.key:
        return []
    effects: list[Effect] = []
    if not message.missing:
        round.moving[sender] = now  # all that it lacks is on its way to it
    if message.missing or log.may_wait(now - 2 * log.grace()):
        round.asked.pop(sender, None)  # else it says for too long that all is on its way
    for number, authors in message.missing:
        if round.close.owners[number] != sender:
            continue
        for author in authors:
            since, passed_on = round.lacks.get((number, author), (now, False))
            if passed_on and now - since > log.rules.settle:
                round.excluded.add(sender)
            round.lacks.setdefault((number, author), (now, False))
            effects += _fetch(log, sender, number, author, now)
    return effects + (replace_owners(log, now) if sender in round.excluded else [])


def _fetch(log: FragmentLog, owner: str, number: int, author: str, now: float) -> list[Effect]:
    part = log.round.slices.get((number, author))
    if part is not None and owning.fits(owning.entry(log, author), part):
        since, passed_on = log.round.lacks[number, author]
        log.round.lacks[number, author] = (since if passed_on else now, True)
        return [Send(owner, part)]
    return [Send(author, Want(log.fragment, log.held.version, What.SLICES, (number,)))] if author != log.me else []


def pass_on(log: FragmentLog, part: Slice, now: float) -> list[Effect]:
    """Pass a slice on to its owner, if that one lacks it. Another one than its author signed would not help, and the
    owner that still lacks the right one would be blamed."""
    round, place = log.round, (part.number, part.author)
    if log.phase is not Phase.CLOSING or round.close is None or place not in round.lacks or round.lacks[place][1]:
        return []
    if not owning.fits(owning.entry(log, part.author), part):
        return []
    round.lacks[place] = (now, True)
    owner = round.close.owners[part.number]
    return [Send(owner, part)] if owner != log.me else []


def tick(log: FragmentLog, now: float) -> list[Effect]:
    """Ask for what is missing: contributions while the round is open, means once it is closed."""
    if log.phase is Phase.COLLECTING and claims.holds_term(log) and now >= log.round.asks_at:
        log.round.patience = min(2 * log.round.patience, log.rules.dead_after)
        log.round.asks_at = now + log.round.patience
        want = Want(log.fragment, log.held.version, What.READY)
        return [Send(peer, want) for peer in closing.to_ask(log, now) if peer != log.me]
    return _mend(log, now) if log.phase is Phase.CLOSING else []


def _mend(log: FragmentLog, now: float) -> list[Effect]:
    """Send the Close again where means are missing; ask what is overdue; go on without those that fail."""
    round, close_ = log.round, log.round.close
    assert close_ is not None
    assert close_.choice is not None
    means = {number: mean for number, mean in log.means_of(close_.key).items() if applying.is_owned(log, mean)}
    without = [number for number in range(log.slices) if number not in means]
    if any(not _may_work(log, close_.owners[number]) for number in without):
        return replace_owners(log, now)
    if failed := failed_authors(log, now):
        return leave_out(log, failed, now)
    owners = sorted({close_.owners[number] for number in without})
    effects: list[Effect] = [Send(owner, close_) for owner in owners if owner != log.me]
    if not overdue(log, now):
        return effects
    for owner in owners:
        numbers = tuple(number for number in without if close_.owners[number] == owner)
        if owner == log.me:
            missing = tuple((number, owning.overdue(log, close_.choice, number, now)) for number in numbers)
            effects += lacks(log, log.me, Lack(log.fragment, close_.base, close_.key, missing), now)
        elif owner not in round.asked:
            round.asked[owner] = now
            effects.append(Send(owner, Want(log.fragment, close_.base, What.LACKS, numbers, close_.key)))
        elif now - round.asked[owner] > log.grace() and not log.comes(owner, now):
            round.excluded.add(owner)
    return effects + (replace_owners(log, now) if round.excluded & set(owners) else [])


def overdue(log: FragmentLog, now: float) -> bool:
    """Whether a part of this round is overdue: nothing has moved for a grace since half of the means were there, or
    since the round closed; or an author is gone or on another lineage, so that waiting helps nothing."""
    assert log.round.close is not None
    assert log.round.close.choice is not None
    since = log.round.moved_at if log.round.half_at is None else max(log.round.half_at, log.round.moved_at)
    names = [peer for peer, _ in log.round.close.choice.entries if peer != log.me]
    return now - since >= log.grace() or any(_sends_no_more(log, peer) for peer in names)


def failed_authors(log: FragmentLog, now: float) -> set[str]:
    """Return the authors that don't deliver a slice which its owner lacks."""
    waiting = [(author, since) for (_, author), (since, passed_on) in log.round.lacks.items() if not passed_on]
    return {a for a, since in waiting if a != log.me and (_sends_no_more(log, a) or now - since > log.grace())}


def _sends_no_more(log: FragmentLog, author: str) -> bool:
    return log.roster.away(author) or not log.is_here(author)


def leave_out(log: FragmentLog, authors: Collection[str], now: float) -> list[Effect]:
    """Close again without these authors; if too few are left, collect again."""
    log.late |= {peer for peer in authors if log.roster.live(peer)}
    log.undelivered = {
        who: (times, until) for who, (times, until) in log.undelivered.items() if log.epoch <= until + DEMOTED_FOR
    }
    for peer in authors:
        ready = log.round.readys.pop(peer, None)
        if ready is not None and peer not in log.held.roll and not log.roster.away(peer):
            for who in {peer, ready.grant or peer}:
                _did_not_deliver(log, who)
    log.round.lacks = {}
    choice = choose(log)
    if unsound(choice, log.held, log.rules):
        log.round.phase, log.round.close = Phase.COLLECTING, None
        return []
    return close(log, choice, now)


def replace_owners(log: FragmentLog, now: float) -> list[Effect]:
    """Give the slices of owners that are gone or excluded to the next ones. The entries stay, so does the key, and so
    do the means that were made."""
    round = log.round
    assert round.close is not None
    assert round.close.choice is not None
    log.late |= {peer for peer in round.excluded if log.roster.live(peer)}
    return close(log, round.close.choice, now)
