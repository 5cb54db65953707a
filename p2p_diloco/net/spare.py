"""Importing a package without a module that it imports and that nobody here uses.

Law: afterwards all is as if nothing had been spared: whoever asks for the module gets the real one, then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def spared(name: str) -> Iterator[None]:
    """Within, ``import name`` gives an empty module, unless the real one is loaded already."""
    empty = ModuleType(name)
    sys.modules.setdefault(name, empty)
    try:
        yield
    finally:
        if sys.modules.get(name) is empty:
            del sys.modules[name]
