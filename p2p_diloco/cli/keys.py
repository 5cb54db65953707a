"""Reads single keys from the terminal while something else is under way.

Law: at the end of the block the terminal's settings are restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator

from p2p_diloco.observe.browsing import DOWN, ENTER, ESCAPE, UP

_NAMED = {"\x1b[A": UP, "\x1bOA": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "\r": ENTER, "\n": ENTER, "\x1b": ESCAPE}
READ_BYTES = 64


@contextlib.contextmanager
def keys(press: Callable[[str], None]) -> Iterator[None]:
    """Within the block, call `press` in the event loop with the name of each key: a letter, or one of the names in
    `observe.browsing`. Without a terminal at stdin there are no keys."""
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
    """The names of the keys that make a terminal send this text. Unknown sequences are left out."""
    found = list[str]()
    while text:
        sequence = next((one for one in _NAMED if len(one) > 1 and text.startswith(one)), None)
        if sequence is None and text.startswith("\x1b["):
            return found
        one = sequence or text[0]
        text = text[len(one) :]
        if one in _NAMED or one.isprintable():
            found.append(_NAMED.get(one, one))
    return found
