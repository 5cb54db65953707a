"""`bootstrap`: a seed of the DHT, and the line that peers join with.

Law: what can be checked before Hivemind is loaded is checked before. It serves until a signal ends it, and holds no
model and no run.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from p2p_diloco.addresses import (
    by_reach,
    check_listen_address,
    check_peer_address,
    is_loopback,
    split_addresses,
)
from p2p_diloco.cli.loop import run
from p2p_diloco.cli.reach import check_free, check_initial_peers
from p2p_diloco.errors import NodeDied, UsageError
from p2p_diloco.settings import prepare_identity_path

if TYPE_CHECKING:
    from p2p_diloco.net.dht import DhtPeer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BootstrapPlan:
    """Where a bootstrap listens and who it is."""

    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]
    initial_peers: tuple[str, ...]
    identity_path: Path | None

    @classmethod
    def of(
        cls,
        host: str,
        port: int,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str],
        initial_peers: Sequence[str],
        identity_path: Path | None,
    ) -> BootstrapPlan:
        """The plan that the flags describe, checked.

        Raises:
            UsageError: a host or a port can't be read. AddressError: an address can't. ConfigError: the
            identity's file or the port can't be used. NoBootstrapReached: no other bootstrap answers.
        """
        listen = split_addresses(host_maddrs) or (_listen_address(host, port),)
        plan = cls(
            tuple(check_listen_address(address, key="--host-maddrs") for address in listen),
            tuple(
                check_listen_address(address, key="--announce-maddrs") for address in split_addresses(announce_maddrs)
            ),
            tuple(check_peer_address(address, key="--initial-peers") for address in split_addresses(initial_peers)),
            identity_path,
        )
        if identity_path is not None:
            prepare_identity_path(identity_path)
        for address in plan.host_maddrs:
            check_free(address, key="--host-maddrs" if host_maddrs else None)
        check_initial_peers(plan.initial_peers)
        return plan


def serve(plan: BootstrapPlan, *, as_json: bool) -> None:
    """Serve until a signal comes.

    Raises:
        NoBootstrapReached: none of the other bootstraps answered. ConfigError: it can't listen there after all.
        NodeDied: libp2p's daemon has ended.
    """
    from p2p_diloco.net.dht import DhtPeer  # takes seconds; before the loop, which handles signals late

    run(_serve(plan, as_json, DhtPeer))


def announcement(addresses: Sequence[str], *, as_json: bool) -> str:
    """What is printed: the lines to paste, those for other machines first, or one JSON object."""
    ordered = by_reach(addresses)
    outside = [address for address in ordered if not is_loopback(address)]
    inside = [address for address in ordered if is_loopback(address)]
    if as_json:
        peer_id = ordered[0].rpartition("/p2p/")[2]
        return json.dumps({"peer_id": peer_id, "maddrs": ordered, "join": _join_line(outside or inside)})
    told = []
    if outside:
        told += ["# from other machines:", _join_line(outside)]
    if inside:
        told += ["# from this machine alone (loopback):", _join_line(inside)]
    return "\n".join(told)


def _listen_address(host: str, port: int) -> str:
    if not 0 <= port <= 65535:
        raise UsageError("is no port", key="--port", value=port, mend="choose 1 to 65535, or 0 for any")
    try:
        address = ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        mend = "give an address of this machine, such as 0.0.0.0 for all of them"
        raise UsageError("is no IP address", key="--host", value=host, mend=mend) from None
    return f"/ip{address.version}/{address}/tcp/{port}"


def _join_line(addresses: Sequence[str]) -> str:
    return f"p2p-diloco join --initial-peers {' '.join(addresses)}"


async def _serve(plan: BootstrapPlan, as_json: bool, of: type[DhtPeer]) -> None:
    died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(why: str) -> None:
        if not died.done():
            died.set_exception(NodeDied(why, mend="start the bootstrap again"))

    seed = await of.create(
        initial_peers=plan.initial_peers,
        host_maddrs=plan.host_maddrs,
        announce_maddrs=plan.announce_maddrs,
        identity_path=None if plan.identity_path is None else str(plan.identity_path),
        on_daemon_death=fail,
    )
    try:
        typer.echo(announcement(seed.daemon.addresses, as_json=as_json))
        if all(is_loopback(address) for address in seed.daemon.addresses):
            log.warning("listening on loopback alone: only this machine can join; --host 0.0.0.0 opens it to others")
        await died
    finally:
        await seed.close()
