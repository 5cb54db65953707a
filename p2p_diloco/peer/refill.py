"""Gets more data for a trainer that has none: it exchanges at once.

Law: on the training thread, between two inner steps. Waits only between two exchanges that bring no data; the waits
grow, up to a bound. Ends when all data is used or the run has ended.
"""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import Dataset

from p2p_diloco.config import RunConfig
from p2p_diloco.core.leases import TABLES_MAX, DataSet
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.node_client import NodeClient
from p2p_diloco.peer.session import Session
from p2p_diloco.peer.shard import Shard

LOOK_EVERY_S = 0.05
"""Seconds between two looks for a newer state during a wait."""


def open_shard(session: Session, data: DataSet, dataset: Dataset[Any], run_id: str) -> Shard:
    """Make this peer's part of a data set, and register the data set at the node. Return the part if there is one.

    Raises:
        ConfigError: the data set of this name differs from the earlier one here or in the run, or there are too many.
        UsageError: this peer has several processes, or doesn't train.
    """
    hook, node = session.hook, session.node
    if not isinstance(hook, Hook) or node is None:
        mend = "let DistributedSampler(dataset, seed=peer.seed) divide this peer's data among its ranks"
        raise UsageError("only a peer of one process that trains can share data", mend=mend)
    shards = hook.supply.shards
    if (known := shards.get(data.name)) is not None:
        return known.again(data, dataset)
    if len(shards) >= TABLES_MAX:
        mend = f"use at most {TABLES_MAX} data sets in a run"
        raise ConfigError("is one data set too many", key="name", value=data.name, mend=mend)
    refill = Refill(hook, node.client, session.config, len(session.plan.fragments))
    shard = Shard(data, dataset, f"{run_id}/{data.name}", refill)
    hook.supply.add(shard, node.client.ask("ask", "told"))
    return shard


class Refill:
    """Gets more data for the shards of one trainer."""

    def __init__(self, hook: Hook, node: NodeClient, config: RunConfig, fragments: int) -> None:
        self._hook, self._node, self._fragments = hook, node, fragments
        self._shortest_s, self._longest_s = config.heartbeat_interval, config.heartbeat_timeout
        self._hurries = config.mode == "sync"  # a newcomer asks the others to exchange now, once

    def __call__(self, shard: Shard) -> bool:
        """Get more stock for the shard. Returns False if there will be none."""
        hook, wait_s = self._hook, 0.0
        hook.catch_up()
        while not shard.free:
            if shard.complete or hook.over:
                hook.merge()
                return False
            mark = shard.mark
            for _ in range(self._fragments):  # the fragment that brings data may not be due first
                if self._hurries and hook.epoch:
                    self._node.tell("nudge", goal=hook.commits + 1)
                self._hurries = False
                hook.catch_up()
                hook.exchange_early()
                if shard.free:
                    break
            if not shard.free and shard.left == 0 and any(one.unstepped for one in hook.supply.shards.values()):
                shard.rest()  # others may be waiting only for batches that this loop has and no step has used
                return False
            if shard.mark != mark:
                wait_s = 0.0
            elif not shard.complete:
                wait_s = min(self._longest_s, 2 * wait_s or self._shortest_s)
                self._wait(shard, wait_s)
        self._hurries = False
        return True

    def _wait(self, shard: Shard, seconds: float) -> None:
        """Wait this many seconds, or until there is a newer state. Then merge."""
        why = ": other peers hold all samples that are not used yet" if shard.left == 0 else ""
        self._node.report(f"this peer waits for samples of {shard.data.name!r}{why}")
        until = time.monotonic() + seconds
        with self._hook.beside():
            while time.monotonic() < until and not self._hook.is_due:
                time.sleep(LOOK_EVERY_S)
        self._hook.merge()
