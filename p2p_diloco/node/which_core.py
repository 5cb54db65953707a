"""Which core a node runs on: the log of shards, or that of fragments, which is about to take its place.

Law: set by tests alone; all peers of a run have the same.
"""

from __future__ import annotations

import os

VARIABLE, FRAGMENTS = "P2P_DILOCO_CORE", "fragments"


def on_fragments() -> bool:
    """Whether this process's node runs on the log of fragments."""
    return os.environ.get(VARIABLE) == FRAGMENTS
