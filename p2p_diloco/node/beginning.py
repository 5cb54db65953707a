"""The state that a peer starts with, and when its trainer may start. This is the same way for a founder, a newcomer, a
peer that starts again from its checkpoint, and one that comes after the run's end.

Law: posts events to the replica and holds the trainer back; it changes no state itself. The replica runs in the
meantime, and adopts a higher version. So after a restart, the highest version on any peer's disk wins, even if that
peer starts late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b

from p2p_diloco.core.events import Event, Found, Restore, Revised
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.state import State
from p2p_diloco.errors import GaveUpWaiting
from p2p_diloco.node.common import Common
from p2p_diloco.node.joining import holders_of
from p2p_diloco.node.run_end import Ending, GoesOn
from p2p_diloco.node.saving import Checkpoint
from p2p_diloco.tensors.outer_state import OuterState

LOOK_EVERY_S = 1.0
SEEN_EVERY_S = 0.1
"""Seconds between two checks of what the replica and its roster have."""
LOST = "has begun, and no peer holds its state now"
"""What is wrong with a run whose record is there, but whose state is not."""
MENDS = (
    "start a peer that has a checkpoint of it (checkpoint_dir), found it anew with found=True (--found), "
    "or choose another run_id (--run-id)"
)
"""What brings such a run back."""
WARNS_AT, TOO_MANY = 5, 3
"""A peer warns that its link may be too slow once no slice has come for this part of `wait_timeout`, and so many rounds
have ended while it fetched."""
TOO_SLOW = (
    "no further slice of the run's state has come for %.0f s. In %.0f s this link has brought %.1f MB, and %d rounds "
    "have ended: if it takes longer for the means of a round than a round lasts, this peer never takes part; %s"
)
LONGER = "let rounds last longer (p2p-diloco set --sync-every), or use a faster link"

log = logging.getLogger(__name__)


class Beginning:
    """Gives this peer its first state: the state of a checkpoint, or its own model if the peer founds the run. Without
    both, the peer waits for the run's state from other peers."""

    def __init__(self, common: Common, saved: Checkpoint | None) -> None:
        """Load the tensors of the checkpoint `saved`, if there is one.

        Raises:
            CheckpointError: the checkpoint is of another model or another outer optimizer.
        """
        self._common, joined, local, run = common, common.joined, common.local, common.run
        self._may_begin_again, self._record = joined.may_begin_again, joined.record
        founded = joined.founding.founder, joined.founding.time
        states: Sequence[State] = () if saved is None else saved.restore(run, common.work, founded)
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
            self.events.append(self._founding(saved.generation + 1))
            if saved.run_id == run.run_id:
                self.events.append(Revised(saved.revision))
        elif joined.founder:
            self.events.append(self._founding(0))

    def _founding(self, generation: int) -> Found:
        """Make the event by which the present tensors become epoch 0 of this generation."""
        hashes = founding_hashes(self._record, self._common.run.rules.fragments, self._common.work.state)
        return Found(generation, hashes)

    async def until_it_may_train(self, ending: Ending, tell: Callable[[str], None]) -> None:
        """Wait until training may start. `tell` is called with the reason for each wait.

        A peer without a checkpoint waits until it holds the run's state; a peer with one also until the peers of the
        last round are back. If the run has ended, the trainer waits until this peer has fetched the last state; or, if
        its checkpoint has that state, until the others have fetched it. A new generation waits for nobody.

        Raises:
            GaveUpWaiting, Refused: as `until_it_has_a_state`.
        """
        local, replica, group = self._common.local, self._common.replica, self.last_group
        if local.new_generation and self.events:
            return
        if self._has_the_end:
            await until_the_others_have_it(replica, group, local.restart_wait, tell)
            return
        while True:
            await self.until_it_has_a_state(ending, tell)
            if not group:
                return
            wait_s, named = local.restart_wait, self._common.event_log.named
            if missing := await until_the_others_are_back(replica, group, wait_s, ending.goes_on, tell):
                log.warning("restart_wait=%g s have passed: going on without %s", wait_s, named(missing))
            if not await ending.look():
                return

    async def until_it_has_a_state(self, ending: Ending, tell: Callable[[str], None]) -> None:
        """Wait until this peer holds a state, and knows of no end of the run after that state. If no peer has the
        state, go on waiting, or found the run anew if this peer may do that (`Joined.may_begin_again`).

        A run that has begun may have been trained for hours, and a peer that began it again by itself would make a
        second result under the same name. If a peer's DHT record says that it holds the state, that peer is only
        unreachable from here, and founding again would make two runs. A run that has ended is not founded either.

        Raises:
            GaveUpWaiting: no state, or not the run's last one, came within `wait_timeout`, which begins anew with each
                slice: a large state takes long on a slow link.
            Refused: the run has ended, this peer has no state, and no other peer has been there for a while.
        """
        common, replica, give_up_s = self._common, self._common.replica, self._common.local.wait_timeout
        roster, clock = replica.roster, asyncio.get_running_loop().time
        began, warned = clock(), False
        alone_since = began
        while True:
            look_again_at = clock() + LOOK_EVERY_S
            over = await ending.look()
            if not over and replica.has_state:
                return
            quiet_s, rounds = clock() - max(began, replica.fetching.grew_at), replica.fetching.rounds_since
            late = quiet_s >= give_up_s
            if not warned and rounds >= TOO_MANY and quiet_s >= give_up_s / WARNS_AT:
                warned, nbytes = True, common.transport.traffic.bytes_received
                log.warning(TOO_SLOW, quiet_s, clock() - began, nbytes / 1e6, rounds, LONGER)
            found = bool(roster.alive()) if over else any(roster.holds_state(peer) for peer in roster.alive())
            if found:
                alone_since = clock()
            alone = not replica.has_state and clock() - alone_since >= self._patience_s
            if over:
                tell(ending.awaited(give_up_s, late=late, alone=alone))
            elif late or alone:
                await self._find_holders(ending, tell, late=late)
                alone_since = clock()
            elif found:
                tell("")  # so that the replica says how far the fetch is
            while clock() < look_again_at and (over or not replica.has_state):
                await asyncio.sleep(SEEN_EVERY_S)

    async def _find_holders(self, ending: Ending, tell: Callable[[str], None], *, late: bool) -> None:
        """Look for peers that hold the state, though none of them can be reached from here; found the run anew if there
        are none and this peer may do that.

        Raises:
            GaveUpWaiting: it is `late`.
        """
        common, run_id, give_up_s = self._common, self._common.run.run_id, self._common.local.wait_timeout
        # in this order: a peer that came to the end and left between the two looks has stored the end
        holders, over = await holders_of(common.transport, run_id), await ending.look()
        known = ", ".join(f"{peer} ({' '.join(at) or 'no address'})" for peer, at in sorted(holders.items()))
        if over or common.replica.has_state:
            return
        if late and known:
            wrong = f"no further slice of the run's state has come for {give_up_s:g} s"
            first = "one that is back from a checkpoint waits for others first (restart_wait)"
            mend = f"check that its peers can be reached from here, raise wait_timeout ({first}), or {LONGER}"
            raise GaveUpWaiting(f"{wrong}; by their records these peers hold it: {known}", mend=mend)
        if late:
            wrong = f"is over: the run {run_id} {LOST}"
            raise GaveUpWaiting(wrong, key="wait_timeout", value=f"{give_up_s:g}", mend=MENDS)
        if known:
            log.warning("the run's state is held by peers that can't be reached from here: %s", known)
        elif self._may_begin_again and common.work.is_own:  # else a part of θ is the lost state's
            log.warning("the run %s %s: founding it anew with this peer's model", run_id, LOST)
            common.events.post(self._founding(0))
        else:
            tell(f"the run {run_id} {LOST}; waiting for a peer that does, for {give_up_s:g} s; or {MENDS}")


