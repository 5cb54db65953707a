"""Bounds what the requests of other members of the DHT cost this peer. Anybody may be one.

Law: honest requests are answered as Hivemind answers them: this package asks for one key at a time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from p2p_diloco.net.hivemind_library import DHTProtocol, dht_pb2
from p2p_diloco.net.shares import ASKERS_MAX, Budget

KEYS_MAX = 4
"""The most keys that one request may ask for."""
STORED_KEYS_MAX, STORED_BYTES_MAX = 256, 2**20
"""The most keys and bytes of one request to store records. Hivemind hands over to a new member what that one is to
keep; if that is more, the new member gets it from those that store it anew."""
FOUND_BYTES_MAX = 3 * 2**20
"""The most bytes of one answer; a message carries 4 MiB."""
BYTES_PER_S, BURST_BYTES = 4 * 2**20, 16 * 2**20
"""What one member may get: so many bytes a second, and so many at once."""
CPU_S_PER_S, BURST_CPU_S = 0.1, 0.5
"""What the requests of one member may cost this peer: so much processor time a second, and so much at once."""
IDS_MAX, IDS_S = 4, 60.0
"""How often a member may have another id of the DHT in so many seconds. It has one for each of its starts."""

Handler = Callable[[Any, Any, Any], Awaitable[Any]]


class Ids:
    """Which id of the DHT each member has. One that invented many, all nearer to some keys than any other member's,
    would be the only one that is asked for these keys; and each new id has this peer hand over what it stores."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[str, tuple[bytes, list[float]]] = {}  # by member: its id, and when it got each of its last ones

    def has(self, sender: str, node_id: bytes) -> bool:
        """Whether a member has this id, or may have it from now on."""
        last, changed = self._of.get(sender, (b"", []))
        if node_id == last:
            return True
        lately = [when for when in changed if self._clock() - when < IDS_S]
        if len(lately) >= IDS_MAX:
            return False
        if len(self._of) >= ASKERS_MAX:
            self._of.clear()
        self._of[sender] = node_id, [*lately, self._clock()]
        return True

    def admits(self, victim: Any, request: Any, context: Any) -> bool:
        """Whether the sender of a request to a member, `victim`, may have the id that it names. From then on it is in
        the routing table under this id alone."""
        if not (node_id := request.peer.node_id):
            return True
        if not self.has(str(context.remote_id), node_id):
            return False
        before = victim.routing_table.get(peer_id=context.remote_id)
        if before is not None and before.to_bytes() != node_id:
            del victim.routing_table[before]
        return True


def pinged(ping: Handler, ids: Ids) -> Handler:
    """Hivemind's handler of pings. A sender that may not have its id is answered, and not met."""

    @wraps(ping)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        return await ping(self, request if ids.admits(self, request, context) else dht_pb2.PingRequest(), context)

    return answer


def cheap(handler: Handler, budget: Budget, ids: Ids) -> Handler:
    """One of Hivemind's handlers that wait for nothing, with a limit of each sender's processor time. A request beyond
    it, or of a sender that may not have its id, is answered with an error."""

    @wraps(handler)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        sender = str(context.remote_id)
        if budget.left(sender, time.monotonic()) <= 0:
            raise ValueError("the sender's requests have cost too much lately")
        if not ids.admits(self, request, context):
            raise ValueError("the sender has had too many ids lately")
        began = time.thread_time()
        try:
            return await handler(self, request, context)
        finally:
            budget.spend(sender, time.thread_time() - began, time.monotonic())

    return answer


def bounded(find: Handler, budget: Budget) -> Handler:
    """Hivemind's handler of requests for keys, with limits. A key that is named again and again is looked up once. A
    request beyond a limit is answered with an error."""

    @wraps(find)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        keys, sender = list(dict.fromkeys(request.keys)), str(context.remote_id)
        if len(keys) > KEYS_MAX:
            raise ValueError(f"the request names {len(keys)} keys, at most {KEYS_MAX} are allowed")
        if budget.left(sender, time.monotonic()) <= 0:
            raise ValueError("the sender has asked for too much lately")
        answered = await find(self, dht_pb2.FindRequest(keys=keys, peer=request.peer), context)
        budget.spend(sender, nbytes := answered.ByteSize(), time.monotonic())
        if nbytes > FOUND_BYTES_MAX:
            raise ValueError(f"the records under these keys have {nbytes} bytes, at most {FOUND_BYTES_MAX} are sent")
        return answered

    return answer


def few(store: Handler) -> Handler:
    """Hivemind's handler of requests to store records, with a limit of each: it checks all before it does anything
    else."""

    @wraps(store)
    async def answer(self: Any, request: Any, context: Any) -> Any:
        if len(request.keys) > STORED_KEYS_MAX or request.ByteSize() > STORED_BYTES_MAX:
            raise ValueError(f"at most {STORED_KEYS_MAX} keys and {STORED_BYTES_MAX} bytes are stored at once")
        return await store(self, request, context)

    return answer


def bound_requests() -> None:
    """Set the limits for all members of the DHT in this process. Hivemind registers its handlers by the name of their
    class, so no subclass could take the class's place."""
    if not hasattr(DHTProtocol.rpc_find, "__wrapped__"):
        cpu, ids = Budget(BURST_CPU_S, CPU_S_PER_S), Ids()
        found = bounded(DHTProtocol.rpc_find, Budget(BURST_BYTES, BYTES_PER_S))
        DHTProtocol.rpc_find = cheap(found, cpu, ids)
        DHTProtocol.rpc_store = cheap(few(DHTProtocol.rpc_store), cpu, ids)
        DHTProtocol.rpc_ping = pinged(DHTProtocol.rpc_ping, ids)
