"""Merging newer global values into the model.

Law: the node says what becomes of each shard, and what is due; `local` carries it out.
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
from p2p_diloco.peer.times import Times


@dataclass(frozen=True, slots=True)
class Due:
    """The shards that are to be sent next, perhaps none; those whose base is kept beside θ; the weight of what is sent,
    and its samples. No weight: it goes by samples, and none were reported."""

    shards: Sequence[int]
    kept: Collection[int]
    weight: float | None
    samples: int


class Merger:
    """One trainer's merges. `epoch`, `digest`, `commits` (over all fragments): of what was merged last."""

    def __init__(self, node: NodeClient, local: Local, times: Times, rhythm: Rhythm) -> None:
        self._node, self._memory, self._local = node, node.memory, local
        self._times, self._rhythm = times, rhythm
        self.epoch, self.digest, self.commits = 0, "", 0
        self.counted = self.dropped_samples = 0
        """Exchanges that were counted in every shard; samples whose progress was given up."""
        self.trained, self.workers = 0, 1
        """Samples counted in what is merged; live peers that train."""
        self._seen = -1
        self._ended = False  # the run has, and the model is the run's

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
        """Whether some shard has changed, or the run has ended and what is local is still in the model."""
        return self._memory.changed != self._seen or (self.over and not self._ended)

    @contextmanager
    def merged(self, *, afresh: bool = False, landing: bool = False, measures: bool = False) -> Iterator[Due]:
        """Merge whatever has changed; what is due next. Meanwhile the node leaves θ and the bases as they are.

        `afresh`: load all of the global parameters, and keep nothing of the local ones. `landing`: this is the result
        of an exchange. `measures`: a pseudo-gradient is to be measured from the bases.
        """
        loaded: set[int] = set()
        torn = True  # until this is through
        try:
            with self._times.part(MERGE):
                self._seen = self._memory.changed
                load = self._node.ask("merge", "load", measures=measures, afresh=afresh)
                takes = {shard: Take(take) for shard, take in load["takes"]}
                self._local.merge(takes, load["kept"])
                loaded.update(takes)
                torn = False
            if load["commits"] != self.commits and not landing:
                self._rhythm.next_round()  # the round that is over was one without this peer
            self.epoch, self.digest, self.commits = load["epoch"], load["digest"], load["commits"]
            self.counted, self.dropped_samples = load["counted"], load["dropped_samples"]
            self.trained, self.workers, self._ended = load["trained"], load["workers"], load["ended"]
            yield Due(load["due"], set(load["kept"]) - loaded, load["weight"], load["samples"])
        finally:
            self._node.tell("have read", loaded=sorted(loaded), torn=torn)
