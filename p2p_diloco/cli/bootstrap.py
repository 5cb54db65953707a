"""`bootstrap`: serves the DHT and a relay, and prints the command line with which peers join.

Law: all checks that need no Hivemind come before it is loaded. The bootstrap serves until a signal ends it, and has
neither a model nor a run.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from p2p_diloco.addresses import by_reach, is_loopback, peer_of
from p2p_diloco.cli.flags import with_settings
from p2p_diloco.cli.reach import check_free, check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import NodeDied, UsageError
from p2p_diloco.interrupts import run
from p2p_diloco.settings import flag, prepare_identity_path

if TYPE_CHECKING:
    from p2p_diloco.net.dht import DhtPeer

log = logging.getLogger(__name__)


@with_settings(
    ("host_maddrs", "announce_maddrs", "initial_peers", "identity_path", "relay_mbit"),
    {
        "host_maddrs": "Addresses to listen on, instead of --host and --port.",
        "initial_peers": "Other bootstraps of the same swarm.",
        "identity_path": "File that keeps the identity, and so the address, across restarts; unset: a new one.",
        "relay_mbit": "Mbit/s to relay between peers that can't reach each other; 0: none. [dim](default 50)[/dim]",
    },
    config=False,
)
def bootstrap(
    flags: dict[str, Any],
    host: str = Option("127.0.0.1", help="Address to listen on; 0.0.0.0 listens on every interface.", metavar="IP"),
    port: int = Option(0, min=0, max=65535, help="TCP port to listen on; 0 lets the system choose.", metavar="N"),
    run_key: list[str] | None = Option(
        None,
        help="Relay for the private runs with these public keys only; unset: for every run.",
        metavar="HEX...",
    ),
    as_json: bool = Option(False, "--json", help="Print the addresses as one JSON object."),
) -> None:
    """Start a bootstrap (a peer of the DHT, and a relay), and print the command line with which peers join."""
    runs = [_public_key(text) for text in run_key or ()]
    listen = {} if "host_maddrs" in flags else {"host_maddrs": (_listen_address(host, port),)}
    peer = PeerConfig.model_validate({**listen, **flags})
    if peer.identity_path is not None:
        prepare_identity_path(peer.identity_path)
    for address in peer.host_maddrs:
        check_free(address, key=None if listen else flag("host_maddrs"))
    check_initial_peers(peer.initial_peers)
    from p2p_diloco.net.dht import DhtPeer  # not in the loop, which would handle no signal meanwhile

    run(_serve(peer, runs, as_json, DhtPeer))


def announcement(addresses: Sequence[str], *, as_json: bool) -> str:
    """The text that `bootstrap` prints: the command line for joining from other machines, then the one for joining
    from this machine. With `as_json`, one JSON object."""
    ordered = by_reach(addresses)
    outside = [address for address in ordered if not is_loopback(address)]
    inside = [address for address in ordered if is_loopback(address)]
    if as_json:
        peer_id = peer_of(ordered[0])
        return json.dumps({"peer_id": peer_id, "maddrs": ordered, "join": _join_line(outside or inside)})
    told = []
    if outside:
        told += ["# from other machines:", _join_line(outside)]
    if inside:
        told += ["# from this machine alone (loopback):", _join_line(inside)]
    told.append("# the first peer founds the run: there, add --found, or settings of the run such as --sync-every 100")
    return "\n".join(told)


def _listen_address(host: str, port: int) -> str:
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        mend = "give an address of this machine, such as 0.0.0.0 for all of them"
        raise UsageError("is no IP address", key="--host", value=host, mend=mend) from None
    return f"/ip{address.version}/{address}/tcp/{port}"


def _public_key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        mend = 'give the 64 letters of "public" in the run\'s .key file'
        raise UsageError("is no public key of a run", key="--run-key", value=text, mend=mend)
    return key


def _join_line(addresses: Sequence[str]) -> str:
    return f"p2p-diloco join --initial-peers {' '.join(addresses)}"


async def _serve(peer: PeerConfig, runs: Sequence[bytes], as_json: bool, of: type[DhtPeer]) -> None:
    died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(why: str) -> None:
        if not died.done():
            died.set_exception(NodeDied(why, mend="start the bootstrap again"))

    seed = await of.create(peer, on_daemon_death=fail)
    from p2p_diloco.net.hello import any_run
    from p2p_diloco.net.relay import Relay

    relay = Relay(seed.daemon, peer.relay_mbit, partial(any_run, among=frozenset(runs) or None))
    try:
        await relay.start()
        typer.echo(announcement(seed.daemon.addresses, as_json=as_json))
        if all(is_loopback(address) for address in seed.daemon.addresses):
            log.warning(
                "this bootstrap listens on loopback alone, so only peers on this machine can join; for others, start "
                "it with --host 0.0.0.0"
            )
        await died
    finally:
        await relay.close()
        await seed.close()
