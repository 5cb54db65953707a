"""A way to break the protocol on purpose."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def sabotage() -> Iterator[Callable[[Any, str, str], None]]:
    """``sabotage(place, old, new)``: run this function, method or property with ``new`` in place of ``old`` in its
    source, until the test ends.

    The old text must occur exactly once, so that a sabotage fails if the code has changed.
    """
    undo: list[Callable[[], None]] = []

    def rewrite(place: Any, old: str, new: str) -> None:
        function = getattr(place, "fget", place)
        name, source = function.__name__, textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{function.__qualname__} says {old!r} {source.count(old)} times"
        made: dict[str, Any] = {}
        code = compile("from __future__ import annotations\n" + source.replace(old, new), f"<{name}>", "exec")
        exec(code, function.__globals__, made)
        before, function.__code__ = function.__code__, getattr(made[name], "fget", made[name]).__code__
        undo.append(lambda: setattr(function, "__code__", before))

    yield rewrite
    for restore in undo:
        restore()
