"""Merges newer global values into the model.

Law: the node says what newer states count and which fragment is due, `progress` computes what to do with each fragment,
and `local` carries it out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from p2p_diloco.core.carry import Outcome
from p2p_diloco.core.leases import Tables
from p2p_diloco.node.channel import Message
from p2p_diloco.node.ledger import MERGE
from p2p_diloco.peer.local import Local
from p2p_diloco.peer.metrics import Times
from p2p_diloco.peer.node_client import NodeClient
from p2p_diloco.peer.progress import DATA, ENDED, UNSOUND, Blend, LocalProgress
from p2p_diloco.peer.rhythm import Rhythm
from p2p_diloco.peer.shard import Supply, tables_of
from p2p_diloco.tensors.layout import Layout

log = logging.getLogger("p2p_diloco")


@dataclass(frozen=True, slots=True)
class Due:
    """What to send next. `fragment`, `slices`: the fragment that is due, and its slices; `kept`: all slices whose
    loaded values are in `base`, because θ has changed since; `weight`: the contribution's weight, None if samples are
    the weight and the trainer reported none; `samples`: the contribution's samples. `again`: what was last sent of this
    fragment is still out, so the exchange is taken up again with the same Δ."""

    fragment: int
    slices: Sequence[int]
    kept: Collection[int]
    weight: float | None
    samples: int
    again: bool


@dataclass(frozen=True, slots=True)
class Flight:
    """An exchange under way. `request`: the number of its request; `due`: what was sent; `at_step`: the inner step
    after which it was sent; `steps`: the inner steps since the previous sending; `stood_s`: the seconds for which
    training stood still for this exchange before it was sent; `interval`: the inner steps of a whole round
    (`Rhythm.interval`)."""

    request: int
    due: Due
    at_step: int
    steps: int
    stood_s: float
    interval: int


class Merger:
    """Carries out one trainer's merges. `epoch`, `digest`: those of the last merged state; `commits`: its number of
    commits, over all fragments."""

    def __init__(
        self,
        node: NodeClient,
        local: Local,
        layout: Layout,
        times: Times,
        rhythm: Rhythm,
        supply: Supply,
        progress: LocalProgress,
    ) -> None:
        self._node, self._memory, self._local, self._layout = node, node.memory, local, layout
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
        """Whether a merge is due: some fragment has changed, or the run has ended and the model has local progress."""
        return self._memory.changed != self._seen or (self.over and not self._ended)

    @contextmanager
    def reading(self) -> Iterator[list[int]]:
        """A block in which the node writes no global parameters. Yields the slices whose loaded values are in
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
        self, *, unsound: bool = False, landed: Due | None = None, measures: bool = False
    ) -> Iterator[Due | None]:
        """A block at whose beginning all changed fragments are merged. It yields what is due next. During the block the
        node changes neither θ nor the bases.

        `unsound`: the local values are not finite or too large: load all global parameters. `landed`: what this trainer
        has sent, if this merge brings its result. `measures`: in the block, pseudo-gradients will be computed from the
        bases.
        """
        blends: dict[int, Blend] = {}
        torn = True  # until this merge is complete
        try:
            with self._times.part(MERGE):
                self._seen = self._memory.changed
                data = self._supply.gather(self._rhythm.sync_every)
                load = self._node.ask("merge", "load", measures=measures, data=data)
                tables = None if load["tables"] is None else tables_of(load["tables"])
                blends = self._blends(load, tables, landed, unsound=unsound)
                loaded = {index: blend for number, blend in blends.items() for index in self._slices_of(number)}
                self._local.merge(loaded, load["kept"])
                torn = False
            if load["commits"] != self.commits and landed is None:
                self._rhythm.next_round()  # a round closed without this peer
            self._rhythm.follow(load["every"])
            if tables is not None:
                self._supply.hear(tables, ended=load["ended"])
            self.epoch, self.digest, self.commits = load["epoch"], load["digest"], load["commits"]
            self.commit_steps = load["commit_steps"]
            self.trained, self.workers, self._ended = load["trained"], load["workers"], load["ended"]
            kept, due = set(load["kept"]) - loaded.keys(), load["due"]
            again = load["again"]
            yield None if due is None else Due(due, self._slices_of(due), kept, *self.progress.weigh(due), again)
        finally:
            self.progress.torn |= torn
            self._node.tell("have read", loaded=[] if torn else sorted(blends))

    def _slices_of(self, fragment: int) -> list[int]:
        return [place.index for place in self._layout.slices_of(fragment)]

    def _blends(self, load: Message, tables: Tables | None, landed: Due | None, *, unsound: bool) -> dict[int, Blend]:
        """Compute what a merge does with each fragment. What is dropped is logged. `tables`: of the state's data."""
        progress, before = self.progress, self.progress.dropped.copy()
        blends = progress.merge(
            outcomes_in(load["outcomes"]),
            (self._memory.steps, self._memory.samples),
            landed=None if landed is None else landed.fragment,
            again=landed is not None and landed.again,
            unsound=unsound,
            **{name: load[name] for name in ("due", "gone", "lost", "ended")},
        )
        self._supply.merge(blends.get(0))
        if tables is not None and self._supply.conflicts(tables):
            blends = progress.drop(DATA)
            self._supply.merge(blends.get(0))
        for why, samples in progress.dropped.items():
            if samples > before[why] or (unsound and why == UNSOUND):
                level = logging.INFO if why == ENDED else logging.WARNING
                count = math.ceil(samples - before[why])
                of = f"{count:,} sample{'' if count == 1 else 's'}"
                log.log(level, "the progress of %s is dropped: %s", of, why)
        return blends


def outcomes_in(told: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, Outcome]:
    """Read the outcomes by fragment that the node has told as plain values."""
    return {fragment: Outcome(**outcome) for fragment, outcome in told}
