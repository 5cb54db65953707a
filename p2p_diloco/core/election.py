"""Which peer should lead which fragment in asynchronous mode, and which ones hold it with that one: balanced rendezvous
hashing.

Law: pure functions. They propose the next plan to the author of a commit, and the commit decides. A leader stays
while it lives and no other peer is elected. An elected peer is made a successor first, so that it holds the state when
it takes over. A private peer is elected, or made a successor, only where there are too few reachable ones.
"""

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


def elected(
    run: str, fragments: tuple[int, ...], reachable: Sequence[str], private: Sequence[str] = ()
) -> Mapping[int, tuple[str, ...]]:
    """Return, for each fragment, the peers that should hold it, whatever its epoch: ``reachable`` peers first. The
    first one leads. All peers have equal parts: with measured links, each new measurement would move whole
    fragments."""
    first, then = (assign(run, fragments, tuple(members)) for members in (reachable, private))
    return {fragment: (*first[fragment], *then[fragment]) for fragment in fragments}


def may_stay(
    me: str, line: Sequence[str], reachable: Sequence[str], private: Sequence[str], room: int
) -> tuple[str, ...]:
    """Return the peers that may stay successors: all reachable peers. If these are fewer than ``room``, present private
    successors make up the number. ``room``: how many successors there should be."""
    free = max(0, room - len(without(reachable, me)))
    return (*reachable, *[peer for peer in without(line, me) if peer in private][:free])


def hands_over(me: str, order: Sequence[str], assigned_for: float, least: float) -> bool:
    """Whether this peer should hand a fragment over: another peer is elected, and the fragment has been with this peer
    for ``least`` seconds or more."""
    return order[0] != me and assigned_for >= least


def succession(
    me: str, line: Sequence[str], order: Sequence[str], able: Sequence[str], room: int, *, hand_over: bool
) -> tuple[str, ...]:
    """Return the succession that the next commit should name. First comes the leader: ``me``, unless the fragment
    is handed over. Then come the present successors that are in ``able``, then other peers in the order of the election
    (``order``). ``room``: how many successors there should be."""
    others, first = without(line, me), order[0]
    successors = [p for p in others if p in able][:room]
    if hand_over and first not in successors:
        successors = [*successors[: max(0, room - 1)], first]
    spare = [p for p in (*order, *others) if p not in (me, *successors)]
    found = [me, *successors, *dict.fromkeys(spare)][: 1 + max(room, len(successors))]
    if hand_over and (first in line or not room):
        found = [first, *without(found, first)][: 1 + room]
    return tuple(found)


def worth_a_commit(me: str, line: Sequence[str], then: Sequence[str]) -> bool:
    """Whether a commit should be made only in order to change the succession to ``then``, because that hands the
    fragment over or names a new peer."""
    return then[0] != me or not {*then} <= {me, *line}


def _score(key: str, peer: str) -> int:
    """Return a pseudo-random score that depends only on key and peer."""
    return int.from_bytes(blake2b(f"{key}\0{peer}".encode(), digest_size=8).digest(), "big")
