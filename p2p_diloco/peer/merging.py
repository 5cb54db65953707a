"""Merges newer global values into the model.

Law: the node decides what to do with each shard and which shards are due; `local` carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from p2p_diloco.node.ledger import MERGE
from p2p_diloco.node.local_progress import Take
from p2p_diloco.peer.local import Local
from p2p_diloco.peer.node_client import NodeClient
from p2p_diloco.peer.rhythm import Rhythm
from p2p_diloco.peer.supply import Supply
from p2p_diloco.peer.times import Times


@dataclass(frozen=True, slots=True)
class Due:
    """What to send next. `shards`: the shards to send, perhaps none; `kept`: all shards whose loaded values are in
    `base`, because θ has changed since; `weight`: the contribution's weight, None if samples are the weight and the
    trainer reported none; `samples`: the contribution's samples."""

    shards: Sequence[int]
    kept: Collection[int]
    weight: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Flight:
    """An exchange under way. `request`: the number of its request; `at_step`: the inner step after which it was sent;
    `steps`: the inner steps since the previous sending; `stood_s`: the seconds for which training stood still for this
    exchange before it was sent; `interval`: the inner steps of a whole round (`Rhythm.interval`)."""

    request: int
    at_step: int
    steps: int
    stood_s: float
    interval: int


class Merger:
    """Carries out one trainer's merges. `epoch`, `digest`: those of the last merged state; `commits`: its number of
    commits, over all fragments."""

    def __init__(self, node: NodeClient, local: Local, times: Times, rhythm: Rhythm, supply: Supply) -> None:
        self._node, self._memory, self._local = node, node.memory, local
        self._times, self._rhythm, self._supply = times, rhythm, supply
        self.epoch, self.digest, self.commits = 0, "", 0
        self.commit_steps = 0
        """How many inner steps a peer has made up to the merged state, if it always makes H."""
        self.counted = self.dropped_samples = 0
        """`counted`: the number of this trainer's exchanges that commits have counted in every shard.
        `dropped_samples`: the number of samples whose progress was given up."""
        self.settled = 0
        """The number of this trainer's steps whose progress was counted in every shard, or given up."""
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
        return 0 if self.over else self._memory.steps - self.settled

    @contextmanager
    def reading(self) -> Iterator[list[int]]:
        """A block in which the node writes no global parameters. Yields the shards whose loaded values are in
        `base`."""
        with self._node.turn():
            kept = self._node.ask("read", "readable")["kept"]
            try:
                yield kept
            finally:
                self._node.tell("have read", loaded=[], torn=False)

    def keep_values(self) -> None:
        """Keep a copy of the global parameters, which stays after the node's end."""
        with self.reading() as kept:
            self._local.keep_values(kept)

    @contextmanager
    def merged(self, *, afresh: bool = False, landing: bool = False, measures: bool = False) -> Iterator[Due]:
        """A block at whose beginning all changed shards are merged. It yields the shards that are due next. During the
        block the node changes neither θ nor the bases.

        `afresh`: load all global parameters, and drop all local progress. `landing`: this merge brings the result of
        this trainer's exchange. `measures`: in the block, pseudo-gradients will be computed from the bases.
        """
        loaded: set[int] = set()
        torn = True  # until this merge is complete
        try:
            with self._times.part(MERGE):
                self._seen = self._memory.changed
                data = self._supply.say(self._rhythm.sync_every)
                load = self._node.ask("merge", "load", measures=measures, afresh=afresh, data=data)
                takes = {shard: Take(take) for shard, take in load["takes"]}
                self._local.merge(takes, load["kept"])
                loaded.update(takes)
                torn = False
            if load["commits"] != self.commits and not landing:
                self._rhythm.next_round()  # a round closed without this peer
            self._rhythm.follow(load["every"])
            self._supply.hear(load["data"])
            self.epoch, self.digest, self.commits = load["epoch"], load["digest"], load["commits"]
            self.commit_steps = load["commit_steps"]
            self.counted, self.dropped_samples = load["counted"], load["dropped_samples"]
            self.settled = load["settled"]
            self.trained, self.workers, self._ended = load["trained"], load["workers"], load["ended"]
            yield Due(load["due"], set(load["kept"]) - loaded, load["weight"], load["samples"])
        finally:
            self._node.tell("have read", loaded=sorted(loaded), torn=torn)
