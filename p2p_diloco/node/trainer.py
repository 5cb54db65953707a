"""The part of a node that serves the trainer: it answers the trainer's requests, and reports to the trainer.

Law: only this part writes to the channel once training runs. A trainer has at most one open request of each kind. A
request has a number `n`, and so has its answer, so that the trainer ignores a late answer to an older request. The
trainer and its memory know slices by their index in the whole model, the replica knows fragments: here one becomes the
other.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
from torch import Tensor

from p2p_diloco.core import events as e
from p2p_diloco.core import outlook
from p2p_diloco.core.leases import WEIGHT_MIN, Use
from p2p_diloco.core.pace import speeds, trains_for
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.state import descends
from p2p_diloco.core.version import ContributionId, life_of, model_version
from p2p_diloco.node import wire
from p2p_diloco.node.channel import Door, Message, NodeEnd
from p2p_diloco.node.common import Common
from p2p_diloco.node.headers import packed
from p2p_diloco.node.inbox import NUDGED_EXCHANGES_MAX
from p2p_diloco.node.joining import Described
from p2p_diloco.node.ledger import CODEC, SubmissionLog
from p2p_diloco.node.run import Run
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.tensors.codec import written_in
from p2p_diloco.tensors.layout import PARAMETER

PROGRESS_EVERY_S = 0.25
"""Seconds between two looks at the trainer's progress."""

TELL_EVERY_S = 1.0
"""Seconds after which a waiting trainer is told the reason, and between two such reports."""

MEND_EVERY_S = 0.02
"""Seconds between two checks whether the damaged slices are repaired."""

log = logging.getLogger(__name__)


