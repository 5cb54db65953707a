"""Restarts a run from the checkpoints of its peers. Each peer waits until the others are back. So the highest version
on any peer's disk wins, even if that peer starts late.

Law: only delays the trainer. The replica runs in the meantime, and adopts a higher version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

from p2p_diloco.core.replica import Replica

LOOK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class GoesOn:
    """Finds out whether the run is still going on, that is, whether a live peer trains according to its DHT record.

    `training` returns the peers that train according to their records, with the records' times. A record counts only
    once it has been renewed, because the first one found may be from before a power cut.
    """

    def __init__(self, replica: Replica, training: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        self._replica, self._training = replica, training
        self._first: dict[str, float] = {}

    async def look(self) -> bool:
        """Read the peers' DHT records again; returns whether a live peer trains."""
        told = (await self._training()).items()
        renewed = {peer for peer, when in told if self._first.setdefault(peer, when) != when}
        return bool(renewed & set(self._replica.roster.alive()))


async def until_the_others_are_back(
    replica: Replica,
    group: Collection[str],
    wait_s: float,
    goes_on: GoesOn,
    tell: Callable[[str], None],
) -> None:
    """Wait, for at most `wait_s`, until at least as many peers are live as were in `group` (the last round's averaging
    group), and no live peer lacks a state or holds a higher one than this peer. If the run is going on without this
    peer, return at once, unless a live peer's state is of a newer generation.

    `tell` is called with the reason for the wait; the text stays the same while the reason does.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + wait_s
    while (missing := _missing(replica, group)) and loop.time() < give_up_at and not replica.finished:
        if await goes_on.look() and not _outlived(replica):
            return
        tell(f"waiting for {missing}, for restart_wait={wait_s:g} s at most")
        await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, give_up_at - loop.time())))
    if missing and not replica.finished:
        log.warning("restart_wait=%g s have passed: going on without %s", wait_s, missing)


def _outlived(replica: Replica) -> bool:
    """Whether a live peer's state is of a newer generation than this peer's. Progress on this peer's state would be
    lost then."""
    summaries = replica.roster.summaries().values()
    return any(summary.model.generation > replica.roster.mine.model.generation for summary in summaries)


def _missing(replica: Replica, group: Collection[str]) -> str:
    """Name what this peer still waits for: peers that are not back, or else peers whose state is missing or higher than
    this peer's. Empty if there is nothing to wait for."""
    alive, mine = replica.roster.alive(), replica.roster.mine.model
    if (count := len(group) - 1 - len(alive)) > 0:
        gone = ", ".join(sorted(set(group) - {replica.me, *alive}))
        return f"{count} of the {len(group)} peers of the last round ({gone})"
    summaries = replica.roster.summaries().items()
    others = ", ".join(peer for peer, summary in summaries if summary.model > mine or not summary.epochs)
    return f"the state of {others}" if others else ""
