"""`python -m p2p_diloco.cli.bench.node FILE ARGUMENTS...`: a node as any other, whose arithmetic is timed.

Law: what the node does is untouched. How long each kind of arithmetic has taken so far stands in FILE, as JSON, for
the peer that started it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from p2p_diloco.cli.bench.parts import CODEC, OUTER_STEP

PART_OF = {
    "encode": CODEC,
    "objection": CODEC,
    "average": OUTER_STEP,
    "apply": OUTER_STEP,
    "accept": OUTER_STEP,
}
"""What the loop asks of the tensors (`node.work.TensorWork`), by the part of a round that it is."""
BYTES_MAX = 256


class Times:
    """Seconds so far, in a file that is always whole."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._so_far = dict.fromkeys(PART_OF.values(), 0.0)
        self._write()

    def timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The method, whose calls are added up."""

        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self._so_far[part] += time.perf_counter() - began
                self._write()

        return call

    def _write(self) -> None:
        os.pwrite(self._fd, json.dumps(self._so_far).encode().ljust(BYTES_MAX), 0)


def read_times(path: Path) -> dict[str, float]:
    """What a node has written; nothing before it has begun."""
    content = path.read_text() if path.exists() else ""
    times: dict[str, float] = json.loads(content) if content.strip() else {}
    return times


def main() -> int:
    """Be a node; the exit status."""
    from p2p_diloco.node import __main__ as program
    from p2p_diloco.node.work import TensorWork

    times = Times(sys.argv.pop(1))
    for name, part in PART_OF.items():
        setattr(TensorWork, name, times.timed(getattr(TensorWork, name), part))
    return program.main()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)  # as a node does
