"""Batches of a shared data set, for a library that asks for its loader before the callback has entered the run.

Law: the peer is asked for its part of the data only when the first batch is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.peer import Peer
from p2p_diloco.peer.shard import Shard, ShardLoader


class SharedLoader:
    """This peer's batches of a data set that all peers share. It has no length, and each loop goes on where the last
    one ended."""

    def __init__(
        self,
        peer: Callable[[], Peer | AbsentPeer],
        dataset: Any,
        sharing: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        """`sharing`: arguments of `Peer.shard`; `arguments`: those of `Shard.loader`."""
        self._peer, self._dataset, self._sharing, self._arguments = peer, dataset, sharing, arguments
        self._made: tuple[Peer | AbsentPeer, Shard, ShardLoader] | None = None

    def __iter__(self) -> Iterator[Any]:
        peer = self._peer()
        if self._made is None or self._made[0] is not peer:
            shard = peer.shard(self._dataset, **self._sharing)
            self._made = peer, shard, shard.loader(**self._arguments)
        return iter(self._made[2])

    @property
    def endless(self) -> bool:
        """Whether the data has no end."""
        return self._sharing["epochs"] is None

    @property
    def complete(self) -> bool:
        """Whether all peers together have used all of the data, as of this peer's last merge."""
        return self._made is not None and self._made[1].complete
