"""What each story shows: without its rule it does not end as it should. tests/sim/test_sabotage.py breaks the rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import pytest

Story = TypeVar("Story", bound=Callable[..., None])
_SABOTAGES: list[Any] = []


def fails_if(place: Any, old: str, new: str, *arguments: Any, **named: Any) -> Callable[[Story], Story]:
    """The story, with these arguments, must fail if this function says ``new`` in place of ``old``."""

    def remember(story: Story) -> Story:
        told = partial(story, *arguments, **named)
        _SABOTAGES.append(pytest.param(place, old, new, told, id=story.__name__.removeprefix("test_")))
        return story

    return remember


def sabotages() -> list[Any]:
    """Return (place, old text, new text, story) of each rule whose loss a story here shows."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        import_module(f"tests.core.{path.stem}")
    return _SABOTAGES
