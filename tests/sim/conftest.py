"""Simulated worlds by kind and seed, and a way to break the protocol on purpose."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tests.sim.check import KINDS, check, drawn
from tests.sim.world import World


def playing(kind: str) -> Callable[[int], None]:
    def play(seed: int) -> None:
        check(World(seed, drawn(seed, kind)))

    return play


@pytest.fixture
def kinds() -> dict[str, Callable[[int], None]]:
    return {kind: playing(kind) for kind in KINDS}


@pytest.fixture
def sabotage() -> Iterator[Callable[[type | ModuleType, str, str, str], None]]:
    """``sabotage(owner, method, old, new)``: run the method with ``new`` in place of ``old`` in its source, until the
    test ends.

    The old text must occur exactly once, so that a sabotage fails if the code has changed.
    """
    undo: list[Callable[[], None]] = []

    def rewrite(owner: type | ModuleType, name: str, old: str, new: str) -> None:
        before = inspect.getattr_static(owner, name)
        function = before.fget if isinstance(before, property) else before
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(old) == 1, f"{owner.__name__}.{name} says {old!r} {source.count(old)} times"
        made: dict[str, object] = {}
        code = compile("from __future__ import annotations\n" + source.replace(old, new), f"<{name}>", "exec")
        exec(code, function.__globals__, made)
        if isinstance(owner, ModuleType):  # other modules have imported the function: change its code
            code_before, function.__code__ = function.__code__, made[name].__code__
            undo.append(lambda: setattr(function, "__code__", code_before))
            return
        setattr(owner, name, made[name])
        undo.append(lambda: setattr(owner, name, before))

    yield rewrite
    for restore in undo:
        restore()
