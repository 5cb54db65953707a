"""Lets the threads of OpenMP sleep while they wait, in processes that this command line starts.

Law: reads and returns environment variables; OpenMP reads them once, when torch is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

CHOSEN = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""The variables with which a user chooses how many threads there are, or how they wait."""

log = logging.getLogger("p2p_diloco.join")


def sleeping_threads(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add for a process that trains; none if the user has chosen any of `CHOSEN`.

    By default the threads that wait for each other keep their cores busy. Beside a node, or beside other peers on the
    same machine, a thread that has work then waits for a core, and training takes many times as long.
    """
    if any(name in environment for name in CHOSEN):
        return {}
    log.info("torch's threads sleep while they wait (OMP_WAIT_POLICY=PASSIVE); set that or OMP_NUM_THREADS to choose")
    return {"OMP_WAIT_POLICY": "PASSIVE"}
