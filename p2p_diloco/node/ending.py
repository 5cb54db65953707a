"""Keeps an ended run ended. A peer that starts after the end fetches the run's last state, and doesn't train.

Law: the record of an end binds a peer only from its start until it trains. It never binds a peer that trains, so a
false record can't end a run that goes on. It binds a peer that has a state to go on from only if peers that this
state knows have signed it (`Ending._confirmed`); else it is a rumour, which is logged. A bound peer's trainer waits for
the last state, and the peer ends with an error if no other peer hands it over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from p2p_diloco.core.replica import Replica
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.version import ModelVersion
from p2p_diloco.errors import GaveUpWaiting
from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Transport, Unreachable
from p2p_diloco.node import ends
from p2p_diloco.node.ends import End
from p2p_diloco.node.restart import GoesOn
from p2p_diloco.node.revising import Founding

LOOK_EVERY_S = 1.0
KEEP_EVERY_S = 60.0
SEEN_EVERY_S = 0.1
"""Seconds between two checks of which peers hold the last state."""
SIGNERS_MAX = 8
"""So many peers of the last round that have signed an end are enough, however many there were."""

log = logging.getLogger(__name__)


class Ending:
    """Holds what this peer knows about the end of its run, and keeps a record of that end in the DHT."""

    def __init__(
        self,
        transport: Transport,
        founding: Founding,
        replica: Replica,
        goes_on: GoesOn,
        folder: Path | None,
        group: Collection[str] = (),
    ) -> None:
        """`folder` holds this peer's checkpoints; None if it writes none. `group`: the peers that the checkpoint names
        from which this peer goes on; empty if there is none."""
        self._group = frozenset(group)
        self._trusted = {transport.peer_id, founding.founder}
        self._transport, self._founding, self._replica = transport, founding, replica
        self._goes_on, self._folder = goes_on, folder
        self._on_disk = None if folder is None else ends.load(folder, transport, founding, replica.rules)
        self.known = self._on_disk
        """The highest end known; None: no end is known, or the run goes on."""
        self._writing: asyncio.Future[None] | None = None
        self._stored: End | None = None
        self._ignored: End | None = None
        self._rumour: End | None = None
        """The highest end of which it was logged that it is a rumour."""
        self._something = asyncio.Event()
        """Set once there is an end to keep in the DHT."""

    # -- a peer that starts

    async def begin(self, within_s: float) -> None:
        """If this peer's disk says that the run has ended, publish the end in the DHT. Called before other peers see
        this peer: otherwise they would go on training with it."""
        if self._on_disk is not None:
            await self._try(ends.store(self._transport, self._founding, self._on_disk), within_s)

    async def look(self) -> bool:
        """Look for the run's end in the DHT; returns whether the run has ended with a state that this peer lacks. If
        another peer is seen to go on with the run, the run has not ended."""
        if self._replica.finished:
            return False
        self.known = max(filter(None, (self.known, await self._read())), default=None)
        if self.known is None or self._overtaken(self.known):
            return False
        if await self._goes_on.look():
            if self._ignored != self.known:
                log.warning(
                    "ignored a record which says that the run has ended at %s, because another peer still trains in it",
                    self.known,
                )
            self._ignored, self.known = self.known, None  # this peer no longer renews it in the DHT
            return False
        self._something.set()
        return True

    async def until_it_may_train(self, wait_s: float, patience_s: float, tell: Callable[[str], None]) -> None:
        """Wait until this peer holds a state, and knows of no end of the run after that state. `tell` is called with
        the reason for the wait. `patience_s`: how long a peer without a state looks for others.

        Raises:
            GaveUpWaiting: no peer handed over the last state within `wait_s`.
            Refused: this peer has no state, and no other peer has been there for `patience_s`.
        """
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + wait_s
        alone_since: float | None = None
        while True:
            look_again_at = clock() + LOOK_EVERY_S
            if await self.look() and (end := self.known) is not None:
                if clock() >= give_up_at:
                    raise self._gave_up(end, wait_s)
                if alone_since is None or self._replica.roster.alive():
                    alone_since = clock()
                if not self._replica.has_state and clock() - alone_since >= patience_s:
                    raise ends.ended(self._founding.run_id, end)
                tell(f"the run has ended at {end}: waiting for a peer that holds that state")
                await asyncio.sleep(LOOK_EVERY_S)
            elif self._replica.has_state:
                return
            while clock() < look_again_at and not self._replica.has_state:
                await asyncio.sleep(SEEN_EVERY_S)

    def _overtaken(self, end: End) -> bool:
        """Whether this peer or another live peer holds a state that is higher than this end's and doesn't end the run.
        For example, the state may be of a newer generation."""
        models = (summary.model for summary in self._replica.roster.summaries().values())
        return any(model > end.model and not self._replica.rules.ended(model, end.revision) for model in models)

    async def _read(self) -> End | None:
        """Read the highest end in the DHT that binds this peer; None if there is none. Log a higher rumour, once."""
        of = self._transport, self._founding, self._replica.rules
        try:
            found = await ends.read(*of, self._trusted | self._group)
        except Unreachable as error:
            log.debug("the DHT gave no answer about the run's end: %s", error)
            return None
        confirmed = next((end for end in found if self._confirmed(end, found)), None)
        if found and found[0] != confirmed and (self._rumour is None or found[0] > self._rumour):
            self._rumour = found[0]
            log.warning(
                "a rumour says that the run has ended at %s: neither the founder nor half of the last round's other "
                "peers have signed it, so this peer goes on from its checkpoint. If it is true, start a peer that has "
                "the last state",
                found[0],
            )
        return confirmed

    def _confirmed(self, end: End, found: Iterable[End]) -> bool:
        """Whether an end is more than a rumour: the founder or this peer itself has signed it, or at least half of the
        other peers of the last round that this peer knows. A peer without a checkpoint believes any end, because it
        can't go on by itself anyway."""
        signers, others = {one.signer for one in found if one.model == end.model}, self._group - self._trusted
        enough = max(1, min(len(others) - len(others) // 2, SIGNERS_MAX))
        return not self._group or bool(signers & self._trusted) or len(signers & others) >= enough

    def _gave_up(self, end: End, wait_s: float) -> GaveUpWaiting:
        mine = f"of epoch {self._replica.epoch}" if self._replica.has_state else "none"
        return GaveUpWaiting(
            f"is over: the run {self._founding.run_id} has ended at {end}, this peer's state is {mine}, "
            "and no peer handed over the last state",
            key="wait_timeout",
            value=f"{wait_s:g}",
            mend=f"start a peer whose checkpoint_dir has checkpoint-{end.epoch}, or go on from another one with "
            "from_checkpoint and new_generation, or start the run with a greater stop_after_epochs",
        )

    # -- a peer that has the end

    def settled(self) -> None:
        """Check whether this peer's replica has reached the run's end. Call this after each event."""
        if self._replica.finished:
            self._something.set()

    async def keep(self) -> None:
        """Wait until an end of the run is known. Then keep its record alive in the DHT until cancelled. If this peer
        has reached the end itself, sign the record."""
        await self._something.wait()
        while True:
            await self._try(self._tell(), KEEP_EVERY_S)
            await asyncio.sleep(KEEP_EVERY_S)

    async def leave(self, within_s: float) -> None:
        """Publish the run's end before this peer leaves, if the peer has reached the end and not published it yet."""
        if self._replica.finished and (self._stored is None or self._stored.model != self._mine):
            await self._try(self._tell(), within_s)

    async def _try(self, telling: Awaitable[object], within_s: float) -> None:
        """Await the call `telling`, for at most `within_s`. A failure is only logged, because other peers keep the
        end's record too."""
        try:
            await within(within_s, telling)
        except Exception:
            log.warning("the record of the run's end can't be stored in the DHT", exc_info=True)

    async def _tell(self) -> None:
        if self._replica.finished:
            if self.known is None or self.known.model != self._mine:
                fragments, revision = len(self._replica.rules.fragments), self._replica.ended_by
                self.known = ends.signed(self._transport, self._founding, self._mine, fragments, time.time(), revision)
            if self._folder is not None and (self._on_disk is None or self._on_disk.model != self._mine):
                # only an end that this peer has held itself: a stranger's record must not outlive the DHT's copy
                await self._save(self._folder, self.known)
        if self.known is not None and await ends.store(self._transport, self._founding, self.known):
            self._stored = self.known

    async def _save(self, folder: Path, end: End) -> None:
        """Write the end to disk, and return once it is there. If an earlier call was cancelled, its write still goes
        on, and this call waits for that write."""
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
    """Wait, for at most `wait_s`, while the other peers fetch the last state from this peer. The wait ends earlier if
    no live peer lacks the state, and at least len(group) - 1 other peers have it or have left; `group` is the averaging
    group of the last round."""
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
    """Divide the other peers into two lists. In the first are those that have this peer's state or have left, because a
    peer may leave before it reports the state. In the second are the live peers that lack the state."""
    through, lacking = [], []
    for peer, member in sorted(roster.peers.items()):
        if member.left is not None or (member.summary is not None and member.summary.model >= roster.mine.model):
            through.append(peer)
        elif member.live:
            lacking.append(peer)
    return through, lacking
