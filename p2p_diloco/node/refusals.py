"""The refused messages of other peers: how many each peer has sent, and why the last one was refused.

A check raises `Refusal` with the reason. `Inbox` alone catches it: it counts and logs the refusal here, and the
transport answers the sender with the reason.

Law: the table is bounded, and each peer in it gets one line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.board import clean

PEERS_MAX = 256
"""The most peers that are remembered; the one that was refused longest ago is forgotten first."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tally:
    """The refused messages of one peer."""

    count: int
    why: str
    """Why the last one was refused."""


class Refusals:
    """Counts refused messages by their sender: those that the node refuses with a reason, and those that the replica
    ignores."""

    def __init__(self) -> None:
        self.name_of: Callable[[str], str] = lambda peer: ""
        """The name in a peer's invitation to a private run; empty if the peer has none."""
        self._of: dict[str, Tally] = {}

    def count(self, peer: str, why: str) -> None:
        """Count a refused message of a peer. Only the first one of each peer is logged."""
        why, before = clean(why), self._of.pop(peer, None)  # it may quote the peer's message
        if before is None:
            name = self.name_of(peer)
            who = f"{name} ({peer})" if name else peer
            log.warning("refused a message of %s: %s (logged once for each peer; status has the last reason)", who, why)
        self._of[peer] = Tally(1 if before is None else before.count + 1, why)
        if len(self._of) > PEERS_MAX:
            del self._of[next(iter(self._of))]

    @contextmanager
    def counted(self, peer: str, *, but: Container[str] = ()) -> Iterator[None]:
        """If the block refuses a message of a peer, count the refusal, unless its reason is one of `but`."""
        try:
            yield
        except Refusal as refusal:
            if refusal.reason not in but:
                self.count(peer, refusal.reason)
            raise

    def newest(self, most: int) -> list[tuple[str, Tally]]:
        """The `most` peers whose messages were refused last, the newest last."""
        return list(self._of.items())[-most:]


@contextmanager
def refusing(kind: type[Any]) -> Iterator[None]:
    """If the block refuses a message of this kind, let the reason name the kind."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(f"the {kind.__name__} is refused: {refusal.reason}") from None
