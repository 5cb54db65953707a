"""Times the optimizer steps of a script that `plan --measure` runs. Python loads this file at the start of each process
of the command, because its folder is in PYTHONPATH.

Law: only the standard library. torch is not loaded before the script loads it. Only the first optimizer that steps
counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

TOLD_IN = os.environ.get("PLAN_TIMES_FILE", "")
MODULE = "torch.optim.optimizer"


class Watching(MetaPathFinder):
    """Finds the module of torch's optimizers, and hooks their steps once it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by the import system for each module. None for other modules: the next finders look for them."""
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                module.register_optimizer_step_post_hook(Steps())

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - the types forbid it
        return spec


class Steps:
    """Writes the time of each step of the first optimizer that steps, one time a line, into this process's file."""

    def __init__(self) -> None:
        self._first: object = None
        self._file = -1

    def __call__(self, optimizer: object, args: object, kwargs: object) -> None:
        if self._first is None:
            self._first = optimizer
            self._file = os.open(f"{TOLD_IN}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if optimizer is self._first:
            cuda = getattr(sys.modules.get("torch"), "cuda", None)
            if cuda is not None and cuda.is_initialized():
                cuda.synchronize()  # the device may be several steps behind
            os.write(self._file, f"{time.perf_counter()}\n".encode())


if TOLD_IN:
    sys.meta_path.insert(0, Watching())
