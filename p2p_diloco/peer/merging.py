"""Merges newer global values into the model.

Law: the node says what newer states count and which shards are due, `progress` computes what to do with each shard,
and `local` carries it out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from p2p_diloco.config import RunConfig
from p2p_diloco.core.carry import Carry
from p2p_diloco.core.leases import Tables
from p2p_diloco.node.channel import Message
from p2p_diloco.node.ledger import MERGE
from p2p_diloco.peer.local import Local
from p2p_diloco.peer.node_client import NodeClient
from p2p_diloco.peer.progress import Blend, Drop, LocalProgress, Made, outcome_of
from p2p_diloco.peer.rhythm import Rhythm
from p2p_diloco.peer.supply import Supply, tables_of
from p2p_diloco.peer.times import Times
from p2p_diloco.tensors.layout import PARAMETER, Layout

log = logging.getLogger("p2p_diloco")


def progress_of(config: RunConfig, layout: Layout) -> LocalProgress:
    """Make the record of a trainer that has made no step yet."""
    mix = config.local_share if config.merge == "mix" else None
    mixes = [mix if shard.kind == PARAMETER else None for shard in layout.shards]
    return LocalProgress([shard.numel / layout.numel for shard in layout.shards], mixes, config.weighting)


def blends_of(
    progress: LocalProgress,
    load: Message,
    trained: Made,
    landed: Collection[int] = (),
    *,
    again: bool = False,
    unsound: bool = False,
) -> dict[int, Blend]:
    """Compute what a merge does with each shard, from the node's answer `load`. The rest as in `progress.merge`."""
    outcomes = {shard: outcome_of(Carry(carry)) for shard, carry in load["carries"]}
    told = {name: load[name] for name in ("due", "gone", "lost", "ended")}
    return progress.merge(outcomes, trained, landed=landed, again=again, unsound=unsound, **told)


@dataclass(frozen=True, slots=True)
class Due:
    """What to send next. `shards`: the shards to send, perhaps none; `kept`: all shards whose loaded values are in
    `base`, because θ has changed since; `weight`: the contribution's weight, None if samples are the weight and the
    trainer reported none; `samples`: the contribution's samples. `again`: what was last sent of these shards is still
    out, so the exchange is taken up again with the same Δ."""

    shards: Sequence[int]
    kept: Collection[int]
    weight: float | None
    samples: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Flight:
    """An exchange under way. `request`: the number of its request; `shards`, `samples`: as in `Due`; `at_step`: the
    inner step after which it was sent; `steps`: the inner steps since the previous sending; `stood_s`: the seconds for
    which training stood still for this exchange before it was sent; `interval`: the inner steps of a whole round
    (`Rhythm.interval`); `again`: as in `Due`."""

    request: int
    shards: Sequence[int]
    samples: int
    at_step: int
    steps: int
    stood_s: float
    interval: int
    again: bool = False


class Merger:
    """Carries out one trainer's merges. `epoch`, `digest`: those of the last merged state; `commits`: its number of
    commits, over all fragments."""

    def __init__(
        self, node: NodeClient, local: Local, times: Times, rhythm: Rhythm, supply: Supply, progress: LocalProgress
    ) -> None:
        self._node, self._memory, self._local = node, node.memory, local
        self._times, self._rhythm, self._supply = times, rhythm, supply
        self.progress = progress
        self.epoch, self.digest, self.commits = 0, "", 0
        self.commit_steps = 0
        """How many inner steps a peer has made up to the merged state, if it always makes H."""
        self.trained, self.workers = 0, 1
        """`trained`: the samples that the merged state counts. `workers`: the number of live peers that train."""
        self._seen = -1
        self._ended = False  # the run has ended, and the model has its last state

    @property
    def over(self) -> bool:
        """Whether the run has ended for all."""
        return bool(self._memory.finished)

    @property
    def finished(self) -> bool:
        """Whether the run has ended for all, and the model has its last state."""
        return self._ended and self._memory.changed == self._seen

    @property
    def is_due(self) -> bool:
        """Whether a merge is due: some shard has changed, or the run has ended and the model has local progress."""
        return self._memory.changed != self._seen or (self.over and not self._ended)

    @property
    def uncounted(self) -> int:
        """The number of inner steps whose progress no merged commit has counted. 0 after the run's end, because no more
        steps are counted then."""
        return 0 if self.over else self._memory.steps - self.progress.settled

    @contextmanager
    def reading(self) -> Iterator[list[int]]:
        """A block in which the node writes no global parameters. Yields the shards whose loaded values are in
        `base`."""
        with self._node.turn():
            kept = self._node.ask("read", "readable")["kept"]
            try:
                yield kept
            finally:
                self._node.tell("have read", loaded=[])

    def keep_values(self) -> None:
        """Keep a copy of the global parameters, which stays after the node's end."""
        with self.reading() as kept:
            self._local.keep_values(kept)

    @contextmanager
    def merged(
        self, *, unsound: bool = False, landed: Collection[int] = (), again: bool = False, measures: bool = False
    ) -> Iterator[Due]:
        """A block at whose beginning all changed shards are merged. It yields the shards that are due next. During the
        block the node changes neither θ nor the bases.

        `unsound`: the local values are not finite or too large: load all global parameters. `landed`: the
        shards of this trainer's exchange, if this merge brings its result; `again`: it was taken up again. `measures`:
        in the block, pseudo-gradients will be computed from the bases.
        """
        loaded: set[int] = set()
        torn = True  # until this merge is complete
        try:
            with self._times.part(MERGE):
                self._seen = self._memory.changed
                data = self._supply.gather(self._rhythm.sync_every)
                load = self._node.ask("merge", "load", measures=measures, data=data)
                tables = None if load["tables"] is None else tables_of(load["tables"])
                blends = self._blends(load, tables, landed, again=again, unsound=unsound)
                self._local.merge(blends, load["kept"])
                loaded.update(blends)
                torn = False
            if load["commits"] != self.commits and not landed:
                self._rhythm.next_round()  # a round closed without this peer
            self._rhythm.follow(load["every"])
            if tables is not None:
                self._supply.hear(tables, ended=load["ended"])
            self.epoch, self.digest, self.commits = load["epoch"], load["digest"], load["commits"]
            self.commit_steps = load["commit_steps"]
            self.trained, self.workers, self._ended = load["trained"], load["workers"], load["ended"]
            yield Due(load["due"], set(load["kept"]) - loaded, *self.progress.weigh(load["due"]), load["again"])
        finally:
            self.progress.torn |= torn
            self._node.tell("have read", loaded=sorted(loaded))

    def _blends(
        self, load: Message, tables: Tables | None, landed: Collection[int], *, again: bool, unsound: bool
    ) -> dict[int, Blend]:
        """Compute what a merge does with each shard. What is dropped is logged. `tables`: of the state's data."""
        progress, before = self.progress, dict(self.progress.dropped)
        trained = self._memory.steps, self._memory.samples
        blends = blends_of(progress, load, trained, landed, again=again, unsound=unsound)
        self._supply.merge(blends)
        if tables is not None and self._supply.conflicts(tables):
            blends = progress.drop(Drop.DATA)
            self._supply.merge(blends)
        for why, samples in progress.dropped.items():
            if samples > before[why] or (unsound and why is Drop.UNSOUND):
                level = logging.INFO if why is Drop.ENDED else logging.WARNING
                count = math.ceil(samples - before[why])
                of = f"{count:,} sample{'' if count == 1 else 's'}"
                log.log(level, "the progress of %s is dropped: %s", of, why.value)
        return blends
