"""Merging newer global values into the model, and what becomes of the local progress then.

Law: the node says what is new and what is due; here it is said how each shard's progress is carried over, and the tally
is kept. Parameters are `local`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from p2p_diloco.config import RunConfig
from p2p_diloco.core.events import Carry
from p2p_diloco.node.channel import Message
from p2p_diloco.node.ledger import MERGE
from p2p_diloco.peer.local import Local
from p2p_diloco.peer.node_client import NodeClient
from p2p_diloco.peer.rhythm import Rhythm
from p2p_diloco.peer.tally import Tally
from p2p_diloco.peer.times import Times
from p2p_diloco.tensors.layout import Layout


class Merger:
    """One trainer's merges. `epoch`, `digest`, `commits` (over all fragments): of what was merged last."""

    def __init__(
        self,
        node: NodeClient,
        local: Local,
        config: RunConfig,
        layout: Layout,
        tally: Tally,
        times: Times,
        rhythm: Rhythm,
    ) -> None:
        self._node, self._memory, self._local = node, node.memory, local
        self._config, self._layout = config, layout
        self._tally, self._times, self._rhythm = tally, times, rhythm
        self.epoch, self.digest, self.commits = 0, "", 0
        self.counted = 0
        """Exchanges that were counted in every shard."""
        self.trained, self.workers = 0, 1
        """Asynchronous: samples counted in what is merged, live peers that train."""
        self._seen = -1
        self._ended = False  # the run has, and the model is the run's
        self._torn = False  # a merge was broken off: what was trained can't be told any more

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
    def merged(
        self, *, afresh: bool = False, landing: Collection[int] = (), measures: bool = False, flying: bool = False
    ) -> Iterator[tuple[list[int], Collection[int]]]:
        """Merge whatever has changed; the shards that are due next, and those whose base is kept beside θ. Meanwhile
        the node leaves both as they are.

        `afresh`: load all of the global parameters, and keep nothing of the local ones; so it is when the run has
        ended, for no round is left to count these. `landing`: shards whose exchange is just over; what was trained
        since they were sent is treated as the run's `merge` says, if this peer's part of it was counted. `measures`: a
        pseudo-gradient is to be measured from the bases. `flying`: an exchange is under way.
        """
        loaded: set[int] = set()
        try:
            with self._times.part(MERGE):
                self._seen, ends = self._memory.changed, self.over and not flying
                torn, self._torn = self._torn, True  # until this is through
                load = self._node.ask("merge", "load", measures=measures)
                loaded.update(self._merge(load, afresh or ends or torn, landing, flying))
                if torn:
                    self._local.forget_deltas(loaded)
                if torn or (ends and not self._ended):
                    self._tally.give_up()
                self._torn, self._ended = False, self._ended or ends
            yield load["due"], set(load["kept"]) - loaded
        finally:
            self._node.tell("have read", loaded=sorted(loaded))

    def _merge(self, load: Message, afresh: bool, landing: Collection[int], flying: bool) -> Collection[int]:
        """Merge what the node offers; which shards were loaded."""
        carries = {shard: Carry(carry) for shard, carry in load["shards"]}
        self.counted += bool(landing) and all(carries.get(shard) is Carry.SUBTRACT for shard in landing)
        for shard, carry in carries.items():
            self._tally.merged(shard, carry)
        mixed: list[int] = []
        if afresh:
            carries = dict.fromkeys(range(len(self._layout.shards)), Carry.DROP)
        else:
            carries, mixed = self._carried(load, carries, landing)
        self._local.merge(carries, mixed, load["kept"], load["gone"])
        if load["commits"] != self.commits and not flying and not landing:
            self._rhythm.next_round()  # the round that is over was one without this peer
        self.commits, self.epoch, self.digest = load["commits"], load["epoch"], load["digest"]
        if self._config.mode == "async":
            self.trained, self.workers = load["trained"], max(1, load["workers"])
        return carries.keys()

    def _carried(
        self, load: Message, carries: dict[int, Carry], landing: Collection[int]
    ) -> tuple[dict[int, Carry], list[int]]:
        """How each shard's progress is carried over, and the shards in which local and global values are weighed."""
        mixed = self._mixed(landing, carries)
        if not self._config.local_share:  # nothing of the local values
            carries |= dict.fromkeys(mixed, Carry.DROP)
            mixed = []
        carries = {shard: self._simplified(shard, carry) for shard, carry in carries.items()}
        if self._tally.sent_at != self._tally.steps:
            for shard in set(load["gone"]) - set(mixed):
                if carries.get(shard, Carry.DROP) is not Carry.DROP:
                    # a wait was broken off, and training went on: of its progress only what was sent is known
                    self._tally.overwritten(shard, 1.0)
        lost = set(load["lost"]) & {*carries, *load["due"]}
        return carries | self._given_up(lost), [shard for shard in mixed if shard not in lost]

    def _mixed(self, landing: Collection[int], carries: dict[int, Carry]) -> list[int]:
        """The shards in which local and global values are weighed, where that is the rule of the run."""
        if self._config.merge != "mix":
            return []
        mixed = [shard for shard in landing if carries.get(shard) is Carry.SUBTRACT]
        for shard in mixed:
            self._tally.overwritten(shard, 1 - self._config.local_share)
        return mixed

    def _given_up(self, shards: Collection[int]) -> dict[int, Carry]:
        """The bases of these were changed in memory, so their progress is unknown: the global values are loaded."""
        for shard in shards:
            self._tally.overwritten(shard, 1.0)
            self._tally.merged(shard, Carry.DROP)
        self._local.forget_deltas(shards)
        return dict.fromkeys(shards, Carry.DROP)

    def _simplified(self, shard: int, carry: Carry) -> Carry:
        """Where nothing was trained since the sending, to take the contribution away leaves nothing: the global value
        is loaded to the bit.
        """
        return Carry.DROP if carry is Carry.SUBTRACT and self._tally.idle_since_sending(shard) else carry
