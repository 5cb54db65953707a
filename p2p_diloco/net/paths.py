"""The path of a stream to a peer: directly, or through a relay if that fails or takes long.

Law: a direct path is always tried first. A peer that announces no relay and refuses every dial is not sought through
relays: its machine answers, and no process listens there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from p2p_diloco.net.circuits import Circuits, Opened, abort_stream
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.interface import Unreachable

HEAD_START_S = 0.5
"""Seconds that a direct dial has before relays are asked as well."""
RELAYED_FOR_S = 30.0
"""Seconds after a relay was faster than a direct dial, in which a direct dial to the peer has no head start."""
REMEMBERED_MAX = 4096
"""The most peers of which it is remembered that a relay was faster."""


class Paths:
    """Opens one peer's streams. `linked` returns the peers that this one exchanges messages with: they may relay."""

    def __init__(self, daemon: Daemon, circuits: Circuits, linked: Callable[[], Iterable[str]]) -> None:
        self._daemon, self._circuits, self._linked = daemon, circuits, linked
        self._relayed_until: dict[str, float] = {}

    async def open(self, peer: str, protocol: str, *, timeout_s: float) -> Opened:
        """Open a stream to a peer; returns it with the multiaddr at which the peer was found.

        Raises:
            Unreachable: neither path leads to the peer. `refused`: as far as can be told, the peer has ended.
        """
        clock = asyncio.get_running_loop().time
        announced = bool(self._circuits.relays_of(peer))
        direct = asyncio.create_task(self._daemon.open_stream(peer, protocol, timeout_s=timeout_s))
        attempts = {direct}
        try:
            head_start_s = 0.0 if clock() < self._relayed_until.get(peer, 0.0) else HEAD_START_S
            await asyncio.wait(attempts, timeout=head_start_s)
            if direct.done() and ((why := _failure(direct)) is None or (why.refused and not announced)):
                return direct.result()
            relays = self._circuits.relays_to(peer, self._linked())
            if not relays:
                return await direct
            relayed = asyncio.create_task(self._circuits.open(peer, protocol, relays))
            attempts.add(relayed)
            pending = {task for task in attempts if not task.done()}
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (why := _failure(task)) is None:
                        self._remember(peer, clock() + RELAYED_FOR_S if task is relayed else 0.0)
                        return task.result()
                    if task is relayed and why.refused:
                        raise why
            why = _failure(direct)
            assert why is not None
            raise Unreachable(f"{why}; {_failure(relayed)}", refused=why.refused and not announced)
        finally:
            await _abandon(attempts)

    def _remember(self, peer: str, until: float) -> None:
        self._relayed_until.pop(peer, None)
        if until:
            if len(self._relayed_until) >= REMEMBERED_MAX:
                del self._relayed_until[next(iter(self._relayed_until))]
            self._relayed_until[peer] = until


def _failure(attempt: asyncio.Task[Opened]) -> Unreachable | None:
    """The failure of an attempt that has ended; None: it succeeded. Raises any other error."""
    error = attempt.exception()
    if error is not None and not isinstance(error, Unreachable):
        raise error
    return error


async def _abandon(attempts: set[asyncio.Task[Opened]]) -> None:
    """Cancel the attempts that go on; they end their streams themselves."""
    going_on = [task for task in attempts if not task.done()]
    for task in going_on:
        task.cancel()
    for outcome in await asyncio.gather(*going_on, return_exceptions=True):
        if not isinstance(outcome, BaseException):
            abort_stream(outcome)
