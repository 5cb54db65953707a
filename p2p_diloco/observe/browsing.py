"""What the person in front of the screen has chosen: the order of the peers, the marked peer, and whether only this
peer is shown. Reads the keys, too.

Law: keys in, choices out; nothing here draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from p2p_diloco.node.status import PeerStatus

UP, DOWN, ENTER, ESCAPE = "up", "down", "enter", "escape"
_NAMED = {"\x1b[A": UP, "\x1bOA": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "\r": ENTER, "\n": ENTER, "\x1b": ESCAPE}
_KEY = re.compile(r"\x1b[\[O][\d;]*[A-Za-z~]|.", re.DOTALL)
READ_BYTES = 64

ORDERS: dict[str, Callable[[PeerStatus], tuple[Any, ...]]] = {
    "name": lambda peer: (),
    "state": lambda peer: (peer.state,),
    "epoch": lambda peer: (-(peer.epoch or 0),),
    "speed": lambda peer: (-(peer.steps_per_second or 0.0),),
    "loss": lambda peer: (peer.loss is None, peer.loss),
    "waiting": lambda peer: (-(peer.waiting_s or 0.0),),
    "sent": lambda peer: (-(peer.bytes_sent or 0),),
}
"""The sort keys of peers, by the name of the order. Peers with equal keys stay in the order of their names."""
KEYS = "s: sort   ↑ ↓: choose a peer   enter: look at it   q: quit"
KEYS_OF_ONE = "↑ ↓: the peer before or after   esc: all peers   q: quit"


@dataclass(slots=True)
class Browsing:
    """The choices so far."""

    order: str = "name"
    marked: str | None = None
    """The id of the chosen peer; None: none is chosen."""
    alone: bool = False
    """Whether the chosen peer alone is shown."""
    over: bool = False
    """Whether to quit."""

    def sort(self, peers: Sequence[PeerStatus]) -> list[PeerStatus]:
        """The peers in the chosen order."""
        return sorted(peers, key=ORDERS[self.order])

    def chosen(self, peers: Sequence[PeerStatus]) -> PeerStatus | None:
        """The chosen peer; None if none is chosen, or if it is not among `peers`."""
        return next((peer for peer in peers if peer.peer_id == self.marked), None)

    def press(self, key: str, peers: Sequence[PeerStatus]) -> None:
        """Change the choices as `key` says; a key without a meaning does nothing. `peers`: those on the screen, in any
        order."""
        match key:
            case "q":
                self.over = True
            case "s":
                names = list(ORDERS)
                self.order = names[(names.index(self.order) + 1) % len(names)]
            case "up" | "k" | "down" | "j" if peers:
                ids = [peer.peer_id for peer in self.sort(peers)]
                step = 1 if key in (DOWN, "j") else -1
                first = 0 if step == 1 else len(ids) - 1
                at = (ids.index(self.marked) + step) % len(ids) if self.marked in ids else first
                self.marked = ids[at]
            case "enter":
                self.alone = self.chosen(peers) is not None
            case "escape":
                self.alone, self.marked = False, self.marked if self.alone else None


@contextlib.contextmanager
def keys(press: Callable[[str], None]) -> Iterator[None]:
    """Within the block, call `press` in the event loop with the name of each key: a letter, or one of `UP`, `DOWN`,
    `ENTER` and `ESCAPE`. At its end the terminal's settings are restored. Without a terminal at stdin there are no
    keys."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        if not (text := os.read(terminal, READ_BYTES).decode(errors="ignore")):
            loop.remove_reader(terminal)  # the terminal is gone
        for key in named(text):
            press(key)

    try:
        tty.setcbreak(terminal)
        loop.add_reader(terminal, read)
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def named(text: str) -> list[str]:
    """The names of the keys that make a terminal send this text. A sequence without a name stands for itself."""
    return [_NAMED.get(key, key) for key in _KEY.findall(text)]
