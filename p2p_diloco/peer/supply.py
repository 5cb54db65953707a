"""The data of one trainer: what the node is told with each merge request, and what the node answers.

Law: on the training thread. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2p_diloco.core.spans import Spans
from p2p_diloco.peer.shard import Shard


class Supply:
    """The shards of one trainer."""

    def __init__(self) -> None:
        self.shards: dict[str, Shard] = {}

    def stepped(self) -> None:
        """An inner step was made."""
        for shard in self.shards.values():
            shard.stepped()

    def say(self, sync_every: int) -> dict[str, tuple[Spans, int]]:
        """What the node is told with a merge request."""
        return {name: shard.say(sync_every) for name, shard in self.shards.items()}

    def hear(self, told: Sequence[dict[str, Any]]) -> None:
        """Take over what the node tells at the end of a merge."""
        for one in told:
            if (shard := self.shards.get(one["name"])) is not None:
                shard.hear(one)
