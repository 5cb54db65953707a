"""Imports torch into the node's process, without those of its parts that no node uses.

Law: changes when these parts are loaded, and nothing else of torch; only the node's process imports this, before torch.

These parts give the shapes of results to graphs that are traced, and some operations to GPUs. They take a quarter of
the time in which torch is imported, and 18 MB. They are loaded at the first question for one of their names; in a node,
which computes on the CPU and traces nothing, nobody asks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

LATER = ("torch._meta_registrations", "torch._native")
"""The second one imports the first one in versions of torch that have it."""


class _Later(MetaPathFinder):
    """Finds the modules in `LATER`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in LATER else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


_later = _Later()
sys.meta_path.insert(0, _later)
import torch  # noqa: E402

sys.meta_path.remove(_later)

__all__ = ["torch"]
