"""Asynchronous mode: each submission, or a window of them, becomes a commit, shown once its named peers hold it.

Law: functions on one fragment's log. The leader owns all slices. A submission counts on any later version of its
lineage, as far as ``max_staleness`` allows, and goes over to the next round. Submitters are answered with commits that
the named peers hold, so what a submitter was told stays true if one peer then dies. The leader changes only by a commit
of its own or by a takeover.
"""

from __future__ import annotations

from . import applying, claims, closing, owning
from .admission import countable, is_counted, may_be_gone, unfit
from .events import Complaint, Effect, Send
from .fragment import FragmentLog
from .messages import Choice, Claim, Close, Commit, Held, Message, OfRound, Ready, Slice, Stale, Want, What
from .plan import elected, hands_over, may_stay, succession, worth_a_commit
from .round import Phase, Round
from .state import commit_of, key_of
from .version import Version

# -- submissions


def submitted(log: FragmentLog, sender: str, message: Ready | Slice, now: float) -> list[Effect]:
    """Store a part of a submission made on the present version or on an earlier one."""
    how = log.relation(message.base)
    if how == "ahead":
        log.keep(sender, message)
    if how not in ("equal", "ancestor"):
        return []
    if isinstance(message, Slice):
        if sender == message.author:
            log.round.slices[message.number, sender] = message
        return []
    return _ready(log, sender, message, now)


def _ready(log: FragmentLog, sender: str, ready: Ready, now: float) -> list[Effect]:
    """Handle a Ready: answer one that is counted or can't be, else store it."""
    if log.final or is_counted(log.held, sender, ready):
        return news(log, sender, ready.base)
    why = unfit(sender, ready, log.held, log.rules, log.roster.mine.incarnation)
    if is_stale(log, ready.base) or (why and ready.uses):
        refusal = Stale(log.fragment, ready.id, log.held.version)
        log.round.readys.pop(sender, None)
        return [*news(log, sender, ready.base), Send(sender, refusal)] if log.leads else []
    if why:
        return [Complaint(sender, f"its submission is refused: {why}")]
    known = log.round.readys.get(sender)
    if known is None or known.id < ready.id:
        log.round.readys[sender] = ready
        log.round.arrived[sender] = now
        closing.shows(log, sender, ready.base.epoch)
    misdirected = sender != log.me and claims.target(log)[1] != log.me
    return [*news(log, sender, ready.base), claims.vote(log, sender)] if misdirected else []


def is_stale(log: FragmentLog, base: Version) -> bool:
    """Whether a submission on this base is too far behind the present version."""
    most = log.rules.max_staleness
    return most is not None and log.epoch - base.epoch > most


def news(log: FragmentLog, peer: str, base: Version) -> list[Effect]:
    """Return the commits since this base with their means, as far as they are kept and the peer is not known to hold
    them: at least the newest, by which its receiver knows that the leader is ahead."""
    if peer == log.me or base == log.version:
        return []
    since = [place for place, (commit, _) in enumerate(log.last) if commit.base == base]
    newer = log.last[since[0] :] if since else log.last[-1:]
    lacked = [(commit, means) for commit, means in newer if commit.version.epoch > log.shown.get(peer, -1)]
    told: list[Effect] = []
    for commit, means in lacked:
        told += [Send(peer, commit), *(Send(peer, mean) for mean in means)]
    return told


def complete(log: FragmentLog) -> list[str]:
    """Return the peers whose submissions are whole here, the first that came first."""
    readys = log.round.readys
    lacking = {peer for number in range(log.slices) for peer in owning.lacked(log, readys.items(), number)}
    return sorted(readys.keys() - lacking, key=lambda peer: (log.round.arrived.get(peer, 0.0), peer))


def window(log: FragmentLog, now: float) -> list[str]:
    """Return whose submissions the next commit counts; none if it should wait. Without ``async_grace``: the first that
    came. Else all that came, until they fill the buffer, every working peer is there, or the grace is over; of many
    newcomers, those that one commit may count."""
    there, size, grace = complete(log), log.rules.dn_buffer_size, log.rules.async_grace
    if not there or not grace:
        return there[:1]
    room = size - log.held.buffered if size > 1 else len(there) + 1
    over = now >= log.round.arrived.get(there[0], now) + grace
    if not over and len(there) < room and not set(closing.workers(log)) <= set(there):
        return []
    return [peer for peer, _ in countable({peer: log.round.readys[peer] for peer in there[:room]}, log.held)]


def closes_at(log: FragmentLog) -> float:
    """Return when a window ends."""
    there = complete(log) if log.rules.async_grace and may_close(log) else []
    return log.round.arrived.get(there[0], 0.0) + log.rules.async_grace if there else float("inf")


# -- making a commit


