"""Which claim wins where several peers claim the right to write a commit, and when a peer claims again.

Law: the greater claim wins, with one exception: a peer that was passed over lately wins nothing from a peer that is
able. Otherwise a peer that never commits could take each round anew, and would delay each by `Rules.commits_within`. In
a round that lasts as long the exception ends: honest peers that have passed each other over would all hold the term.
None would have a quorum, or two of them would commit on one version.
"""

from __future__ import annotations

from .leadership import TERMS_AHEAD_MAX, Leadership
from .messages import Outdated


def wins(lead: Leadership, term: int, peer: str) -> bool:
    """Whether the claim of this peer wins against the known one, and the plan allows it."""
    barred = peer != lead.holder and lead.roster.passed(peer) and lead.able(lead.holder) and not lead.overdue
    return lead.rank(term, peer) >= lead.present and not barred and lead.entitles(peer, term)


def overruling(lead: Leadership, sender: str, refusal: Outdated) -> tuple[int, str] | None:
    """Return the claim that a refusal shows to hold, as (term, holder), if this peer takes the wrong peer for the
    holder of the term; else None. The refusal does so if it names a claim that wins against the known one. It also does
    so if the known holder sent it and names another peer, because that holder has forgotten its own claim. If that
    other peer may not hold the term because a candidate is back, the plan holds again: else two peers outside the plan
    could take each other for the holder without end."""
    if lead.state is None or refusal.base != lead.state.version:
        return None
    named = refusal.term, refusal.holder
    if sender == lead.holder != refusal.holder:
        candidates = lead.candidates()
        back = sender not in candidates and any(map(lead.able, candidates))
        return named if lead.entitles(refusal.holder, refusal.term) else (0, candidates[0]) if back else None
    greater = lead.rank(*named) > lead.rank(lead.term, lead.holder)
    return named if greater and wins(lead, *named) else None


def outbids(lead: Leadership, refusal: Outdated) -> bool:
    """Claim a higher term if this peer's claim was refused in favour of a peer that was passed over here. Return
    whether this peer does so. The peer that refused does not know yet that the other one never commits. Each peer is
    outbid once in a round, else two honest peers that have passed each other over would outbid each other for ever."""
    own = lead.promised_by is not None and lead.state is not None and refusal.base == lead.state.version
    higher = 0 < refusal.term - lead.term <= TERMS_AHEAD_MAX * (len(lead.candidates()) + 1)
    if not (own and higher and lead.roster.passed(refusal.holder)) or refusal.holder in lead.outbid:
        return False
    lead.outbid.add(refusal.holder)
    lead.term = refusal.term
    lead.claim(lead.next_term_of(lead.me))
    return True
