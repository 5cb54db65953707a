"""`status`: takes snapshots of a run, and draws them.

Law: chooses the view and the interval; `observe` takes the snapshots and draws them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.logs import above
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.interrupts import run
from p2p_diloco.observe.snapshot import Snapshot

if TYPE_CHECKING:
    from p2p_diloco.net.interface import Records
    from p2p_diloco.node.curves import Point
    from p2p_diloco.observe.baseline import Baseline

log = logging.getLogger(__name__)


def show(
    flags: Mapping[str, object],
    config_file: Path | None,
    *,
    as_json: bool,
    once: bool,
    interval_s: float,
    baseline: Baseline | None,
    metrics: tuple[str, int] | None,
) -> None:
    """Show snapshots of a run: only one with `once`, otherwise one every `interval_s` seconds until an interrupt.
    `baseline`, `metrics`: as in `looks`.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    peer = watched(flags, config_file)
    from p2p_diloco.observe.view import lines

    async def print_each() -> None:
        async for seen in looks(peer, None if once else interval_s, baseline, metrics):
            typer.echo(seen.to_json() if as_json else "\n".join(lines(seen)))

    if as_json or once or not sys.stdout.isatty():
        run(print_each())
    else:
        run(_browse(looks(peer, interval_s, baseline, metrics)))


def check_once(
    flags: Mapping[str, object],
    config_file: Path | None,
    baseline: Baseline | None,
    stall_rounds: float,
    *,
    as_json: bool,
) -> int:
    """Look once and print each fault as a line, or all as one JSON list. Returns 1 if there is any, else 0.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    peer = watched(flags, config_file)
    from p2p_diloco.observe.check import faults

    logging.getLogger("p2p_diloco.observe.baseline").setLevel(logging.ERROR)  # a fault says the same

    async def looked() -> list[str]:
        return [fault async for seen in looks(peer, None, baseline) for fault in faults(seen, stall_rounds)]

    found = run(looked())
    for line in [json.dumps(found, ensure_ascii=False)] if as_json else found:
        typer.echo(line)
    return 1 if found else 0


def watched(flags: Mapping[str, object], config_file: Path | None) -> PeerConfig:
    """The settings with which to look at a run, some of whose peers answer.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    _, peer = settings_of(flags, config_file)
    check_initial_peers(peer.initial_peers)
    return peer


async def _browse(seen_in_turn: AsyncIterator[Snapshot]) -> None:
    """Draw the run on the terminal, and follow the keys, until `q` or an interrupt."""
    from rich.live import Live

    from p2p_diloco.observe.browsing import Browsing, keys
    from p2p_diloco.observe.view import Trend, page

    trend, newest, over = Trend(), list[Snapshot](), asyncio.Event()
    browsing = Browsing() if sys.stdin.isatty() else None

    with Live(auto_refresh=False) as live, above(live.console):

        def show() -> None:
            live.update(page(newest[-1], trend, browsing, live.console.height), refresh=True)

        async def follow() -> None:
            async for seen in seen_in_turn:
                newest[:] = [seen]
                trend.saw(seen)
                show()

        def press(key: str) -> None:
            if browsing is not None and newest:
                browsing.press(key, newest[-1].peers)
                over.set() if browsing.over else show()

        with keys(press):
            quits, follows = asyncio.create_task(over.wait()), asyncio.create_task(follow())
            try:
                await asyncio.wait({quits, follows}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                quits.cancel()
                follows.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follows


async def looks(
    peer: PeerConfig,
    interval_s: float | None,
    baseline: Baseline | None,
    metrics: tuple[str, int] | None = None,
    past: Callable[[Mapping[str, Sequence[Point]]], None] | None = None,
) -> AsyncIterator[Snapshot]:
    """Yield a snapshot of a run every `interval_s` seconds (None: only one), compared with the `baseline` if there is
    one. Prometheus, at the address and port `metrics` (None: nowhere), and the OTLP endpoint get the newest meanwhile.

    `past`: is called before the first one, with the curves of the run's peers up to now, by peer id.
    """
    from p2p_diloco.net.invited import read_invitation
    from p2p_diloco.node import curves
    from p2p_diloco.observe.look import look, observer

    invitation = None if peer.invite is None else read_invitation(peer)
    newest: list[Snapshot] = []
    async with contextlib.AsyncExitStack() as ending:
        if metrics is not None or peer.otlp_endpoint is not None:
            from p2p_diloco.node.metrics import PeersCollector, told

            peers = PeersCollector(peer.run_id, lambda: [one for seen in tuple(newest) for one in seen.peers])
            ending.enter_context(told(metrics, peer.otlp_endpoint, peers, *([baseline] if baseline else [])))
        dht = await ending.enter_async_context(observer(peer.initial_peers, invitation))
        seen = await look(dht, peer.run_id)
        if invitation is None:
            await _warn(peer, seen, dht)
        if past is not None:
            past(await curves.read(dht, peer.run_id, seen.time))
        while True:
            newest[:] = [seen if baseline is None else baseline.beside(seen)]
            yield newest[0]
            if interval_s is None:
                return
            await asyncio.sleep(interval_s)
            seen = await look(dht, peer.run_id)


async def _warn(peer: PeerConfig, seen: Snapshot, dht: Records) -> None:
    """Say that a run is open, or that it is private and can't be seen without an invitation."""
    from p2p_diloco.net.invitation_used import on_this_machine
    from p2p_diloco.node.privacy import OPEN, is_private

    if await is_private(dht, peer.run_id):
        log.warning("the run %s is private: look at it with --invite", peer.run_id)
    elif seen.run.config is not None and not on_this_machine(peer):
        log.warning("the run %s is OPEN: %s", peer.run_id, OPEN)