def counted_last(state: State) -> Sequence[str]:
    """The peers that the last commit of a fragment counts."""
    return [peer for peer, member in state.roll.items() if member.epoch == state.version.epoch]


def founding_hashes(record: bytes, fragments: Sequence[Sequence[int]], state: OuterState) -> tuple[str, ...]:
    """By fragment, the hash of the run's record and of θ₀."""
    found = []
    for slices in fragments:
        theta = "".join(state.slices[index].digest() for index in slices)
        found.append(blake2b(record + theta.encode(), digest_size=16).hexdigest())
    return tuple(found)


# -- a peer that starts again


async def until_the_others_are_back(
    replica: Replica,
    group: Collection[str],
    wait_s: float,
    goes_on: GoesOn,
    tell: Callable[[str], None],
) -> str:
    """Wait, for at most `wait_s`, until at least as many peers are live as were in `group` (whom the last commits
    count), and no live peer holds a higher state than this peer. If the run is going on without this peer, return at
    once, unless a live peer's state is of a newer generation. Returns what is still missing then; empty if nothing is.

    `tell` is called with the reason for the wait; the text stays the same while the reason does.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + wait_s
    while (missing := _missing(replica, group)) and loop.time() < give_up_at and not replica.finished:
        if await goes_on.look() and not _outlived(replica):
            return ""
        tell(f"waiting for {missing}, for restart_wait={wait_s:g} s at most")
        await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, give_up_at - loop.time())))
    return "" if replica.finished else missing


def _outlived(replica: Replica) -> bool:
    """Whether a live peer's state is of a newer generation than this peer's. Progress on this peer's state would be
    lost then."""
    summaries = replica.roster.summaries().values()
    return any(summary.model.generation > replica.roster.mine.model.generation for summary in summaries)


def _missing(replica: Replica, group: Collection[str]) -> str:
    """Name what this peer still waits for: peers that are not back, or else peers whose state is higher than this
    peer's. Empty if there is nothing to wait for. A newcomer, which has no state, is nobody that was waited for."""
    alive, mine = replica.roster.alive(), replica.roster.mine.model
    back = {*replica.roster.holders(), *group} & {*alive}  # who comes back may have another id now, or a new disk
    if (count := len(group) - 1 - len(back)) > 0:
        gone = ", ".join(sorted(set(group) - {replica.me, *alive}))
        return f"{count} of the {len(group)} peers of the last round ({gone})"
    summaries = replica.roster.summaries().items()
    others = ", ".join(peer for peer, summary in summaries if summary.model > mine)
    return f"the state of {others}" if others else ""


async def until_the_others_have_it(
    replica: Replica, group: Collection[str], wait_s: float, tell: Callable[[str], None]
) -> None:
    """Wait, for at most `wait_s`, while the other peers fetch the last state from this peer. The wait ends earlier
    if no live peer lacks the state, and at least len(group) - 1 other peers have it or have left; `group`: whom the
    last commits count."""
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
