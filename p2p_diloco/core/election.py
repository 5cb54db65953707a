"""Which peer should lead which fragment in asynchronous mode: balanced rendezvous hashing. The result is a proposal; a
commit decides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b


def rank(key: str, members: Iterable[str]) -> list[str]:
    """Return the members by their score for ``key``, highest first. Removing a member never reorders the others (Thaler
    and Ravishankar 1998)."""
    return sorted(members, key=lambda peer: (-_score(key, peer), peer))


@lru_cache(maxsize=32)  # each fragment asks with the same arguments
def assign(run: str, fragments: tuple[int, ...], members: tuple[str, ...]) -> Mapping[int, Sequence[str]]:
    """Return, for each fragment, the members in their order of succession. No member is first in more fragments than
    its equal part of all, rounded up."""
    room = dict.fromkeys(members, math.ceil(len(fragments) / max(1, len(members))))
    plan = {}
    for fragment in fragments:
        order = rank(f"{run}/0/{fragment}", members)
        first = [peer for peer in order if room[peer] > 0][:1]
        room |= {peer: room[peer] - 1 for peer in first}
        plan[fragment] = [*first, *(peer for peer in order if peer not in first)]
    return plan


def without(peers: Iterable[str], left_out: str) -> list[str]:
    """Return the peers without ``left_out``, in the same order."""
    return [peer for peer in peers if peer != left_out]


def _score(key: str, peer: str) -> int:
    """Return a pseudo-random score that depends only on key and peer."""
    return int.from_bytes(blake2b(f"{key}\0{peer}".encode(), digest_size=8).digest(), "big")
