"""The connections on which Hivemind sends requests to the daemon. When a request fails, Hivemind leaves its connection
open; this file closes it.

Law: knows connections, not what is asked on them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_opened: ContextVar[list[asyncio.StreamWriter] | None] = ContextVar("_opened", default=None)


def noted(opens: Callable[[], Awaitable[Connection]]) -> Callable[[], Awaitable[Connection]]:
    """Wrap the function that opens connections, so that `closed_on_failure` knows them."""

    async def open_and_note() -> Connection:
        reader, writer = await opens()
        if (opened := _opened.get()) is not None:
            opened.append(writer)
        return reader, writer

    return open_and_note


@contextlib.contextmanager
def closed_on_failure() -> Iterator[None]:
    """Close the connections that were opened in this block if the block raises. Otherwise the garbage collector would
    close them in the thread in which it happens to run, but only the event loop's own thread may do that."""
    opened: list[asyncio.StreamWriter] = []
    token = _opened.set(opened)
    try:
        yield
    except BaseException:
        for writer in opened:
            writer.close()
        raise
    finally:
        _opened.reset(token)