class TrainerSide:
    """Serves the trainer of one replica."""

    def __init__(self, common: Common, channel: NodeEnd) -> None:
        run, work = common.run, common.work
        self.submissions = SubmissionLog(run.config)
        """Asynchronous mode: the outcome of this peer's submissions, and its number of inner steps."""
        self.sync_every = run.config.sync_every
        """The latest number of inner steps between two exchanges of the whole model."""
        self._common = common
        self._run, self._replica, self._work, self._bases = run, common.replica, work, work.bases
        self._shared, self._channel, self._outbox = common.shared, channel, common.outbox
        self._events, self._event_log, self._ledger = common.events, common.event_log, common.ledger
        self._asynchronous, self._by_time = run.rules.asynchronous, run.config.pace == "time"
        self.ready_at: float | None = None
        self.paused = False
        self._held_for = ""
        self._holds_state = asyncio.Event()
        self._every = run.config.sync_every  # the run's H, by the state that the trainer has merged
        self._whole = -1, ""  # epoch and digest of the present state; -1: none yet
        self._merging: Message | None = None  # the open request; None: the trainer doesn't wait for its answer
        self._exchange: Message = {}  # the trainer's request for its latest exchange
        self._not_reading = asyncio.Event()
        self._not_reading.set()
        self._door = Door(common.fetching)

    @property
    def _commits(self) -> int:
        """The number of the run's commits, summed over fragments."""
        return sum(self._replica.roster.mine.epochs)

    # -- requests

    async def serve(self, messages: asyncio.Queue[Message]) -> None:
        """Answer the trainer's requests until cancelled."""
        while True:
            message = await messages.get()
            match message:
                case {"kind": "merge", "measures": measures}:
                    self._merging = message
                    if measures:
                        await self._mended()
                    await self._events.feed(e.Merge())
                case {"kind": "contribute"}:
                    await self._contribute(message)
                case {"kind": "read", "n": n}:
                    self._not_reading.clear()
                    self._channel.send("readable", n=n, kept=[] if self._asynchronous else sorted(self._bases.kept))
                case {"kind": "have read", "loaded": loaded}:
                    if self._replica.training.merging is not None:
                        self._merging = None
                    self._bases.loaded([index for fragment in loaded for index in self._run.rules.fragments[fragment]])
                    self._not_reading.set()
                case {"kind": "pause", "on": on}:
                    self.paused = on
                    self._events.post(e.Pause(on))
                case {"kind": "ask", "n": n}:
                    self._channel.send("told", n=n, **self._told())
                case {"kind": "card", "card": card}:
                    self._common.described = Described(self._run.layout, card)
                case {"kind": "nudge", "goal": goal}:
                    self._nudge_others(goal)
                case {"kind": "door", "n": n}:
                    self._channel.send("door", n=n, path=await self._door.open())

    async def _mended(self) -> None:
        """Check the bases of the pseudo-gradients that are due next, unless that was done a moment ago. If some are
        corrupted in memory, wait, in bounded time, until they are repaired."""
        replica, due = self._replica, self._replica.own.due()
        if due is None:
            return
        indices, found = self._run.rules.fragments[due], list[int]()
        read = self._bases.read
        for number in (number for number in self._work.unseen(due) if indices[number] in read):
            if (damaged := self._work.damaged(due, (number,))) is not None:
                found.append(number)
                await self._events.feed(damaged)
            await asyncio.sleep(0)  # for a large model this takes a second; probes must be answered meanwhile
        within_s = self._run.rules.mended_within
        give_up_at = time.monotonic() + within_s
        while (left := set(found) & set(replica.fetching.repaired(due))) and time.monotonic() < give_up_at:
            await asyncio.sleep(MEND_EVERY_S)
        if left:
            slices = ", ".join(str(indices[number]) for number in sorted(left))
            what = "slices %s were corrupted in memory, and not repaired within %g s: going on with them"
            log.warning(what, slices, within_s)

    async def _contribute(self, message: Message) -> None:
        self._ledger.begin()
        self.sync_every, self._exchange = message["every"], message
        fragment, config = message["fragment"], self._run.config
        delta = self._shared.delta_in(written_in(config.codec, config.rounding))
        if message["stands"] and not self._asynchronous:  # in asynchronous mode fragments may stay unmerged
            self._bases.stand(self._run.rules.fragments[fragment])

        def values(index: int) -> Tensor:
            return delta if self._run.layout.slices[index].kind == PARAMETER else self._shared.delta

        uses = tuple(msgspec.convert(use, Use) for use in message["uses"])
        with self._ledger.part(CODEC):
            of = self._run, self._replica, self._work, fragment, values
            made = await contribution(*of, message["weight"], message["samples"], uses)
        await self._events.feed(made)

    def _told(self) -> dict[str, Any]:
        replica = self._replica
        return {
            "versions": [None if v is None else [v.generation, v.samples, v.epoch, v.chain] for v in replica.versions],
            "digest": self._whole[1],
            "peers": [replica.me, *replica.roster.alive()],
            "aggregates": list(outlook.owned(replica)),
            "shared": replica.roster.shared(),
            "me": replica.me,
            "life": life_of(replica.own.incarnation),
            "tables": replica.tables,
            "ended": replica.finished,
        }

    def _nudge_others(self, goal: int) -> None:
        header = packed(wire.Nudge(goal), self._run.token)
        for peer in self._replica.roster.alive():
            self._outbox.put(peer, header)

    # -- what others tell

    def nudged(self, goal: int) -> None:
        """Pass another peer's request to exchange the whole model on to the trainer. Ignore the request if its `goal`
        is far above the number of commits that the run has made."""
        if goal <= self._commits + NUDGED_EXCHANGES_MAX * len(self._run.layout.fragments):
            self._shared.goal = max(goal, self._shared.goal)

    # -- what the loop tells

    def departs(self) -> None:
        """Record that the trainer no longer reads θ, because this peer leaves the run."""
        self._not_reading.set()
        self._door.close()

    async def not_reading(self) -> None:
        """Wait until the trainer is not reading θ. This is checked again after each wait, because the trainer may have
        begun to read again."""
        while not self._not_reading.is_set():
            await self._not_reading.wait()

    def load(self, effect: e.Load) -> None:
        """Answer the trainer's open merge request, if there is one. θ doesn't change until the trainer says that it has
        read θ. A trainer that was interrupted while it waited for the answer reads nothing, and loads everything at its
        next request."""
        replica, bases, rules = self._replica, self._bases, self._run.rules
        for loaded in effect.fragments:
            self._work.merge(loaded)
        if (asked := self._merging) is None:
            return
        self._not_reading.clear()
        if (every := replica.revision.sync_every or self._run.config.sync_every) != self._every:
            self._every = every
            self.submissions.begins_with(every)
        # what is under way may be counted by the present tables before it is merged
        tells_data = asked["data"] and not replica.own.flying and replica.has_state
        merged = [version for version in replica.own.merged if version is not None]
        self._channel.send(
            "load",
            n=asked["n"],
            outcomes=[(loaded.fragment, loaded.outcome) for loaded in effect.fragments],
            kept=sorted(bases.kept),
            gone=[number for number, slices in enumerate(rules.fragments) if bases.gone.intersection(slices)],
            lost=[number for number, slices in enumerate(rules.fragments) if bases.lost.intersection(slices)],
            due=effect.due,
            again=effect.due is not None and replica.own.is_out(effect.due),
            ended=bool(self._shared.finished),
            commits=self._commits,
            commit_steps=outlook.steps(replica),
            every=self.submissions.steps if self._asynchronous else every,
            epoch=min(version.epoch for version in merged),
            digest=model_version(merged).digest,
            trained=min(version.samples for version in merged),
            workers=replica.workers(),
            tables=replica.tables if tells_data else None,
        )

    def release(self, effect: e.Release) -> None:
        """Answer the trainer's request for an exchange, which is over or never began."""
        submissions, roster = self.submissions, self._replica.roster
        if self._asynchronous and effect.sent:
            log.info("%s", submissions.ends(effect))
            if text := submissions.adjust(roster.mine.speed, speeds(roster.summaries())):
                self._event_log.note("pace", text)
        told = {"staleness": submissions.staleness, "refused": submissions.refused}
        spent = {"stood": self._ledger.stood, "hidden": self._ledger.hidden}
        self._channel.send("release", n=self._exchange["n"], sent=effect.sent, **spent, **told)

    def ready(self) -> None:
        """Record that this peer holds the run's state."""
        self._publish()
        self._holds_state.set()

    def hold_for(self, text: str) -> None:
        """Set the reason, as text, why training waits for `start`."""
        self._held_for = text

    async def start(self) -> None:
        """Let training start: now if this peer holds the run's state, else once it does."""
        self._held_for = ""
        await self._holds_state.wait()
        self.ready_at = asyncio.get_running_loop().time()
        self._channel.send("ready")

    def changed(self) -> None:
        """Tell the trainer that the state of some fragment has changed. In asynchronous mode the trainer is normally
        not told, because its next merge brings the new state."""
        self._publish()
        replica = self._replica
        pairs = zip(replica.logs, replica.own.merged, strict=True)
        left = any(v is not None and one.state is not None and not descends(one.held, v) for one, v in pairs)
        if not self._asynchronous or replica.finished or left:
            self._shared.changed = self._shared.changed + 1

    def finished(self) -> None:
        self._publish()
        self._shared.finished = 1

    # -- what goes on meanwhile

    async def watch_progress(self) -> None:
        """Until cancelled, report the trainer's progress to the replica and the run's progress to the trainer."""
        seen = -1
        while True:
            steps, step_time_s = self._shared.steps, self._shared.step_time_s
            if steps != seen and self._replica.has_state:
                seen = steps
                self._events.post(e.Stepped(step_time_s if math.isfinite(step_time_s) else 0.0))
            self._publish()
            await asyncio.sleep(PROGRESS_EVERY_S)

    async def tell_waiting(self) -> None:
        """Until cancelled, tell a waiting trainer regularly why it waits. Short waits are not reported."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            stands_long = self._shared.stands and time.monotonic() - self._shared.stands_since >= TELL_EVERY_S
            if self.ready_at is None or stands_long:
                text = self._event_log.named(self._held_for or outlook.waiting(self._replica))
                self._channel.progress(text)

    def _publish(self) -> None:
        replica = self._replica
        if replica.has_state:
            self._whole = replica.epoch, replica.roster.mine.model.digest
        self._shared.epoch = self._whole[0]
        self._shared.peers = 1 + len(replica.roster.alive())
        outer_lr, outer_momentum = self._run.rates_at(replica.revision, replica.epoch)
        self._shared.revision = replica.revision.number
        self._shared.outer_lr = outer_lr
        self._shared.outer_momentum = outer_momentum
        if self._by_time:
            of = replica.interval, self._run.round_nbytes, replica.me, replica.roster.summaries()
            self._shared.trains_for_s = trains_for(*of)


async def contribution(
    run: Run,
    replica: Replica,
    work: SliceWork,
    fragment: int,
    values: Callable[[int], Tensor],
    weight: float,
    samples: int,
    uses: tuple[Use, ...] = (),
) -> e.Contribute:
    """Encode a contribution to a fragment. `values`: by slice, the vector [numel] with its pseudo-gradient, or with the
    values of buffers. An exchange that is taken up again has the slices that it had: other peers may have some of
    them."""
    own = replica.own
    parts = [(part.hash, part.payload) for part in own.parts.values()] if own.is_out(fragment) else []
    id = ContributionId(own.incarnation, own.sequence + 1)
    for index in run.rules.fragments[fragment] if not parts else ():
        payload = work.encode(index, values(index), id, weighs=weight > WEIGHT_MIN)
        parts.append((hash_of(payload), payload))
        await asyncio.sleep(0)  # for a large model this takes a second; probes must be answered meanwhile
    hashes, payloads = zip(*parts, strict=True)
    return e.Contribute(fragment, weight, samples, hashes, payloads, uses)
