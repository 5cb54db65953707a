"""Which peer should aggregate which shard: weighted, balanced rendezvous hashing. The result is a proposal; a commit
decides."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

from .shares import filled, shares

_NOBODY: Mapping[str, float] = {}

Weighted = tuple[tuple[str, float], ...]
"""Peers with their bandwidths, in any order."""


def rank(key: str, members: Mapping[str, float]) -> list[str]:
    """Return the members by their score for ``key``, highest first. A member with twice another member's weight is
    first for twice as many keys.

    Removing a member never reorders the others (Thaler and Ravishankar 1998; weights after Schindelhauer and Schomaker
    2005: score = −weight / ln u).
    """
    return sorted(members, key=lambda peer: (-_score(key, peer, members[peer]), peer))


def assign(
    run: str, epoch: int, shards: Sequence[int], members: Mapping[str, float], group: Mapping[str, float] = _NOBODY
) -> dict[int, tuple[str, ...]]:
    """Return, for each shard, the members in their order of succession. No member is first in more shards than its
    share of all shards (see `shares`), rounded up.

    members: peer → bandwidth of the peers that may aggregate, in any unit, 0 where unknown. group: peer → bandwidth of
    all peers that contribute. Raises ValueError when there is no member.
    """
    if not members:
        raise ValueError("an election needs at least one member")
    links = filled({**group, **members})
    members = {peer: links[peer] for peer in members}
    parts = shares(links, members)
    room = {peer: math.ceil(len(shards) * share) for peer, share in parts.items()}
    plan = {}
    for shard in shards:
        order = rank(f"{run}/{epoch}/{shard}", members)
        first = next(peer for peer in order if room[peer] > 0)
        room[first] -= 1
        plan[shard] = (first, *without(order, first))
    return plan


@lru_cache(maxsize=32)  # the shards of a fragment ask with the same arguments
def assigned(
    run: str, epoch: int, shards: tuple[int, ...], members: Weighted, group: Weighted = ()
) -> Mapping[int, tuple[str, ...]]:
    """Return the result of `assign` for these arguments, from a cache if it is there."""
    return assign(run, epoch, shards, dict(members), dict(group))


def in_tiers(
    run: str,
    epoch: int,
    shards: tuple[int, ...],
    tiers: Iterable[Mapping[str, float]],
    group: Mapping[str, float] = _NOBODY,
) -> dict[int, tuple[str, ...]]:
    """Return, for each shard, the peers in their order of succession: the members of the first tier in the order of
    `assign`, then the members of each later tier. The order is empty if every tier is empty."""
    elections = [assigned(run, epoch, shards, tuple(tier.items()), tuple(group.items())) for tier in tiers if tier]
    return {shard: tuple(peer for election in elections for peer in election[shard]) for shard in shards}


def without(peers: Iterable[str], left_out: str) -> list[str]:
    """Return the peers without ``left_out``, in the same order."""
    return [peer for peer in peers if peer != left_out]


def _score(key: str, peer: str, weight: float) -> float:
    """Return a pseudo-random score that depends only on key, peer and weight."""
    drawn = int.from_bytes(blake2b(f"{key}\0{peer}".encode(), digest_size=8).digest(), "big")
    return -weight / math.log((drawn + 0.5) / 2**64)