def advance(log: FragmentLog, now: float) -> list[Effect]:
    """Begin a commit if this peer may and there is a reason; go on with the one that is under way."""
    round = log.round
    if log.phase is Phase.CLAIMING and claims.holds_term(log):
        round.phase = Phase.COLLECTING
    if log.phase is Phase.CLOSING:
        return _propose(log, now)
    if log.phase is Phase.HOLDING:
        return offer(log, now)
    if not may_close(log):
        return []
    counted, named = window(log, now), successors(log, now)
    if not counted and not worth_a_commit(log.me, _line(log), named):
        return []
    entries = tuple((peer, round.readys[peer]) for peer in sorted(counted))
    gone = tuple(sorted(peer for peer in may_be_gone(log.held, counted) if log.roster.away(peer)))
    choice = Choice(log.me, round.term, entries, gone, (), log.revision_next, named)
    round.attempt += 1
    key = key_of(log.fragment, log.held.version, choice)
    held = log.fragment, log.held.version, round.term, log.me, round.attempt, key
    round.close, round.phase = Close(*held, choice, (log.me,) * log.slices), Phase.CLOSING
    return owning.compute(log) if entries else _propose(log, now)


def may_close(log: FragmentLog) -> bool:
    """Whether this peer may begin a commit now, if there is something to commit."""
    workers = [p for p, s in log.roster.summaries().items() if s.role == "worker" and s.heads]
    free = log.phase is Phase.COLLECTING and claims.holds_term(log)
    return free and len(workers) >= closing.needed(log)


def _propose(log: FragmentLog, now: float) -> list[Effect]:
    """Make the commit once its means are computed, compute the own step, and offer it to those that must hold it."""
    round = log.round
    if round.close is None or round.close.choice is None:
        return []
    means = log.means_of(round.close.key)
    if round.close.choice.entries and len(means) < log.slices:
        return []
    ordered = tuple(means[number] for number in sorted(means))
    hashes = tuple(mean.hash for mean in ordered)
    round.commit = commit_of(log.held, round.close, hashes, round.close.owners, log.rules)
    round.phase, round.opened, round.holding, round.offered = Phase.HOLDING, now, set(), {}
    return offer(log, now)


def must_hold(log: FragmentLog) -> list[str]:
    """Return who must hold the proposal next: those that the present plan names, then those that only this commit
    names. So a newly named peer gets it only when everybody that may claim the term has it."""
    commit, plan = log.round.commit, log.held.plan
    assert commit is not None
    for named in (plan.succession[: plan.named], commit.choice.successors):
        lacking = [peer for peer in named if peer != log.me and peer not in (log.round.holding | log.round.passed)]
        lacking = [peer for peer in lacking if not log.roster.tells(peer, log.fragment, commit.version)]
        if could := [p for p in lacking if log.roster.holds_state(p) or log.roster.presumed(p)]:
            return could
    return []


def offer(log: FragmentLog, now: float) -> list[Effect]:
    """Send the proposal and its means to those that must hold it next, again after a while. Once all hold it, take its
    step: it is the present version then. If one of them went on without this peer, which stood still, nobody else is
    to take the step: this peer will be told the others' commit, or takes it now if nobody holds its own."""
    round = log.round
    assert round.commit is not None
    rivals = [round.commits[peer] for peer in _line(log) if peer in round.commits]
    rivals = [rival for rival in rivals if rival.term > round.term and rival.version.chain not in round.void]
    if rivals and not round.holding:
        return applying.take(log, max(rivals, key=lambda rival: (rival.term, rival.leader)))
    if not (lacking := must_hold(log)):
        if round.holding and round.opened is not None:
            log.usual[0].append(now - round.opened)
        round.phase = Phase.LACKING
        return applying.apply(log)
    told = [summary for peer in lacking if (summary := log.roster.summary(peer)) is not None and summary.heads]
    if any(summary.heads[log.fragment][0] > log.epoch for summary in told):
        return []
    due = [peer for peer in lacking if now >= round.offered.get(peer, now)]
    round.offered |= dict.fromkeys(due, now + log.rules.dead_after)
    offered: list[Message] = [*log.means_of(round.commit.key).values(), round.commit]
    return [Send(peer, what) for peer in due for what in offered]


def answers(log: FragmentLog, commit: Commit) -> list[Effect]:
    """Answer the submitters that the leader's own commit counts, now that it is the present version. If the commit
    hands over to another leader, answer those that it doesn't count, too: they submit to that one then."""
    if commit.leader != log.me:
        return []
    found = [*commit.choice.entries, *(() if log.leads else log.round.readys.items())]
    return [effect for peer, ready in found for effect in news(log, peer, ready.base)]


def held(log: FragmentLog, sender: str, message: Held, now: float) -> list[Effect]:
    """Handle a peer's word that it holds the proposal."""
    if log.phase is not Phase.HOLDING or log.round.commit is None or log.round.commit.version != message.version:
        return []
    log.round.holding.add(sender)
    closing.shows(log, sender, message.version.epoch)
    return offer(log, now)


# -- at the others


def holds(log: FragmentLog, commit: Commit) -> list[Effect]:
    """Tell the author of a commit that it is held here, if one of its plans names this peer."""
    held = Held(log.fragment, commit.version)
    return [Send(commit.leader, held)] if _is_named(log, commit) and commit.leader != log.me else []


