"""Keys: each one changes what is shown as the line at the foot of the screen says."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
import termios
from typing import Any

import pytest

from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.view import ORDERS, Browsing, keys, named

PEERS = [
    PeerStatus(name="a", peer_id="id-a", state="training", epoch=3, loss=2.0, steps_per_second=1.0, waiting_s=5.0),
    PeerStatus(name="b", peer_id="id-b", state="joining", bytes_sent=10),
    PeerStatus(name="c", peer_id="id-c", state="waiting", epoch=4, loss=1.0, steps_per_second=2.0, bytes_sent=5),
]


@pytest.mark.parametrize(
    ("order", "names"),
    [("name", "abc"), ("state", "bac"), ("epoch", "cab"), ("speed", "cab"), ("loss", "cab"), ("waiting", "abc"),
     ("sent", "bca")],
)  # fmt: skip
def test_each_order_puts_what_matters_first(order: str, names: str) -> None:
    """The greatest numbers first, but the least loss; peers without a figure last."""
    assert "".join(peer.name for peer in Browsing(order).sort(PEERS)) == names


def test_s_goes_through_all_orders_and_q_quits() -> None:
    browsing, seen = Browsing(), []
    for _ in ORDERS:
        browsing.press("s", PEERS)
        seen.append(browsing.order)
    assert seen == [*list(ORDERS)[1:], "name"]
    assert not browsing.over
    browsing.press("q", PEERS)
    assert browsing.over


def test_arrows_choose_a_peer_in_the_order_on_the_screen() -> None:
    """Beyond the last one comes the first; without peers nothing happens."""
    browsing = Browsing("epoch")
    chosen = []
    for key in ("down", "down", "j", "down", "up", "k"):
        browsing.press(key, PEERS)
        chosen.append(browsing.marked)
    assert chosen == ["id-c", "id-a", "id-b", "id-c", "id-b", "id-a"]
    empty = Browsing()
    empty.press("down", [])
    assert empty.marked is None


def test_enter_opens_the_chosen_peer_and_escape_closes_it() -> None:
    browsing = Browsing()
    browsing.press("enter", PEERS)
    assert not browsing.alone
    for key, alone, marked in (("down", False, "id-a"), ("enter", True, "id-a"), ("escape", False, "id-a")):
        browsing.press(key, PEERS)
        assert (browsing.alone, browsing.marked) == (alone, marked)
    browsing.press("escape", PEERS)
    assert browsing.marked is None


@pytest.mark.parametrize(
    ("text", "names"),
    [("s", ["s"]), ("\x1b[A\x1b[B", ["up", "down"]), ("\r", ["enter"]), ("\x1b", ["escape"]),
     ("\x1bOBq", ["down", "q"]), ("\x1b[15~", ["\x1b[15~"])],
)  # fmt: skip
def test_keys_are_named(text: str, names: list[str]) -> None:
    """What a terminal sends for arrows, enter and escape; the sequence of another key has no meaning."""
    assert named(text) == names


def test_keys_come_at_once_and_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key needs no Enter after it, and after the block the terminal echoes again."""
    ours, theirs = pty.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs, "r"))
    before = termios.tcgetattr(theirs)

    async def press() -> list[Any]:
        pressed: asyncio.Queue[str] = asyncio.Queue()
        with keys(pressed.put_nowait):
            assert not termios.tcgetattr(theirs)[3] & termios.ECHO
            os.write(ours, b"s")
            first = await asyncio.wait_for(pressed.get(), 10.0)
            os.write(ours, b"\x1b[A")
            return [first, await asyncio.wait_for(pressed.get(), 10.0)]

    assert asyncio.run(press()) == ["s", "up"]
    assert termios.tcgetattr(theirs)[3] == before[3]
    os.close(ours)
