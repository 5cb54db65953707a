"""Decides which state a peer starts with, and when its trainer may start.

Law: posts events to the replica and holds the trainer back; it changes no state itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b

from p2p_diloco.core.events import Event, Found, Restore, Revised
from p2p_diloco.core.state import State
from p2p_diloco.errors import GaveUpWaiting
from p2p_diloco.node.common import Common
from p2p_diloco.node.ending import Ending, until_the_others_have_it
from p2p_diloco.node.joining import Joined, holders_of
from p2p_diloco.node.restart import GoesOn, until_the_others_are_back
from p2p_diloco.node.saving import Checkpoint
from p2p_diloco.node.trainer import TrainerSide
from p2p_diloco.tensors.outer_state import OuterState

LOOK_EVERY_S = 0.2
LOST = "has begun, and no peer holds its state now"
"""What is wrong with a run whose record is there, but whose state is not."""
MENDS = (
    "start a peer that has a checkpoint of it (checkpoint_dir), found it anew with found=True (--found), "
    "or choose another run_id (--run-id)"
)
"""What brings such a run back."""

log = logging.getLogger(__name__)


class Beginning:
    """Gives this peer its first state: the state of a checkpoint, or its own model if the peer founds the run. Without
    both, the peer waits for the run's state from other peers."""

    def __init__(self, common: Common, joined: Joined, saved: Checkpoint | None) -> None:
        """Load the tensors of the checkpoint `saved`, if there is one.

        Raises:
            CheckpointError: the checkpoint is of another model or another outer optimizer.
        """
        self._common, local, run = common, common.local, joined.run
        self._may_begin_again, self._record = joined.may_begin_again, joined.record
        states: Sequence[State] = () if saved is None else saved.restore(run, common.work, joined.founding.founder)
        goes_on = bool(states) and not local.new_generation
        self.last_group: Collection[str] = set()
        """The peers that the checkpoint names from which this peer goes on; empty if there is none."""
        self._patience_s = 2 * run.config.heartbeat_timeout  # longer than the discovery of other peers takes
        if goes_on:
            self.last_group = {peer for state in states for peer in counted_last(state)}
        self._has_the_end = goes_on and saved is not None and saved.has_ended(run.rules)
        self.events: list[Event] = []
        """The events that give the replica its first state; empty if the state has to come from other peers."""
        if goes_on:
            self.events.append(Restore(tuple(states)))
        elif saved is not None:
            self.events.append(self.founding(saved.generation + 1))
            if saved.run_id == run.run_id:
                self.events.append(Revised(saved.revision))
        elif joined.founder:
            self.events.append(self.founding(0))

    def founding(self, generation: int) -> Found:
        """Make the event by which the present tensors become epoch 0 of this generation."""
        hashes = founding_hashes(self._record, self._common.run.rules.fragments, self._common.work.state)
        return Found(generation, hashes)

    async def find_state(self, ending: Ending, tell: Callable[[str], None]) -> None:
        """Wait for the run's state. If no peer has it, say so with `tell` and go on waiting, or found the run anew if
        this peer may do that (`Joined.may_begin_again`). This call doesn't return: only an error or a cancellation ends
        it.

        A run that has begun may have been trained for hours, and a peer that began it again by itself would make a
        second result under the same name. If a peer's DHT record says that it holds the state, that peer is only
        unreachable from here, and founding again would make two runs. A run that has ended is not founded either:
        `ending` waits for its last state.

        Raises:
            GaveUpWaiting: no state came within `wait_timeout`.
        """
        common, replica, give_up_s = self._common, self._common.replica, self._common.local.wait_timeout
        roster, run_id = replica.roster, common.run.run_id
        began = alone_since = time.monotonic()
        while not replica.has_state:
            now = time.monotonic()
            if any(roster.holds_state(peer) for peer in roster.alive()):
                alone_since = now
            late = now - began >= give_up_s
            if late or now - alone_since >= self._patience_s:
                # in this order: a peer that came to the end and left between the two looks has stored the end
                known, over = _told(await holders_of(common.transport, run_id)), await ending.look()
                if None not in replica.versions:  # the state has come
                    break
                if late and not over and known:
                    mend = "check that its peers can be reached from here, or raise wait_timeout"
                    whose = f"by their records these peers hold it: {known}"
                    raise GaveUpWaiting(
                        f"no peer handed over the run's state within {give_up_s:g} s; {whose}", mend=mend
                    )
                if late and not over:
                    wrong = f"is over: the run {run_id} {LOST}"
                    raise GaveUpWaiting(wrong, key="wait_timeout", value=f"{give_up_s:g}", mend=MENDS)
                if known:
                    log.warning("the run's state is held by peers that can't be reached from here: %s", known)
                elif not over and self._may_begin_again:
                    log.warning("the run %s %s: founding it anew with this peer's model", run_id, LOST)
                    common.events.post(self.founding(0))
                    break
                elif not over:
                    tell(f"the run {run_id} {LOST}; waiting for a peer that does, for {give_up_s:g} s; or {MENDS}")
                alone_since = now
            await asyncio.sleep(LOOK_EVERY_S)
        await asyncio.Event().wait()

    async def wait_to_train(self, trainer: TrainerSide, ending: Ending, goes_on: GoesOn) -> None:
        """Hold the trainer back until training may start, then let it start. A peer without a checkpoint waits until it
        holds the run's state; a peer with one also until the peers of the last round are back. If the run has ended,
        the trainer waits until this peer has fetched the last state; or, if its checkpoint has that state, until the
        others have fetched it. With `new_generation` it doesn't wait. Once the trainer may start, this call stays open
        until it is cancelled."""
        local, replica, group = self._common.local, self._common.replica, self.last_group
        if self._has_the_end:
            await until_the_others_have_it(replica, group, local.restart_wait, trainer.hold_for)
        elif not local.new_generation:
            ended = True
            while ended:
                await ending.until_it_may_train(local.wait_timeout, self._patience_s, trainer.hold_for)
                if not group:
                    break
                await until_the_others_are_back(replica, group, local.restart_wait, goes_on, trainer.hold_for)
                ended = await ending.look()
        trainer.let_go()
        await asyncio.Event().wait()


def counted_last(state: State) -> Sequence[str]:
    """The peers that the last commit of a fragment counts."""
    return [peer for peer, member in state.roll.items() if member.epoch == state.version.epoch]


def founding_hashes(record: bytes, fragments: Sequence[Sequence[int]], state: OuterState) -> tuple[str, ...]:
    """By fragment, the hash of the run's record and of θ₀."""
    found = []
    for shards in fragments:
        theta = "".join(state.slices[shard].digest() for shard in shards)
        found.append(blake2b(record + theta.encode(), digest_size=16).hexdigest())
    return tuple(found)


def _told(holders: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{peer} ({' '.join(addresses) or 'no address'})" for peer, addresses in sorted(holders.items()))
