"""Chooses the path of a stream to a peer: the direct path, or a path through a relay if the direct dial fails or takes
long.

Law: a direct path is tried first, unless it is known to be broken. A peer that announces no relay and refuses every
dial is not sought through relays: its machine answers, and no process listens there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from p2p_diloco.addresses import leads_over_a_relay
from p2p_diloco.net.attempts import first
from p2p_diloco.net.circuits import Circuits, Opened, abort_stream
from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.reach import answers
from p2p_diloco.net.streams import stop

HEAD_START_S = 0.5
"""Seconds that a direct dial has before relays are asked as well."""
RELAYED_FOR_S = 30.0
"""When a relay was faster than a direct dial, direct dials to that peer have no head start for this many seconds."""
LOOK_EVERY_S = 5.0
"""Seconds between two looks whether a broken direct path works again, and the deadline for each."""
AVOIDED_S = 600.0
"""The longest time for which a direct path is avoided."""
REMEMBERED_MAX = 4096
"""The most peers remembered because a relay was faster, and the most remembered because their direct path is broken."""


class Paths:
    """Opens streams to other peers, directly or through relays. `linked` returns the peers that this peer is connected
    to: each of them may serve as a relay."""

    def __init__(self, daemon: Daemon, circuits: Circuits, linked: Callable[[], Iterable[str]]) -> None:
        self._daemon, self._circuits, self._linked = daemon, circuits, linked
        self._relayed_until: dict[str, float] = {}
        self._broken: dict[str, asyncio.Task[None]] = {}  # peers whose direct path is broken, with the watch over it

    async def open(self, peer: str, protocol: str, *, timeout_s: float, around: bool = False) -> Opened:
        """Open a stream to a peer; returns it with the multiaddr at which the peer was found. With `around` it uses
        only relays, because the direct path may be broken. If a relay then reaches the peer, later streams avoid the
        direct path until the peer answers on it again.

        Raises:
            Unreachable: neither path leads to the peer. `refused`: as far as can be told, the peer has ended.
        """
        if around or peer in self._broken:
            try:
                opened = await self._circuits.open(peer, protocol, self._circuits.relays_to(peer, self._linked()))
            except Unreachable as error:
                if around or error.refused:
                    raise
            else:
                self._avoid(peer)
                return opened
        clock = asyncio.get_running_loop().time
        relays = self._circuits.relays_to(peer, self._linked())
        sought = bool(relays and self._circuits.relays_of(peer))
        reasons: list[str] = []

        async def direct() -> Opened:
            try:
                return await self._daemon.open_stream(peer, protocol, timeout_s=timeout_s)
            except Unreachable as error:
                raise Unreachable(str(error), refused=error.refused and not sought) from None

        def failed(error: BaseException) -> None:
            if not isinstance(error, Unreachable) or error.refused:
                raise error
            reasons.append(str(error))

        ways: list[Callable[[], Coroutine[Any, Any, Opened]]] = [direct]
        if relays:
            ways.append(partial(self._circuits.open, peer, protocol, relays))
        head_start_s = 0.0 if clock() < self._relayed_until.get(peer, 0.0) else HEAD_START_S
        try:
            opened = await first(ways, stagger_s=head_start_s, discard=abort_stream, failed=failed)
        except Unreachable as error:
            if error.refused:
                raise
            raise Unreachable("; ".join(reasons)) from None
        self._remember(peer, clock() + RELAYED_FOR_S if leads_over_a_relay(opened[1]) else 0.0)
        return opened

    async def close(self) -> None:
        await stop(*self._broken.values())

    def _avoid(self, peer: str) -> None:
        if peer not in self._broken and len(self._broken) < REMEMBERED_MAX:
            self._broken[peer] = asyncio.create_task(self._watch(peer))

    async def _watch(self, peer: str) -> None:
        """Check a broken direct path until the peer answers on it, or until `AVOIDED_S` have passed. Then later streams
        use the direct path again."""
        try:
            for _ in range(round(AVOIDED_S / LOOK_EVERY_S)):
                await asyncio.sleep(LOOK_EVERY_S)
                if await answers(self._daemon, peer, LOOK_EVERY_S):
                    return
        finally:
            del self._broken[peer]

    def _remember(self, peer: str, until: float) -> None:
        self._relayed_until.pop(peer, None)
        if until:
            if len(self._relayed_until) >= REMEMBERED_MAX:
                del self._relayed_until[next(iter(self._relayed_until))]
            self._relayed_until[peer] = until
