"""Says what is wrong with a run, one line for each fault, from one look at it.

Law: pure; a snapshot in, sentences out.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from p2p_diloco.node.status import SHARES, Death
from p2p_diloco.observe.snapshot import Snapshot, named

DEATHS_S = 300.0
"""For this many seconds a death is reported as a fault."""
STALL_S_LEAST = 30.0
"""Fewer seconds without a commit are never called a stall: records tell of commits some seconds late."""
REFUSED_MANY = 100
"""A peer that refuses this many messages of another peer is a fault. Fewer may be honest ones that came late."""
PARTS = SHARES[:-1]
"""The parts of a round that add up to its length."""


def faults(seen: Snapshot, stall_rounds: float) -> Iterator[str]:
    """Yield one line for each fault. `stall_rounds`: the run is stalled if no commit came for this many times the usual
    length of a round, and for STALL_S_LEAST."""
    ended = any(peer.state == "finished" for peer in seen.peers)
    if not seen.peers:
        yield f"no peers: the run {seen.run.run_id} has none, or this machine finds none of its records"
    if not ended:
        yield from _stall(seen, stall_rounds)
        yield from _deaths(seen)
    if (one := seen.run.compared) is not None and one.above:
        yield (
            f"loss above its baseline: {one.told} {one.loss:.4f} is {one.excess:.1%} above {one.baseline:.4f} "
            f"at {one.samples:,} samples (allowed: {one.bound:.1%})"
        )
    for peer in seen.peers:
        if peer.unsaved:
            yield f"save failed: {peer.name}: {peer.unsaved}"
        if peer.doubt:
            yield f"peer in doubt: {peer.name}: {peer.doubt}"
        for refused in peer.refused:
            if refused.count >= REFUSED_MANY:
                yield f"peer refused: {peer.name} refused {refused.count:,} messages of {refused.peer}: {refused.why}"


def _stall(seen: Snapshot, rounds: float) -> Iterator[str]:
    """Yield a line if the newest round that any peer reports ended too long ago. A run whose peers all pause, or of
    which no round is reported, is not stalled."""
    known = [peer.last_round for peer in seen.peers if peer.last_round is not None]
    if not known or all(peer.state == "paused" for peer in seen.peers):
        return
    usual_s = median(sum(getattr(one, part) for part in PARTS) for one in known)
    since_s = seen.time - max(one.ended for one in known)
    if since_s > max(STALL_S_LEAST, rounds * usual_s):
        told = [f"; {peer.name} is {peer.waits_for}" for peer in seen.peers if peer.waits_for]
        waits = min(told, key=lambda text: " for a commit from " in text, default="")  # the leader knows why none comes
        yield f"stalled: no commit for {since_s:.0f} s, where a round usually takes {usual_s:.0f} s{waits}"


def _deaths(seen: Snapshot) -> Iterator[str]:
    """Yield a line for each death that peers noticed in the last DEATHS_S seconds, or that the dead peer's own node
    tells, and for each silent peer."""
    told = dict[str, float]()
    for peer in seen.peers:
        own = {} if peer.state != "dead" else {Death(peer.time, named(peer), "trainer").text: peer.time}
        told = {**own, **told, **{death.text: death.time for death in peer.newest_deaths}}
    total = f"; since the run began: {seen.run.deaths.text}" if seen.run.deaths.count else ""
    for text, time in sorted(told.items(), key=lambda item: item[1]):
        if seen.time - time <= DEATHS_S:
            yield f"dead peer: {text} ({max(0.0, seen.time - time):.0f} s ago{total})"
    for peer in seen.peers:
        if seen.state(peer) == "silent":
            yield f"silent peer: {peer.name} has not told of itself for {seen.last_seen_s(peer):.0f} s"
