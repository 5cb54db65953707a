"""Which claim wins where several peers claim the right to write a commit, and when a peer claims again.

Law: the greater claim wins, with one exception: a peer that was lately passed over never wins against a holder that may
aggregate. Otherwise a peer that never commits could claim each round, and delay each by `Rules.commits_within`. The
exception ends once a round has lasted that long. Otherwise honest peers that have passed each other over would each
take itself for the holder: none would have a quorum, or two would commit on one version. A peer that this round has
passed over gets its chance back by such a claim (`gives_chance`), and loses it for good when it is passed over
again.
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
    """Go on with a new holder that this round had passed over, once in a round. Otherwise this peer would send it no
    contribution, and claim the term from it again. Return whether the round waits for it anew."""
    if holder not in lead.passed_over - lead.forgiven:
        return False
    lead.passed_over.discard(holder)
    lead.forgiven.add(holder)
    return True


def overruling(lead: Leadership, sender: str, refusal: Outdated, since: float) -> tuple[int, str] | None:
    """Return the claim, as (term, holder), that this peer must accept because of a refusal; None if the refusal shows
    no error of this peer's. There are two such cases. In one, the refusal names a claim that wins against the known
    one, and another peer says so. In the other, the known holder itself names another peer: it has forgotten its own
    claim. If a candidate is back, so that the other peer may not hold the term, return the plan's first candidate with
    term 0: otherwise two peers outside the plan could take each other for the holder without end.

    If the holder's claim arrived after the time ``since``, the refusal may be older than the claim. Then it is only
    stored: a claimant repeats its claim each heartbeat, and one that has forgotten it does not."""
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
    """Whether the sender of a refusal, which names a lesser claim than the known one, should aggregate next: the known
    holder is gone, and the sender has missed its claim. Unless it is told, it waits for the holder that it knows, and
    this peer hands its contribution to nobody else."""
    known = lead.state is not None and refusal.base == lead.state.version
    lesser = lead.rank(refusal.term, refusal.holder) < lead.rank(lead.term, lead.holder)
    return known and lesser and sender == lead.target()[1] != lead.holder


def outbids(lead: Leadership, refusal: Outdated) -> bool:
    """Claim a higher term if this peer's claim was refused in favour of a peer that this peer has passed over: the
    refusing peer does not know yet that the other one never commits. Return whether this peer has claimed. It outbids
    each peer only once in a round; otherwise two honest peers that have passed each other over would outbid each other
    for ever."""
    own = lead.promised_by is not None and lead.state is not None and refusal.base == lead.state.version
    higher = 0 < refusal.term - lead.term <= TERMS_AHEAD_MAX * (len(lead.candidates()) + 1)
    if not (own and higher and lead.roster.passed(refusal.holder)) or refusal.holder in lead.outbid:
        return False
    lead.outbid.add(refusal.holder)
    lead.term = refusal.term
    lead.claim(lead.next_term_of(lead.me))
    return True
