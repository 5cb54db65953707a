"""`status`: a run looked at again and again, and drawn.

Law: chooses a view and the pace; `observe` looks and draws.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

import typer

from p2p_diloco.cli.join import needs_initial_peers
from p2p_diloco.cli.loop import run
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.observe.snapshot import Snapshot
from p2p_diloco.settings import read_settings


def show(
    flags: Mapping[str, object], config_file: Path | None, *, as_json: bool, once: bool, interval_s: float
) -> None:
    """Show a run until interrupted, or once.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    if interval_s <= 0:
        raise UsageError("must be more than 0", key="--interval", value=interval_s, mend="choose e.g. 2")
    _, peer = read_settings(flags, os.environ, config_file)
    needs_initial_peers(peer)
    check_initial_peers(peer.initial_peers)
    if not (as_json or once) and sys.stdout.isatty():
        run(_draw(peer, interval_s))
    else:
        run(_print(peer, as_json, once, interval_s))


async def _looks(peer: PeerConfig, interval_s: float) -> AsyncGenerator[Snapshot, None]:
    from p2p_diloco.observe.look import look, open_eyes

    transport = await open_eyes(peer.run_id, peer.initial_peers)
    try:
        while True:
            yield await look(transport, peer.run_id)
            await asyncio.sleep(interval_s)
    finally:
        await transport.close()


async def _print(peer: PeerConfig, as_json: bool, once: bool, interval_s: float) -> None:
    from p2p_diloco.observe.view import lines

    async with aclosing(_looks(peer, interval_s)) as looks:
        async for seen in looks:
            typer.echo(seen.to_json() if as_json else "\n".join(lines(seen)))
            if once:
                return


async def _draw(peer: PeerConfig, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from p2p_diloco.observe.view import drawn

    with Live(console=Console(), auto_refresh=False, screen=False) as live:
        async with aclosing(_looks(peer, interval_s)) as looks:
            async for seen in looks:
                live.update(drawn(seen), refresh=True)
