"""Bounds what the requests of other members of the DHT cost this peer. Anybody may be one.

Law: honest requests are answered as Hivemind answers them: this package asks for one key at a time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from p2p_diloco.net.hivemind_library import DHTProtocol, dht_pb2

KEYS_MAX = 4
"""The most keys that one request may ask for."""
FOUND_BYTES_MAX = 3 * 2**20
"""The most bytes of one answer; a message carries 4 MiB."""
BYTES_PER_S, BURST_BYTES = 4 * 2**20, 16 * 2**20
"""What one member may get: so many bytes a second, and so many at once."""
SENDERS_MAX = 4096
"""The most members that are counted; if there are more, all begin anew."""

Find = Callable[[Any, Any, Any], Awaitable[Any]]


class Allowance:
    """How many bytes each member of the DHT may still get."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}  # by member: bytes, and when they were counted

    def left(self, sender: str) -> float:
        """The bytes that a member may get now; none if not above 0."""
        used, since = self._used.get(sender, (0.0, 0.0))
        return BURST_BYTES - max(0.0, used - BYTES_PER_S * (self._clock() - since))

    def got(self, sender: str, count: int) -> None:
        if sender not in self._used and len(self._used) >= SENDERS_MAX:
            self._used.clear()
        self._used[sender] = BURST_BYTES - self.left(sender) + count, self._clock()


def bounded(find: Find, allowance: Allowance) -> Find:
    """Hivemind's handler of requests for keys, with limits. A key that is named again and again is looked up once. A
    request beyond a limit is answered with an error."""

    @wraps(find)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        keys, sender = list(dict.fromkeys(request.keys)), str(context.remote_id)
        if len(keys) > KEYS_MAX:
            raise ValueError(f"the request names {len(keys)} keys, at most {KEYS_MAX} are allowed")
        if allowance.left(sender) <= 0:
            raise ValueError("the sender has asked for too much lately")
        answered = await find(self, dht_pb2.FindRequest(keys=keys, peer=request.peer), context)
        allowance.got(sender, nbytes := answered.ByteSize())
        if nbytes > FOUND_BYTES_MAX:
            raise ValueError(f"the records under these keys have {nbytes} bytes, at most {FOUND_BYTES_MAX} are sent")
        return answered

    return answer


def bound_requests() -> None:
    """Set the limits for all members of the DHT in this process. Hivemind registers its handlers by the name of their
    class, so no subclass could take the class's place."""
    if not hasattr(DHTProtocol.rpc_find, "__wrapped__"):
        DHTProtocol.rpc_find = bounded(DHTProtocol.rpc_find, Allowance())
