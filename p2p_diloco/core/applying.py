"""How a commit becomes the next state: whose commit is accepted, what is done while means are missing, and the step.

Law: functions on one fragment's log. A commit is accepted if its author is the promised leader, whoever passes it on;
if the promised leader sends it; if its author's claim would be promised now; or if most live holders tell its version.
A mean is used only if it has the hash that the commit names, and its owner's signature.
"""

from __future__ import annotations

from . import claims, closing, holding, leading
from .admission import objection
from .events import Accept, Applied, Apply, Complaint, Effect, Note, Send
from .fragment import FragmentLog
from .messages import Commit, Mean, Want, What
from .round import Phase
from .state import SAMPLES_TIMES, append, samples_of

KEPT_ASYNC = 4
"""In asynchronous mode this many of the last commits are kept, for submitters that are behind."""


def accepts(log: FragmentLog, sender: str, commit: Commit, now: float) -> bool:
    """Whether a commit on the present version may be applied here, judging by who made it and who sends it."""
    leader = log.round.leader
    if commit.version.chain in log.believed or sender == leader:
        return True
    if (commit.term, commit.leader) == (log.round.term, leader):
        return True
    if log.leads:  # of one base nobody makes two commits: a told one is completed
        return log.round.term > 0
    return claims.would_promise(log, commit.leader, commit.term, now)


def committed(log: FragmentLog, sender: str, commit: Commit, now: float) -> list[Effect]:
    """Handle a commit on the present version."""
    round = log.round
    known = round.commit
    if log.phase is Phase.APPLYING or (known is not None and known.version == commit.version):
        return []
    if commit.version.chain in round.void:
        return []
    if why := objection(commit, log.held, log.rules, round.readys.get(log.me), log.me):
        return [Complaint(sender, f"a commit of fragment {log.fragment} is refused: {why}")]
    if not accepts(log, sender, commit, now):
        round.commits[commit.leader] = commit
        if claims.able(log, round.leader) and round.leader != log.me:
            return [Send(round.leader, Want(log.fragment, log.held.version, What.COMMIT))]
        return []
    if known is not None and (known.term, known.leader) > (commit.term, commit.leader):
        return []
    return take(log, commit)


def take(log: FragmentLog, commit: Commit) -> list[Effect]:
    """Accept a commit: apply it once all its means are here."""
    log.round.commit, log.round.phase = commit, Phase.LACKING
    closing.shows(log, commit.leader, commit.version.epoch)
    effects: list[Effect] = []
    if log.leads:  # this peer completes another one's commit, so it passes it on
        effects += [Send(peer, commit) for peer in log.roster.alive()]
    return effects + apply(log)


def retake(log: FragmentLog, now: float) -> list[Effect]:
    """Look again at the commits that were not accepted: their authors' rivals may be gone."""
    if log.phase not in claims.FREE or log.round.commit is not None:
        return []
    for commit in list(log.round.commits.values()):
        if commit.version.chain not in log.round.void and accepts(log, commit.leader, commit, now):
            return take(log, commit)
    return []


def apply(log: FragmentLog) -> list[Effect]:
    """Take the step of the accepted commit if all its means are here."""
    commit = log.round.commit
    if log.phase is not Phase.LACKING or commit is None or missing(log):
        return []
    means = log.means_of(commit.key)
    log.round.phase = Phase.APPLYING
    ordered = tuple(means[number] for number in range(len(commit.hashes)))
    log.round.working = Apply(commit, ordered, log.held.buffered, len(log.held.plan.succession))
    return [log.round.working]


def missing(log: FragmentLog) -> list[int]:
    """Return the slices whose means the accepted commit needs and that are not here."""
    commit = log.round.commit
    if commit is None:
        return []
    means = log.means_of(commit.key)
    return [
        number
        for number, hash in enumerate(commit.hashes)
        if number not in means or means[number].hash != hash or not is_owned(log, means[number])
    ]


def got(log: FragmentLog, sender: str, mean: Mean, now: float) -> list[Effect]:
    """Store a mean. Whether its owner may have made it is judged when it is used: a new owner may be told later. Of a
    choice that is not known here only the newest mean of each owner is kept. It is no progress, nor is one that is here
    already, or not by its slice's owner: a member could send such ones without end."""
    may_own = mean.owner in log.held.roll or mean.owner in log.held.plan.succession or mean.owner == sender
    if not may_own:
        return [Complaint(sender, f"a mean of slice {mean.number} is by {mean.owner}, which is no member")]
    round = log.round
    known = round.means.get((mean.key, mean.number))
    commit = round.commit
    named = () if commit is None or commit.key != mean.key else commit.hashes[mean.number : mean.number + 1]
    wanted = mean.hash in named
    is_used = known is None or wanted or not is_owned(log, known)
    if is_used:
        round.means[mean.key, mean.number] = mean
    keys = {told.key for told in (round.close, round.served, round.commit) if told is not None}
    if mean.key not in keys:
        for key, number in list(round.means):
            same = number == mean.number and round.means[key, number].owner == mean.owner
            if same and key not in {*keys, mean.key}:
                del round.means[key, number]
        if keys:
            return []
    if is_used and mean != known and is_owned(log, mean):
        round.moved_at = now
    if round.half_at is None and 2 * len(log.means_of(mean.key)) >= log.slices:
        round.half_at = now
        if round.opened is not None:
            log.usual[0].append(now - round.opened - round.in_vain)
    return apply(log) if log.rules.asynchronous else leading.commit(log) + apply(log)


