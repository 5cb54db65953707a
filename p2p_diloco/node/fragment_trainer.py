"""Serves the trainer of a replica of `p2p_diloco.fragments`.

Law: as `trainer`, whose methods of these names it replaces. The trainer and its memory know shards, the replica knows
fragments and slices: here one becomes the other. `core.carry` says what becomes of the progress in a fragment; the
record of how much that is lies with the trainer (`peer.progress`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import cast

from torch import Tensor

from p2p_diloco.core import events as old
from p2p_diloco.core.carry import Carried
from p2p_diloco.core.leases import WEIGHT_MIN, Use
from p2p_diloco.core.submitting import ENDED, LEFT, MISUSED, TOO_OLD
from p2p_diloco.core.version import ContributionId
from p2p_diloco.fragments import events as e
from p2p_diloco.fragments.admission import is_counted
from p2p_diloco.fragments.lineage import model_of
from p2p_diloco.fragments.replica import Replica
from p2p_diloco.fragments.state import descends
from p2p_diloco.node.channel import Message, NodeEnd
from p2p_diloco.node.common import Common
from p2p_diloco.node.ledger import CODEC
from p2p_diloco.node.plain import from_plain, to_plain
from p2p_diloco.node.run import Run
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.node.trainer import MEND_EVERY_S, TrainerSide
from p2p_diloco.tensors.codec import written_in
from p2p_diloco.tensors.layout import PARAMETER

log = logging.getLogger(__name__)


class FragmentTrainer(TrainerSide):
    """Serves the trainer of one replica."""

    def __init__(self, common: Common, channel: NodeEnd) -> None:
        super().__init__(common, channel)
        self._core, self._slices = cast(Replica, common.replica), cast(SliceWork, common.work)
        self._carried = [Carried() for _ in self._core.logs]  # by fragment

    # -- requests

    async def _mended(self) -> None:
        """Check the bases of the pseudo-gradients that are due next. If some are corrupted in memory, wait, in bounded
        time, until they are repaired."""
        core, due = self._core, self._core.own.due()
        if due is None:
            return
        places, found = self._run.rules.fragments[due], list[int]()
        for number in (number for number, shard in enumerate(places) if shard in self._bases.read):
            if (damaged := self._slices.damaged(due, (number,))) is not None:
                found.append(number)
                await self._events.feed(cast(old.Event, damaged))
            await asyncio.sleep(0)  # for a large model this takes a second; probes must be answered meanwhile
        within_s = self._run.rules.mended_within
        give_up_at = time.monotonic() + within_s
        while (left := set(found) & set(core.fetching.repaired(due))) and time.monotonic() < give_up_at:
            await asyncio.sleep(MEND_EVERY_S)
        if left:
            shards = ", ".join(str(places[number]) for number in sorted(left))
            what = "shards %s were corrupted in memory, and not repaired within %g s: going on with them"
            log.warning(what, shards, within_s)

    async def _contribute(self, message: Message) -> None:
        self._ledger.begin()
        self.sync_every, self._exchange = message["every"], message
        shards, config = tuple(message["shards"]), self._run.config
        if not shards:  # the run is over: no fragment is due
            self.release(e.Release(sent=False))
            return
        delta = self._shared.delta_in(written_in(config.codec, config.rounding))
        if message["stands"] and not self._asynchronous:  # in asynchronous mode shards may stay unmerged
            self._bases.stand(shards)

        def values(shard: int) -> Tensor:
            return delta if self._run.layout.shards[shard].kind == PARAMETER else self._shared.delta

        fragment = self._run.rules.fragment_of(shards[0])
        carried = self._carried[fragment]
        carries = carried.oldest is not None and carried.oldest_base is not None and not carried.included
        uses = tuple(from_plain(Use, use) for use in message["uses"])
        with self._ledger.part(CODEC):
            made = await contribution(
                self._run, self._core, self._slices, fragment, values, message["weight"], message["samples"], uses,
                (carried.oldest, carried.oldest_base) if carries and carried.oldest_base is not None else None,
            )  # fmt: skip
        await self._events.feed(cast(old.Event, made))

    # -- what the loop tells

    def sent(self, effect: e.Sent) -> None:
        """Record the id of the exchange that now begins."""
        carried = self._carried[effect.fragment]
        if carried.last != effect.id:
            carried.send(effect.id)
            carried.sends += not self._asynchronous

    def load(self, effect: e.Load) -> None:  # type: ignore[override]
        if (asked := self._merging) is None:
            return
        self._not_reading.clear()
        core, bases, rules = self._core, self._bases, self._run.rules
        carries = list[list[object]]()
        for loaded in effect.fragments:
            carried = self._carried[loaded.fragment]
            given_up = carried.sends > (1 if self._asynchronous else rules.carry_rounds)
            carry = carried.merge(loaded.version, loaded.counted, kin=loaded.kin, given_up=given_up)
            for shard in rules.fragments[loaded.fragment]:
                self._slices.merge(shard, carry, loaded.counted)
                carries.append([shard, carry.value])
        if (every := self._sync_every_now()) != self._every:
            self._every = every
            self.submissions.begins_with(every)
        merged = [version for version in core.own.merged if version is not None]
        self._channel.send(
            "load",
            n=asked["n"],
            carries=carries,
            kept=sorted(bases.kept),
            gone=sorted(bases.gone),
            lost=sorted(bases.lost),
            due=[] if effect.due is None else list(rules.fragments[effect.due]),
            again=self._is_out(effect.due),
            ended=bool(self._shared.finished),
            commits=self._commits,
            commit_steps=core.steps,
            every=self.submissions.steps if self._asynchronous else every,
            epoch=min(version.epoch for version in merged),
            digest=model_of(merged).digest,
            trained=min(version.samples for version in merged),
            workers=core.workers(),
            # what is under way may be counted by the present tables before it is merged
            tables=to_plain(core.tables) if asked["data"] and not core.own.flying and core.has_state else None,
        )

    def _is_out(self, fragment: int | None) -> bool:
        """Whether this peer's contribution to this fragment is out on its present version: an exchange that ended early
        is taken up again then, with the same Δ."""
        if fragment is None or self._asynchronous or self._core.own.fragment != fragment:
            return False
        own = self._core.own
        return bool(own.parts) and own.ready_base == self._core.logs[fragment].version

    def _submitted(self) -> dict[str, int]:
        core, fragment = self._core, self._run.rules.fragment_of(self._exchange["shards"][0])
        ready, log_, most = core.own.ready, core.logs[fragment], core.rules.max_staleness
        assert ready is not None, "an exchange was under way"
        behind: int | None = None
        why = list[str]()
        if is_counted(log_.held, core.me, ready):
            behind = log_.held.roll[core.me].epoch - ready.base.epoch - 1
        elif log_.final:
            why = [ENDED]
        elif not descends(log_.held, ready.base):
            why = [LEFT]
        else:
            self._carried[fragment].sends += 1
            why = [TOO_OLD if most is not None and log_.epoch - ready.base.epoch > most else MISUSED]
        shards = self._exchange["shards"]
        return self._told_of_submission([behind] * len(shards), why)

    def changed(self) -> None:
        self._publish()
        core = self._core
        pairs = zip(core.logs, core.own.merged, strict=True)
        left = any(v is not None and one.state is not None and not descends(one.held, v) for one, v in pairs)
        if not self._asynchronous or core.finished or left:
            self._shared.changed = self._shared.changed + 1

    @property
    def _is_even(self) -> bool:
        return True


async def contribution(
    run: Run,
    core: Replica,
    work: SliceWork,
    fragment: int,
    values: Callable[[int], Tensor],
    weight: float,
    samples: int,
    uses: tuple[Use, ...] = (),
    oldest: tuple[ContributionId | None, object] | None = None,
) -> e.Contribute:
    """Encode a contribution to a fragment. `values`: by shard, the vector [numel] with its pseudo-gradient, or with the
    values of buffers. An exchange that is taken up again has the slices that it had: other peers may have some of
    them."""
    own = core.own
    payloads = tuple(part.payload for part in own.parts.values())
    if core.rules.asynchronous or (own.fragment, own.ready_base) != (fragment, core.logs[fragment].version):
        id = ContributionId(own.incarnation, own.sequence + 1)
        payloads = ()
        for shard in run.rules.fragments[fragment]:
            payload = work.encode(shard, values(shard), id, weighs=weight > WEIGHT_MIN)
            # a copy, because the vector is written again for the next exchange, and these are sent until the commit
            payloads = *payloads, memoryview(bytes(payload))
            await asyncio.sleep(0)  # for a large model this takes a second; probes must be answered meanwhile
    hashes = tuple(map(hash_of, payloads))
    return e.Contribute(fragment, weight, samples, hashes, payloads, uses, oldest)  # type: ignore[arg-type]
