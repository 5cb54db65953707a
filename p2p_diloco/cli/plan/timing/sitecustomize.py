"""Times the optimizer steps of a script that `plan --measure` runs. Python loads this file at the start of each process
of the command, because its folder is in PYTHONPATH.

Law: only the standard library. torch is not loaded before the script loads it. Only the first optimizer that steps
counts.
"""

from __future__ import annotations

import os
import sys
import threading
import time

TOLD_IN = os.environ.get("PLAN_TIMES_FILE", "")
MODULE = "torch.optim.optimizer"
LOOK_EVERY_S = 0.01


def watch() -> None:
    """Hook the steps of torch's optimizers once the script has loaded them."""
    while (hook := getattr(sys.modules.get(MODULE), "register_optimizer_step_post_hook", None)) is None:
        time.sleep(LOOK_EVERY_S)
    hook(Steps())


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
    threading.Thread(target=watch, daemon=True).start()
