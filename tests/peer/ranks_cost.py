"""What a step costs that several ranks make together, and in which nothing is exchanged. Run it by hand:

    python tests/peer/ranks_cost.py [ranks]

Each rank is a process; the hook does nothing. Printed are the medians of five times 2000 steps.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time

from p2p_diloco.peer.hook import Standing
from p2p_diloco.peer.rank0 import OtherRanks, Rank0Hook
from p2p_diloco.peer.rank_n import Rank0Client, RankNHook

STEPS, TIMES = 2000, 5


class Still:
    """A hook whose steps do nothing."""

    standing = Standing()

    def report(self, loss: float | None, samples: int | None) -> None: ...

    def step(self) -> None: ...


def main(count: int) -> None:
    pairs = [socket.socketpair() for _ in range(count - 1)]
    children = []
    for rank, (_, theirs) in enumerate(pairs, start=1):
        child = os.fork()
        if not child:
            following = RankNHook(Rank0Client(rank, theirs), None, lambda told: None)  # type: ignore[arg-type]
            for _ in range(STEPS * TIMES):
                following.step()
            os._exit(0)
        children.append(child)
    leading = Rank0Hook(Still(), OtherRanks([ours for ours, _ in pairs]), lambda: None)  # type: ignore[arg-type]
    took_us = []
    for _ in range(TIMES):
        began = time.perf_counter()
        for _ in range(STEPS):
            leading.step()
        took_us.append((time.perf_counter() - began) / STEPS * 1e6)
    for child in children:
        os.waitpid(child, 0)
    print(f"{count} ranks: {statistics.median(took_us):.0f} µs a step")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
