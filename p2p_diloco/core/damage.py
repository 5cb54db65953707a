"""A shard whose tensors no longer match its version: its round stops, and goes on once the tensors are repaired.

Law: functions on one shard's log; the log does not call them. `mending` decides how the tensors are repaired.
"""

from __future__ import annotations

from .events import Apply, Average, Effect
from .shard import ShardLog
from .version import Version


def found(log: ShardLog, base: Version, now: float) -> bool:
    """Record that the tensors do not match the version ``base``. Return True if this damage was not known before.

    Another peer may already hold this peer's proposal, so the Average that made the proposal is repeated after the
    repair. A commit that was being applied is applied after the repair.
    """
    round = log.round
    if base != log.version or round.damaged is not None or round.trusted or round.past_mending:
        return False
    round.damaged = now
    if isinstance(round.working, Average) and round.proposed is not None:
        round.proposed, round.interrupted = None, round.working
    elif isinstance(round.working, Apply):
        log.incoming.keep(round.told_by, round.working.commit)
    round.working = None
    return True


def give_up(log: ShardLog) -> None:
    """Leave the tensors damaged: no peer has better ones, and the run has ended."""
    log.round.damaged, log.round.past_mending = None, True


def mended(log: ShardLog, now: float, *, trusted: bool = False) -> list[Effect]:
    """Handle the end of a repair: the tensors match the version again, so repeat the Average that the damage
    interrupted.

    ``trusted``: the tensors still do not match, but no peer has sent better ones. This peer then writes the next
    commit, even if another peer has claimed the term, because any peer that could promise that term would have sent
    better tensors.
    """
    round = log.round
    average, round.interrupted = round.interrupted, None
    round.damaged = None
    if average is not None and log.lead.holder == log.me and not trusted:
        round.working = average
        return [average]
    round.trusted = trusted
    if trusted:
        log.lead.seize()
    effects = log.close(now)
    return effects if round.working is not None or trusted else effects + log.take_kept()