def _is_named(log: FragmentLog, commit: Commit) -> bool:
    """Whether this peer is to hold the commit: the commit names it, or the present plan."""
    return log.me in (*commit.choice.successors, *_line(log))


def missed(log: FragmentLog, sender: str, message: OfRound, now: float) -> list[Effect]:
    """Handle a message on a version that is not reached here. Ask for the commits between, if the sender waits for this
    peer: it proposes a commit that this peer should hold, or it claims the term, and should lead in this peer's own
    view, too. If only means are lacking, they are on their way, or `applying.tick` asks for them: on a slow link nobody
    should send them twice."""
    named = isinstance(message, Commit) and _is_named(log, message)
    claims_it = isinstance(message, Claim) and claims.succeeds(log, sender)
    asked_lately = now - log.round.asked.get(sender, float("-inf")) < log.rules.settle
    if not (named or claims_it) or asked_lately or log.leads_to(message.base):
        return []
    log.round.asked[sender] = now
    return [Send(sender, Want(log.fragment, log.held.version, What.NEWS))]


def tick(log: FragmentLog, now: float) -> list[Effect]:
    """Ask for slices that don't come, offer again, and go on without those that were passed over."""
    if log.phase is Phase.HOLDING:
        return offer(log, now)
    if not log.leads or log.phase is not Phase.COLLECTING:
        return []
    there, effects = complete(log), list[Effect]()
    for peer, ready in sorted(log.round.readys.items()):
        if peer not in there and peer != log.me and now - log.round.arrived.get(peer, now) >= log.rules.settle:
            numbers = tuple(n for n in range(log.slices) if owning.lacked(log, [(peer, ready)], n))
            effects.append(Send(peer, Want(log.fragment, ready.base, What.SLICES, numbers)))
    return effects


# -- who holds the next version


def _line(log: FragmentLog) -> tuple[str, ...]:
    return log.held.plan.succession[: log.held.plan.named]


def successors(log: FragmentLog, now: float) -> tuple[str, ...]:
    """Return whom the next commit names: the leader, then its successors. Those that are there stay; another one leads
    once the election names it and this peer has led for a while. A peer that no commit has counted may be named if it
    is at the present version: else nobody else would hold the commits that a first peer makes alone. Who is too far
    behind is elected, and named later. Private peers, and those that were waited for in vain, are named only where
    there are too few others."""
    there = [peer for peer in log.roster.summaries() if log.roster.holds_state(peer) and log.is_here(peer)]
    known = {*log.held.roll, *_line(log)}
    names = [p for p in there if p in known or log.roster.tells(p, log.fragment, log.held.version)]
    able = sorted({*names, log.me} - log.round.passed)
    summaries = {peer: log.roster.summary(peer) for peer in able}
    last = [p for p, s in summaries.items() if (s is not None and not s.eligible) or was_waited_for(log, p)]
    first = [peer for peer in able if peer not in last]
    order = elected(log.rules.run, tuple(range(len(log.rules.fragments))), first, last)[log.fragment]
    log.assigned = now if log.assigned is None else log.assigned
    near = [peer for peer in order if _is_near(log, peer)]
    over = order[0] in near and hands_over(log.me, order, now - log.assigned, log.rules.assigned_for)
    first, last = ([peer for peer in peers if peer in near] for peers in (first, last))
    stay = may_stay(log.me, _line(log), first, last, log.rules.successors)
    return succession(log.me, _line(log), near, stay, log.rules.successors, hand_over=over)


def _is_near(log: FragmentLog, peer: str) -> bool:
    """Whether the peer may be named: the commits that are kept lead from what it holds, as far as is known, to the
    present version. All commits would wait for one that is further behind, until it has fetched the state."""
    return peer in (log.me, *_line(log)) or log.epoch - closing.reached(log, peer) <= applying.KEPT_ASYNC


def was_waited_for(log: FragmentLog, peer: str) -> bool:
    """Whether others have lately waited in vain for this peer, or for others of its invitation. It may mean no harm,
    but while it leads, or has to hold each commit, it can keep all others waiting each time."""
    return log.roster.has_cost(peer) or log.roster.is_costly(peer)


def carry_over(log: FragmentLog, before: Round) -> None:
    """Take the submissions that the new version does not count over to its round, if a commit on it may count them:
    one may be too old now, or the data that it used went to others. Its author sends it again, and is told."""
    log.round.handed = before.handed
    for peer, ready in before.readys.items():
        late = is_stale(log, ready.base) or unfit(peer, ready, log.held, log.rules)
        if not (late or is_counted(log.held, peer, ready)) and log.relation(ready.base) in ("equal", "ancestor"):
            log.round.readys[peer], log.round.arrived[peer] = ready, before.arrived.get(peer, 0.0)
    roll = log.held.roll
    log.round.slices |= {
        place: part for place, part in before.slices.items() if place[1] not in roll or roll[place[1]].id < part.id
    }
    log.assigned = log.assigned if log.leads else None
