"""Spreads element-wise work on one slice over a few threads.

Law: results have the same bits for any number of threads, because every element is computed by the same operations. The
threads compute in numpy, and in torch on pieces that it doesn't divide, which both let other threads run meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from p2p_diloco.tensors import flat as flats

USUAL_MAX = 8


def usual() -> int:
    """The usual number of threads: a quarter of the cores that this process may use, from 1 to `USUAL_MAX`. The other
    cores are for training."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(USUAL_MAX, cores // 4))


class Threads:
    """A fixed number of threads, the caller's own included. `count` 1: all work is done by the caller."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._pool = None if count == 1 else ThreadPoolExecutor(count - 1, thread_name_prefix="tensors")

    def over(self, numel: int, work: Callable[[slice], None]) -> None:
        """Call `work` for ranges that together cover `numel` elements once, and return when all are done. A range
        begins at a multiple of `flat.BLOCK`. Raises an error of `work`."""
        blocks = -(-numel // flats.BLOCK)
        each = -(-blocks // self.count) * flats.BLOCK
        self.all(*(lambda a=a: work(slice(a, min(a + each, numel))) for a in range(0, numel, each)))

    def all(self, *tasks: Callable[[], None]) -> None:
        """Carry out all tasks, and return when all are done. Raises the error of the first that failed."""
        if self._pool is None or len(tasks) < 2:
            for task in tasks:
                task()
            return
        others = [self._pool.submit(task) for task in tasks[1:]]
        try:
            tasks[0]()
        finally:
            errors = [other.exception() for other in others]  # waits for each: they use the caller's memory
        for error in errors:
            if error is not None:
                raise error


ALONE = Threads()
"""No further threads."""
