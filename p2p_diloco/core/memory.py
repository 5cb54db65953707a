"""A limit on the number of other peers' payloads that this replica stores, over all shards. Contributions take the room
first; commits get what is left."""

from __future__ import annotations

from collections.abc import Sequence

from .logs import Logs, PerShard
from .rules import Rules


class Memory:
    """Decides when contributions must wait, and which commits are dropped to free memory."""

    def __init__(self, me: str, rules: Rules, logs: Logs) -> None:
        self.me, self.rules, self.logs = me, rules, logs
        self._open = PerShard(logs, lambda log: bool(log.round.inbox) or None)  # shards whose round has contributions
        self._commits = dict[int, None]()  # shards whose stored commit was written by another peer, oldest first

    def crowded(self, shard: int) -> bool:
        """Whether a contribution to this shard should wait, because this replica stores too many payloads. A
        contribution to the first shard with an open round never waits: peers send shards in order, so this round closes
        next and frees memory."""
        if self.rules.asynchronous or self.logs.collected < self.rules.payloads_kept:
            return False
        return shard > min(self._open.now(), default=shard)

    def moved(self, shards: Sequence[int]) -> None:
        """Handle new versions of these shards: record that the commits which made them are stored. If too many payloads
        are stored, drop the commits that have been stored for longest. Keep a commit whose author may be gone."""
        for shard in shards:
            self._commits.pop(shard, None)
            last = self.logs.look_at(shard).outgoing.last
            if last is not None and last.aggregator != self.me:
                self._commits[shard] = None
        while self._commits and len(self._commits) + self.logs.collected > self.rules.payloads_kept:
            shard = next(iter(self._commits))
            del self._commits[shard]
            self.logs[shard].outgoing.let_go()
