"""Digests of tensors: compared beside all else, because a version never covers tensors.

Law: most decide. If more than half of all live holders, this peer included, tell one other digest for an epoch, this
peer's tensors are damaged, or its arithmetic is unlike. A tie changes nothing.
"""

from __future__ import annotations

from collections import Counter

from .events import Note
from .fragment import FragmentLog
from .messages import Links
from .state import hash_of

UNLIKE = 3
"""So many versions of which most others have other tensors are no accident."""
TOLD = 4
"""A Summary has the digests of so many epochs of each fragment."""


def record(log: FragmentLog, epoch: int, digests: tuple[str, ...]) -> None:
    """Record the digests of a version's slices as they are here."""
    log.digests[epoch] = digests
    for old in sorted(log.digests)[:-TOLD]:
        del log.digests[old]


def told(log: FragmentLog) -> Links:
    """Return what this peer's Summary tells."""
    return tuple((epoch, hash_of(digests)) for epoch, digests in sorted(log.digests.items()))


def majority(log: FragmentLog) -> list[str]:
    """Return the peers that tell one other digest than this peer has, if they are more than half of all live holders.
    The newest version decides of which so many tell one digest: of the newest one others may tell nothing yet."""
    for epoch in sorted(log.digests, reverse=True):
        tellers = {log.me: hash_of(log.digests[epoch])}
        for peer in log.roster.holders():
            summary = log.roster.summary(peer)
            told = dict(summary.digests[log.fragment]) if summary is not None and summary.digests else {}
            if epoch in told and log.is_here(peer):
                tellers[peer] = told[epoch]
        most, count = Counter(tellers.values()).most_common(1)[0]
        if 2 * count > len(log.roster.holders()) + 1:
            return [] if most == tellers[log.me] else [peer for peer, digest in tellers.items() if digest == most]
    return []


def unlike(log: FragmentLog, others: list[str]) -> list[Note]:
    """Say once that this machine is at fault, if others have had other tensors in several versions."""
    outvoted, version = log.roster.outvoted, (log.fragment, max(log.digests))
    if version in outvoted or len(outvoted) >= UNLIKE:
        return []
    outvoted.add(version)
    if len(outvoted) < UNLIKE:
        return []
    text = (
        f"this machine computes the outer step unlike the other peers ({', '.join(others)}), or its memory is faulty: "
        "it fetches their state after each round. outer_optimizer=sgd computes alike on all machines; test the memory"
    )
    return [Note("mismatch", text)]
