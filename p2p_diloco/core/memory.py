"""How many payloads of others this replica keeps, over all shards: contributions first, then commits for laggards."""

from __future__ import annotations

from collections.abc import Sequence

from .logs import Logs, PerShard
from .rules import Rules


class Memory:
    def __init__(self, me: str, rules: Rules, logs: Logs) -> None:
        self.me, self.rules, self.logs = me, rules, logs
        self._open = PerShard(logs, lambda log: bool(log.round.inbox) or None)  # rounds that wait for contributions
        self._commits = dict[int, None]()  # the shards whose last commit is another's, and kept; the oldest is first

    def crowded(self, shard: int) -> bool:
        """Whether so many wait that a contribution to this shard should come later. Never to the first of the shards
        that wait for contributions: peers send in the order of shards, so that one makes room."""
        if self.rules.asynchronous or self.logs.collected < self.rules.payloads_kept:
            return False
        return shard > min(self._open.now(), default=shard)

    def moved(self, shards: Sequence[int]) -> None:
        """These shards have new versions. Of others' commits the newest stay, as many as there is room for, and those
        whose author may be gone."""
        for shard in shards:
            self._commits.pop(shard, None)
            last = self.logs.look_at(shard).outgoing.last
            if last is not None and last.aggregator != self.me:
                self._commits[shard] = None
        while self._commits and len(self._commits) + self.logs.collected > self.rules.payloads_kept:
            shard = next(iter(self._commits))
            del self._commits[shard]
            self.logs[shard].outgoing.let_go()
