"""`status`: takes snapshots of a run, and draws them.

Law: chooses the view and the interval; `observe` takes the snapshots and draws them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.loop import run
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.observe.snapshot import Snapshot

if TYPE_CHECKING:
    from p2p_diloco.net.interface import Records

log = logging.getLogger(__name__)


def show(
    flags: Mapping[str, object], config_file: Path | None, *, as_json: bool, once: bool, interval_s: float
) -> None:
    """Show the state of a run. With `once` show it one time, otherwise every `interval_s` seconds until an interrupt.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    if interval_s <= 0:
        raise UsageError("must be more than 0", key="--interval", value=interval_s, mend="choose e.g. 2")
    _, peer = settings_of(flags, config_file)
    check_initial_peers(peer.initial_peers)
    from rich.live import Live

    from p2p_diloco.observe.view import drawn, lines

    if as_json or once or not sys.stdout.isatty():
        look_s = None if once else interval_s
        run(_watch(peer, look_s, lambda seen: typer.echo(seen.to_json() if as_json else "\n".join(lines(seen)))))
    else:
        with Live(auto_refresh=False) as live:
            run(_watch(peer, interval_s, lambda seen: live.update(drawn(seen), refresh=True)))


async def _warn(peer: PeerConfig, seen: Snapshot, dht: Records) -> None:
    """Say that a run is open, or that it is private and can't be seen without an invitation."""
    from p2p_diloco.net.invited import on_this_machine
    from p2p_diloco.node.privacy import OPEN, is_private

    if await is_private(dht, peer.run_id):
        log.warning("the run %s is private: look at it with --invite", peer.run_id)
    elif seen.run.config is not None and not on_this_machine(peer):
        log.warning("the run %s is OPEN: %s", peer.run_id, OPEN)


async def _watch(peer: PeerConfig, interval_s: float | None, show_it: Callable[[Snapshot], None]) -> None:
    """Take and show a snapshot every `interval_s` seconds; None: only once."""
    from p2p_diloco.net.invited import read_invitation
    from p2p_diloco.observe.look import look, observer

    invitation = None if peer.invite is None else read_invitation(peer)
    async with observer(peer.initial_peers, invitation) as dht:
        seen = await look(dht, peer.run_id)
        if invitation is None:
            await _warn(peer, seen, dht)
        show_it(seen)
        while interval_s is not None:
            await asyncio.sleep(interval_s)
            show_it(await look(dht, peer.run_id))
