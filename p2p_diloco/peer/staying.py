"""Keeps the state of a run here for a while, when a peer leaves that has trained alone: the state would go with it.

Law: bounded in time, and neither ^C nor a fault of the node keeps the peer from leaving after that.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.interrupts import exit_code
from p2p_diloco.peer.node_client import NodeClient

LOOK_EVERY_S = 0.5

log = logging.getLogger("p2p_diloco")


def stay(
    node: NodeClient,
    run_id: str,
    within_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """If no other peer has held the run's state lately, wait until one has fetched it from this peer's node. Give up
    after `within_s`, and at ^C."""
    give_up_at = clock() + within_s
    try:
        if _shared(node):
            return
        log.warning(
            "this peer has trained the run %s alone: it keeps the run's state here for exit_timeout=%g s at most, for "
            "a peer that comes now; ^C skips this",
            run_id,
            within_s,
        )
        while clock() < give_up_at:
            sleep(LOOK_EVERY_S)
            if _shared(node):
                log.info("another peer has the state of the run %s now", run_id)
                return
        log.warning("no other peer has come to the run %s; with start_peers=2 a run waits for a second peer", run_id)
    except P2PDilocoError as error:
        log.debug("the node can't keep the run's state: %s", error)
    except KeyboardInterrupt as interrupt:
        if exit_code(interrupt) != 128 + signal.SIGINT:
            raise


def _shared(node: NodeClient) -> bool:
    """Whether another peer, which is live or has gone lately, has held the run's state."""
    return bool(node.ask("ask", "told")["shared"])
