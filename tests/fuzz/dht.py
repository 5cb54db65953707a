"""Feeds damaged requests to a member of the DHT, over libp2p, and looks whether it serves and reads as before."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from random import Random
from typing import Any
from unittest.mock import patch

import msgpack

from p2p_diloco.config import PeerConfig
from p2p_diloco.net.dht import DhtPeer
from p2p_diloco.net.hivemind_library import DHTID, PeerID, dht_pb2
from tests.fuzz.mutations import mutated

KEY = "key"
ANSWER_S, LOOK_EVERY = 60.0, 200


def seeds(peer: DhtPeer) -> dict[str, Sequence[bytes]]:
    """Right requests, by the name of their handler."""
    me, key = peer._node.protocol.node_info, DHTID.generate(source=KEY).to_bytes()
    until = time.time() + 300.0
    store = dht_pb2.StoreRequest(
        keys=[key, key], subkeys=[msgpack.packb(b"x"), msgpack.packb(b"y")], values=[msgpack.packb(b"v")] * 2,
        expiration_time=[until] * 2, in_cache=[False] * 2, peer=me,
    )  # fmt: skip
    whole = dht_pb2.StoreRequest(
        keys=[key], subkeys=[peer._node.protocol.IS_DICTIONARY], values=[msgpack.packb([])], expiration_time=[until],
        in_cache=[True], peer=me,
    )  # fmt: skip
    return {
        "rpc_ping": [dht_pb2.PingRequest(peer=me, validate=True).SerializeToString()],
        "rpc_store": [store.SerializeToString(), whole.SerializeToString()],
        "rpc_find": [dht_pb2.FindRequest(keys=[key, bytes(20)], peer=me).SerializeToString()],
    }


async def play(seconds: float, seed: int) -> tuple[int, list[str]]:
    """Feed requests for so long; returns how many, and the faults: what the victim's loop raised outside of a handler,
    and records that were lost. The sender may have any number of ids, or most requests would be refused for theirs."""
    with patch("p2p_diloco.net.records.IDS_MAX", 10**9):
        return await _play(seconds, seed)


async def _play(seconds: float, seed: int) -> tuple[int, list[str]]:
    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: faults.append(repr(told)[:500]))
    victim = await DhtPeer.create(PeerConfig())
    eve = await DhtPeer.create(PeerConfig(initial_peers=victim.daemon.addresses))
    there, rng, count = PeerID.from_base58(victim.peer_id), Random(seed), 0
    known = seeds(eve)
    try:
        assert await victim.store(KEY, "mine", b"1", 3600.0)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not faults:
            count += 1
            handler = rng.choice(list(known))
            asking: Any = eve.daemon.p2p._client.call_unary_handler(
                there, f"DHTProtocol.{handler}", mutated(rng, known[handler])
            )
            try:
                await asyncio.wait_for(asking, ANSWER_S)
            except asyncio.TimeoutError:
                faults.append(f"request {count} of seed {seed} has no answer")
            except Exception:  # the handler's error is answered as one
                pass
            if count % LOOK_EVERY == 0 and "mine" not in await victim.fetch(KEY):
                faults.append(f"after {count} requests of seed {seed} the victim doesn't find its own record")
    finally:
        with contextlib.suppress(asyncio.TimeoutError):
            for one in (eve, victim):
                await asyncio.wait_for(one.close(), 10.0)
    return count, faults