def is_owned(log: FragmentLog, mean: Mean) -> bool:
    """Whether the plan, a Close that is known here, or the accepted commit gives this slice to the mean's owner."""
    round = log.round
    closes = [round.close, round.served, *(vote.served for vote in round.votes.values())]
    lists = [log.held.plan.owners, round.owners, *(close.owners for close in closes if close is not None)]
    if round.commit is not None:
        lists.append(round.commit.owners)
    return any(owners[mean.number] == mean.owner for owners in lists)


def applied(log: FragmentLog, done: Applied, now: float) -> list[Effect]:
    """Handle the end of the step: the commit's state becomes the present one."""
    round, commit = log.round, log.round.commit
    if log.phase is not Phase.APPLYING or commit is None or round.working is None or commit.version != done.version:
        return []
    notes = [*closing.missed(log, commit.choice, now), *_trimmed(log, commit)]
    after = append(log.held, commit.choice, commit.key, commit.hashes, log.rules)
    kept = KEPT_ASYNC if log.rules.asynchronous else 1
    log.last = [*log.last, (commit, round.working.means)][-kept:]
    mine = any(peer == log.me for peer, _ in commit.choice.entries)
    if log.rules.asynchronous and mine and round.handed[0] and not log.leads:
        log.usual[0].append(now - round.handed[1])
    log.late -= set(commit.choice.late) if commit.choice.by == log.me else set()
    log.fresh, log.unproven = False, False
    tells = holding.holds(log, commit) if log.rules.asynchronous else []
    # whoever still fetches asks again within `settle`; to others a commit that doesn't name them is of no use
    tells += [Send(peer, commit) for peer, at in sorted(log.followers.items()) if now - at <= 2 * log.rules.settle]
    log.followers = {}
    log.begin(after, now)
    if log.rules.asynchronous:
        holding.carry_over(log, round)
        tells += holding.answers(log, commit)
    return [Accept(((log.fragment, commit.version),)), *notes, *tells]


def _trimmed(log: FragmentLog, commit: Commit) -> list[Effect]:
    """Log each peer of whose samples the commit counts only a part, once."""
    counted = samples_of(log.held, commit.choice)
    told = {peer: ready.samples for peer, ready in commit.choice.entries if peer in counted and peer != log.me}
    trimmed = [(peer, samples, counted[peer]) for peer, samples in told.items() if counted[peer] < samples]
    because = f"because this is {SAMPLES_TIMES} times the median (noted once)"
    return [
        Note("samples", f"the run counts {count} of {samples} samples that {peer} tells of a round, {because}")
        for peer, samples, count in trimmed
        if log.roster.is_new("samples", peer)
    ]


def tick(log: FragmentLog, now: float) -> list[Effect]:
    """Ask for the means that an accepted commit lacks; as a claimant, close anew once they can't be had. While one is
    coming nobody else is asked, because on a slow link the same mean would come from several."""
    round, commit = log.round, log.round.commit
    if log.phase is not Phase.LACKING or commit is None or now - round.moved_at < log.rules.settle:
        return []
    numbers = tuple(missing(log))
    waited = now - max(round.moved_at, round.began)
    completes = log.leads and claims.holds_term(log)  # then all that promised are asked, for a grace
    if completes and now - round.asked.setdefault(log.me, now) > log.grace():
        return _anew(log, now)
    if not completes and log.gains(now):
        return []
    sources = [commit.leader, *(commit.owners[number] for number in numbers), log.round.leader, *log.roster.holders()]
    sources = [p for p in dict.fromkeys(sources) if p != log.me and log.roster.live(p)]
    if not sources:
        return []
    turn = int(waited / log.rules.probe_every) % len(sources)
    want = Want(log.fragment, log.held.version, What.MEANS, numbers, commit.key)
    asked = sources if log.leads else list(dict.fromkeys((sources[0], sources[turn])))
    round.asked |= dict.fromkeys(asked, now)
    return [Send(peer, want) for peer in asked]


def _anew(log: FragmentLog, now: float) -> list[Effect]:
    """Collect anew: nobody has the means of a told commit. In synchronous mode the choice stays, if it is known, so
    that the version does."""
    told = None if log.rules.asynchronous else claims.told_choice(log)
    if log.round.commit is not None:
        log.round.void.add(log.round.commit.version.chain)
    log.round.phase, log.round.commit = Phase.COLLECTING, None
    return [] if told is None else leading.close(log, told, now)
