"""Which claim wins where several peers claim the right to write a commit, and when a peer claims again.

Law: the claim of higher rank wins (`Leadership.rank`), with one exception: a peer that was lately passed over never
wins against a holder that may aggregate. Otherwise a peer that never commits could claim each round, and delay each by
`Rules.commits_within`. In a round that has lasted that long the exception does not hold. Otherwise honest peers that
have passed each other over would each consider itself the holder, and none would have a quorum, or two would commit on
the same version. So a peer that this round has passed over can win a claim again, once (`gives_chance`); if it is
passed over again, it wins no further claim in this round.
"""

from __future__ import annotations

from .leadership import TERMS_AHEAD_MAX, Leadership
from .messages import Outdated


def wins(lead: Leadership, term: int, peer: str) -> bool:
    """Whether the plan allows this peer's claim, and the claim wins against the known one."""
    again = lead.overdue and not (peer in lead.passed_over and peer in lead.forgiven)
    barred = peer != lead.holder and lead.roster.passed(peer) and lead.able(lead.holder) and not again
    return lead.rank(term, peer) >= lead.present and not barred and lead.entitles(peer, term)


def gives_chance(lead: Leadership, holder: str) -> bool:
    """Let a new holder that this round has passed over aggregate after all; each peer gets this chance once in a round.
    Without the chance, this peer would send the holder no contribution, and claim the term from it again. Return
    whether the holder got the chance, so that the round's wait for it begins anew."""
    if holder not in lead.passed_over - lead.forgiven:
        return False
    lead.passed_over.discard(holder)
    lead.forgiven.add(holder)
    return True


def overruling(lead: Leadership, sender: str, refusal: Outdated, since: float) -> tuple[int, str] | None:
    """Return the claim, as (term, holder), that this peer must accept because of a refusal; None if there is none.

    If the known holder itself names another peer, it has forgotten its own claim, and this peer accepts what it says.
    But if the plan does not let the named peer hold the term, because a candidate is back, return the plan's first
    candidate with term 0: otherwise two peers outside the plan could each consider the other the holder without end. If
    the holder's claim arrived after the time ``since``, the refusal may be older than the claim, so it is only stored:
    a holder repeats its claim each heartbeat, but not if it has forgotten it.

    Any other refusal is accepted if it names a claim that wins against the known one and has a higher rank.
    """
    if lead.state is None or refusal.base != lead.state.version:
        return None
    named = refusal.term, refusal.holder
    if sender == lead.holder != refusal.holder:
        candidates = lead.candidates()
        if not lead.entitles(refusal.holder, refusal.term):
            back = sender not in candidates and any(map(lead.able, candidates))
            return (0, candidates[0]) if back else None
        if lead.claimed_at <= since:
            return named
        lead.disowned = sender, refusal  # handled again at the next heartbeat, unless the holder repeats its claim
        return None
    greater = lead.rank(*named) > lead.rank(lead.term, lead.holder)
    return named if greater and wins(lead, *named) else None


def unaware(lead: Leadership, sender: str, refusal: Outdated) -> bool:
    """Whether the sender of a refusal should aggregate next, but does not know it: the known holder is gone, and the
    refusal names a lesser claim than that holder's, which the sender has missed. Unless this peer tells the sender, the
    sender waits for the holder that it knows, and this peer waits for the sender."""
    known = lead.state is not None and refusal.base == lead.state.version
    lesser = lead.rank(refusal.term, refusal.holder) < lead.rank(lead.term, lead.holder)
    return known and lesser and sender == lead.target()[1] != lead.holder


def outbids(lead: Leadership, refusal: Outdated) -> bool:
    """Claim a higher term if this peer's claim was refused in favour of a peer that this peer has passed over: the
    refusing peer does not know yet that the peer which it names never commits. Return whether this peer has claimed.
    This peer outbids each other peer only once in a round; otherwise two honest peers that have passed each other over
    would outbid each other for ever."""
    own = lead.promised_by is not None and lead.state is not None and refusal.base == lead.state.version
    higher = 0 < refusal.term - lead.term <= TERMS_AHEAD_MAX * (len(lead.candidates()) + 1)
    if not (own and higher and lead.roster.passed(refusal.holder)) or refusal.holder in lead.outbid:
        return False
    lead.outbid.add(refusal.holder)
    lead.term = refusal.term
    lead.claim(lead.next_term_of(lead.me))
    return True
