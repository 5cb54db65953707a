"""Asks members of the DHT for their time, without joining the DHT. An answer shows that the member runs, how soon it
answers, and how its clock differs.

Law: asks and measures; joins no DHT and stores nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from p2p_diloco.net.daemon import Daemon
from p2p_diloco.net.hivemind_library import DHTProtocol, PeerID, dht_pb2
from p2p_diloco.net.interface import Unreachable
from p2p_diloco.net.private_files import IdentityFile
from p2p_diloco.net.reasons import likely_reason
from p2p_diloco.net.signing import SigningKey

PADDING_BYTES_MAX = 3 << 20
"""The longest padding of a question; the daemon takes messages of at most 4 MiB."""
NO_ANSWER = "no answer"
"""The words in the error of `ask` if nothing came back in time; all other failures have other words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A peer's answer to `ask`: how soon it came, and how the peer's clock differs."""

    took_s: float
    """Seconds from the question to the answer."""
    clock_ahead_s: float
    """Seconds by which the peer's clock is ahead of this machine's."""


@contextlib.asynccontextmanager
async def visiting(
    host_maddrs: Sequence[str], announce_maddrs: Sequence[str] = (), *, start_s: float
) -> AsyncIterator[tuple[Daemon, SigningKey]]:
    """Run a daemon with a new identity, which joins no DHT, for the length of a `with` block; gives the daemon and the
    key of its identity. Without `host_maddrs` the daemon listens nowhere.

    Raises:
        as `Daemon.start`.
    """
    identity = IdentityFile.claim(None)
    try:
        daemon = await Daemon.start(
            identity_path=str(identity.path),
            host_maddrs=host_maddrs,
            announce_maddrs=announce_maddrs,
            client_mode=not host_maddrs,
            timeout_s=start_s,
            on_death=None,
        )
    finally:
        identity.release()
    try:
        yield daemon, identity.key
    finally:
        await daemon.close()


async def ask(daemon: Daemon, peer: str, *, timeout_s: float, padding_bytes: int = 0) -> Answer:
    """Ask a member of the DHT for its time. The question carries `padding_bytes` zero bytes, which the member ignores.

    Raises:
        Unreachable: no answer came in time, or the peer is not a member of the DHT.
    """
    assert padding_bytes <= PADDING_BYTES_MAX
    request = dht_pb2.PingRequest()  # names no node, so the peer doesn't count the asker as a peer of the DHT
    request.auth.nonce = bytes(padding_bytes)  # a field that peers without an authorizer don't read
    asked_at, began = time.time(), time.perf_counter()
    try:
        answer = await _stub(daemon, peer).rpc_ping(request, timeout=timeout_s)
    except asyncio.TimeoutError:
        raise Unreachable(f"{peer}: {NO_ANSWER} within {timeout_s:g} s") from None
    except Exception as error:  # Hivemind raises exceptions of many kinds for a stranger's answer
        raise Unreachable(f"{peer}: {likely_reason(error)}") from None
    took_s = time.perf_counter() - began
    return Answer(took_s, float(answer.dht_time) - (asked_at + took_s / 2))


def _stub(daemon: Daemon, peer: str) -> Any:
    """Make the object that sends DHT requests to a peer. `DHTProtocol`'s own `get_stub` needs a member of the DHT, so
    the parent class's method is called."""
    return super(DHTProtocol, DHTProtocol).get_stub(daemon.p2p, PeerID.from_base58(peer))
