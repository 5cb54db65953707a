"""A run that has ended stays ended: a peer that starts afterwards takes its last state, and trains no further.

Law: an end binds a peer from its start until it trains. It never binds a peer that trains, so a false record can't end
a run that goes on. It delays the trainer, and ends a peer that gets the last state from no other peer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from p2p_diloco.core.replica import Replica
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.errors import GaveUpWaiting
from p2p_diloco.net.interface import Transport, Unreachable
from p2p_diloco.node import ends
from p2p_diloco.node.ends import End
from p2p_diloco.node.restart import GoesOn
from p2p_diloco.node.revising import Founding

LOOK_EVERY_S = 1.0
KEEP_EVERY_S = 60.0
SEEN_EVERY_S = 0.1
"""How often to look what this peer and the others hold."""

log = logging.getLogger(__name__)


class Ending:
    """What a peer knows of its run's end."""

    def __init__(
        self, transport: Transport, founding: Founding, replica: Replica, goes_on: GoesOn, folder: Path | None
    ) -> None:
        """`folder`: of this peer's checkpoints."""
        self._transport, self._founding, self._replica = transport, founding, replica
        self._goes_on, self._folder = goes_on, folder
        self._on_disk = None if folder is None else ends.load(folder, transport, founding, replica.rules)
        self.known = self._on_disk
        """The highest one; None: none, or the run goes on."""
        self._writing: asyncio.Future[None] | None = None
        self._stored: End | None = None
        self._ignored: End | None = None
        self._something = asyncio.Event()
        """Set once there is something to keep."""

    # -- a peer that starts

    async def begin(self, within_s: float) -> None:
        """Tell the others the end that is on this disk, before one of them sees this peer and trains on with it."""
        if self._on_disk is not None:
            await self._try(ends.store(self._transport, self._founding, self._on_disk), within_s)

    async def look(self) -> bool:
        """Whether the run has ended beyond what this peer holds, and no peer is seen to go on with it."""
        if self._replica.finished:
            return False
        self.known = max(filter(None, (self.known, await self._read())), default=None)
        if self.known is None or self._overtaken(self.known):
            return False
        if await self._goes_on.look():
            if self._ignored != self.known:
                log.warning("a record says that the run has ended at %s; it goes on: ignored", self._named(self.known))
            self._ignored, self.known = self.known, None  # and kept no longer
            return False
        self._something.set()
        return True

    async def until_it_may_train(self, wait_s: float, tell: Callable[[str], None]) -> None:
        """Return once this peer holds a state, and knows of no end beyond that. `tell` is given what is waited for.

        Raises:
            GaveUpWaiting: no peer handed over the last state in `wait_s`.
        """
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + wait_s
        while True:
            look_again_at = clock() + LOOK_EVERY_S
            if await self.look() and (end := self.known) is not None:
                if clock() >= give_up_at:
                    raise self._gave_up(end, wait_s)
                tell(f"the run has ended at {self._named(end)}: waiting for a peer that holds that state")
                await asyncio.sleep(LOOK_EVERY_S)
            elif self._replica.has_state:
                return
            while clock() < look_again_at and not self._replica.has_state:
                await asyncio.sleep(SEEN_EVERY_S)

    def _overtaken(self, end: End) -> bool:
        """Whether a peer here, this one included, holds more and is at no end: it is of a newer generation, say."""
        models = (summary.model for summary in self._replica.roster.summaries().values())
        return any(model > end.model and not self._replica.rules.ended(model) for model in models)

    async def _read(self) -> End | None:
        try:
            return await ends.read(self._transport, self._founding, self._replica.rules)
        except Unreachable as error:
            log.debug("no answer about the run's end: %s", error)
            return None

    def _gave_up(self, end: End, wait_s: float) -> GaveUpWaiting:
        mine = f"of epoch {self._replica.epoch}" if self._replica.has_state else "none"
        return GaveUpWaiting(
            f"is over: the run {self._founding.run_id} has ended at {self._named(end)}, this peer's state is {mine}, "
            "and no peer handed over the last one",
            key="wait_timeout",
            value=f"{wait_s:g}",
            mend=f"start a peer whose checkpoint_dir has checkpoint-{self._epoch(end)}, or go on from another with "
            "from_checkpoint and new_generation, or start the run with a greater stop_after_epochs",
        )

    def _named(self, end: End) -> str:
        return f"epoch {self._epoch(end)} (digest {end.model.digest}, signed by {end.signer})"

    def _epoch(self, end: End) -> int:
        return end.model.epochs // self._replica.rules.shards

    # -- a peer that has the end

    def settled(self) -> None:
        """Look whether the run has ended here; to be called after each event."""
        if self._replica.finished:
            self._something.set()

    async def keep(self) -> None:
        """Sign the end once it has come, and keep what is known of it in the DHT, until cancelled."""
        await self._something.wait()
        while True:
            await self._try(self._tell(), KEEP_EVERY_S)
            await asyncio.sleep(KEEP_EVERY_S)

    async def leave(self, within_s: float) -> None:
        """Tell it now, if that is still to be done."""
        if self._replica.finished and (self._stored is None or self._stored.model != self._mine):
            await self._try(self._tell(), within_s)

    async def _try(self, telling: Awaitable[object], within_s: float) -> None:
        """A failure is logged: the other peers keep the end as well."""
        try:
            await asyncio.wait_for(telling, within_s)
        except Exception:
            log.warning("the record of the run's end can't be kept", exc_info=True)

    async def _tell(self) -> None:
        if self._replica.finished:
            if self.known is None or self.known.model != self._mine:
                self.known = ends.signed(self._transport, self._founding, self._mine, time.time())
            if self._folder is not None and (self._on_disk is None or self._on_disk.model != self._mine):
                # only what this peer has held itself: a stranger's record doesn't outlive the DHT's
                await self._save(self._folder, self.known)
        if self.known is not None and await ends.store(self._transport, self._founding, self.known):
            self._stored = self.known

    async def _save(self, folder: Path, end: End) -> None:
        """Write it, and return once it is there, also if an earlier call was given up meanwhile."""
        if self._writing is None:
            self._writing = asyncio.get_running_loop().run_in_executor(None, ends.save, folder, end)
        await asyncio.shield(self._writing)
        self._writing, self._on_disk = None, end

    @property
    def _mine(self) -> ModelVersion:
        return self._replica.roster.mine.model


async def until_the_others_have_it(
    replica: Replica, group: Collection[str], wait_s: float, tell: Callable[[str], None]
) -> None:
    """A peer that comes back with the last state serves it: until as many peers as the last round's `group` had have
    been here and have it, or have left again, and none is here that lacks it; `wait_s` at most.
    """
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + wait_s
    while clock() < give_up_at:
        if replica.finished:
            through, lacking = _served(replica.roster)
            missing = len(group) - 1 - len(through)
            if not lacking and missing <= 0:
                return
            others = ", ".join(lacking) or f"{missing} of the {len(group)} peers of the last round"
            within = f"for restart_wait={wait_s:g} s at most"
            tell(f"the run has ended; waiting for {others} to take its last state, {within}")
        await asyncio.sleep(SEEN_EVERY_S)


def _served(roster: Roster) -> tuple[list[str], list[str]]:
    """The other peers that have this peer's state or have left, since a peer may leave before it says that it has it;
    and the peers that are here and lack it."""
    through, lacking = [], []
    for peer, member in sorted(roster.members.items()):
        if member.left is not None or (member.summary is not None and member.summary.model >= roster.mine.model):
            through.append(peer)
        elif member.live:
            lacking.append(peer)
    return through, lacking
