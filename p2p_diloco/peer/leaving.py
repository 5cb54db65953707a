"""Ends the training of a peer that leaves: its last exchange, a copy of the global parameters, and a warning if inner
steps are lost.

Law: bounded in time, and a fault of the run never keeps a peer from leaving. Only a normal end waits for other peers;
after an exception or a signal nothing is exchanged.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import GaveUpWaiting, P2PDilocoError
from p2p_diloco.interrupts import UNWINDING, exit_code
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.node_client import NodeClient
from p2p_diloco.peer.session import AnyHook

TRIES = 3
"""The most exchanges of the whole model, because a round may close without this peer's contribution."""
AT_ONCE_S = 5.0
"""Deadline for the node's answers after an exception or a signal."""

log = logging.getLogger("p2p_diloco")


def broken_off(error: BaseException | None) -> str:
    """The exception that ended a `with` block, as a text for the log. Empty after a normal end of training, and after
    `sys.exit()` with status 0."""
    match error:
        case None:
            return ""
        case SystemExit(code=None | 0):
            return ""
        case SystemExit(code=int(code)) if code - 128 in UNWINDING:
            return f"{signal.Signals(code - 128).name} ended training"
        case P2PDilocoError():
            return "an error ended training"
        case KeyboardInterrupt():
            return "an interrupt ended training"
        case _:
            return f"{type(error).__name__} ended training; catch it inside the `with` block to exchange them"


def leave(hook: AnyHook, local: PeerConfig, why: str) -> None:
    """End the training of a peer that leaves the run now. `why`: the reason if training ended abnormally; empty after a
    normal end. After a normal end every rank of a peer must make this call."""
    try:
        if not why or isinstance(hook, Hook):
            hook.leave(lambda own: _end(own, local, why))
        else:
            _warn(hook.uncounted, local, why)
    except P2PDilocoError as error:
        _warn(hook.uncounted, local, f"{why or 'the last exchange failed'}: {error}")


def _end(hook: Hook, local: PeerConfig, why: str) -> None:
    """Make the last exchange, warn if inner steps stay uncounted, and keep the global parameters."""
    if why:
        hook.patience.hurry(AT_ONCE_S)
    elif local.on_exit == "sync":
        why = _last_exchange(hook, local.exit_timeout)
    else:
        why = f"on_exit={local.on_exit}; call force_sync() before the `with` block ends, or choose on_exit=sync"
    hook.keep_values()  # if the node has ended, `leave` warns
    _warn(hook.uncounted, local, why)


def _last_exchange(hook: Hook, within_s: float) -> str:
    """Exchange the whole model, until all inner steps are counted. Returns the reason if that failed."""
    hook.patience.leave_within(within_s)
    try:
        hook.catch_up()
        if hook.uncounted:
            text = "leaving: a last exchange for this peer's %d uncounted inner steps, within exit_timeout=%g s"
            log.info(text, hook.uncounted, within_s)
        for _ in range(TRIES):
            if not hook.uncounted:
                return ""
            hook.synchronise()
    except GaveUpWaiting as error:
        return error.sentence
    except KeyboardInterrupt as interrupt:
        if exit_code(interrupt) != 128 + signal.SIGINT:
            raise
        return "^C skipped the last exchange"
    return "no round has counted them; let this peer leave after the other peers' next exchange"


def _warn(steps: int, local: PeerConfig, why: str) -> None:
    """Warn that inner steps are lost for the run, unless `on_exit` says that they may be dropped."""
    if steps and local.on_exit != "drop":
        log.warning("%d of this peer's inner steps are in no commit, so the run goes on without them: %s", steps, why)


# -- staying for a newcomer

LOOK_EVERY_S = 0.5


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
