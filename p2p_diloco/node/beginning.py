"""The state that a peer starts with, and when its trainer may start.

Law: posts events to the replica and holds the trainer back; it changes no state itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from p2p_diloco.core.events import Event, Found, Restore, Revised
from p2p_diloco.core.messages import State
from p2p_diloco.core.replica import founding_meta
from p2p_diloco.core.version import model_version
from p2p_diloco.node.common import Common
from p2p_diloco.node.ending import Ending, until_the_others_have_it
from p2p_diloco.node.joining import Joined, found_if_nobody_has, holders_of
from p2p_diloco.node.restart import GoesOn, until_the_others_are_back
from p2p_diloco.node.saving import Checkpoint
from p2p_diloco.node.trainer import TrainerSide


class Beginning:
    """The state that this peer starts with: a checkpoint's; or its model's, if it founds the run; or none."""

    def __init__(self, common: Common, joined: Joined, saved: Checkpoint | None) -> None:
        """Load the checkpoint's tensors.

        Raises:
            CheckpointError: the checkpoint is of another model or another outer optimizer.
        """
        self._common, local, run = common, common.local, joined.run
        states: Sequence[State] = () if saved is None else saved.restore(run, common.work)
        goes_on = bool(states) and not local.new_generation
        self._last_group: Collection[str] = set()
        if goes_on:
            self._last_group = {peer for s in states for peer in (*s.plan.group, *s.plan.succession)}
        version = model_version([state.version for state in states]) if goes_on else None
        self._has_the_end = version is not None and run.rules.ended(version)
        self.events: list[Event] = []
        """The event that gives the replica its first state."""
        if goes_on:
            self.events.append(Restore(tuple(states)))
        elif saved is not None:
            self.events.append(self.founding(saved.generation + 1))
            if saved.run_id == run.run_id:
                self.events.append(Revised(saved.revision))
        elif joined.founder:
            self.events.append(self.founding(0))

    def founding(self, generation: int) -> Found:
        """The event that makes the present tensors epoch 0 of a generation."""
        common = self._common
        meta, shards = founding_meta(generation, common.replica.me, common.local.role), common.run.layout.shards
        return Found(generation, tuple(common.work.store.digest(shard.index, meta) for shard in shards))

    async def find_state(self, ending: Ending) -> None:
        """Found the run if no other peer has its state. Then wait for ever: only an error or a cancellation ends this
        call."""
        common = self._common
        await found_if_nobody_has(
            common.replica,
            2 * common.run.config.heartbeat_timeout,
            common.local.wait_timeout,
            lambda: common.events.post(self.founding(0)),
            lambda: holders_of(common.transport, common.run.run_id),
            ending.look,
        )
        await asyncio.Event().wait()

    async def wait_to_train(self, trainer: TrainerSide, ending: Ending, goes_on: GoesOn) -> None:
        """Let the trainer start. In a run that has ended, this peer first fetches the last state, or waits until the
        others have it (`ending`). After a start from a checkpoint it waits until the other peers are back (`restart`).
        A peer that sets the run back doesn't wait. Only an error or a cancellation ends this call."""
        local, replica, group = self._common.local, self._common.replica, self._last_group
        if self._has_the_end:
            await until_the_others_have_it(replica, group, local.restart_wait, trainer.hold_for)
        elif not local.new_generation:
            ended = True
            while ended:
                await ending.until_it_may_train(local.wait_timeout, trainer.hold_for)
                if not group:
                    break
                await until_the_others_are_back(replica, group, local.restart_wait, goes_on, trainer.hold_for)
                ended = await ending.look()
        trainer.let_go()
        await asyncio.Event().wait()
