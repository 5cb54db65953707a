"""`status`: takes snapshots of a run, and draws them.

Law: chooses the view and the interval; `observe` takes the snapshots and draws them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.logs import above
from p2p_diloco.cli.loop import run
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.observe.snapshot import Snapshot

if TYPE_CHECKING:
    from p2p_diloco.net.interface import Records
    from p2p_diloco.node.curves import Point

Compare = Callable[[Snapshot], Snapshot]
"""Turns a snapshot of the run into the one that is shown, compared with a baseline if there is one."""
Address = tuple[str, int]

log = logging.getLogger(__name__)


def show(
    flags: Mapping[str, object],
    config_file: Path | None,
    *,
    as_json: bool,
    once: bool,
    interval_s: float,
    compare: Compare,
    metrics: Address | None = None,
) -> None:
    """Take snapshots of a run, and show what `compare` makes of each: only one with `once`, otherwise one every
    `interval_s` seconds until an interrupt. `metrics`: the address and port at which Prometheus gets metrics meanwhile;
    None: nowhere.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    peer = watched(flags, config_file)
    from p2p_diloco.observe.view import lines

    with telling(peer, metrics, compare) as told:
        if as_json or once or not sys.stdout.isatty():
            say = Snapshot.to_json if as_json else lambda seen: "\n".join(lines(seen))
            run(watch(peer, None if once else interval_s, lambda seen: typer.echo(say(told(seen)))))
        else:
            run(_browse(peer, interval_s, told))


def check_once(
    flags: Mapping[str, object], config_file: Path | None, compare: Compare, stall_rounds: float, *, as_json: bool
) -> int:
    """Look once and print each fault as a line, or all as one JSON list. Returns 1 if there is any, else 0.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    peer = watched(flags, config_file)
    from p2p_diloco.observe.check import faults

    logging.getLogger("p2p_diloco.observe.baseline").setLevel(logging.ERROR)  # a fault says the same
    found: list[str] = []
    run(watch(peer, None, lambda seen: found.extend(faults(compare(seen), stall_rounds))))
    for line in [json.dumps(found, ensure_ascii=False)] if as_json else found:
        typer.echo(line)
    return 1 if found else 0


def beside(path: Path | None, bound: float, tokens_per_sample: float | None) -> Compare:
    """The function that compares each snapshot with the baseline in the file `path`. None: it returns snapshots
    unchanged. `bound`: it warns of a loss that is above the baseline's by more than this fraction.

    Raises:
        UsageError, ConfigError: the file or a number can't be used.
    """
    from p2p_diloco.observe.baseline import Baseline

    return (lambda seen: seen) if path is None else Baseline.read(path, bound, tokens_per_sample).beside


def watched(flags: Mapping[str, object], config_file: Path | None) -> PeerConfig:
    """The settings with which to look at a run, some of whose peers answer.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    _, peer = settings_of(flags, config_file)
    check_initial_peers(peer.initial_peers)
    return peer


async def _browse(peer: PeerConfig, interval_s: float, told: Compare) -> None:
    """Draw the run on the terminal, and follow the keys, until `q` or an interrupt."""
    from rich.live import Live

    from p2p_diloco.cli.keys import keys
    from p2p_diloco.observe.browsing import Browsing
    from p2p_diloco.observe.view import Trend, page

    trend, newest, over = Trend(), list[Snapshot](), asyncio.Event()
    browsing = Browsing() if sys.stdin.isatty() else None

    with Live(auto_refresh=False) as live, above(live.console):

        def show() -> None:
            live.update(page(newest[-1], trend, browsing, live.console.height), refresh=True)

        def saw(seen: Snapshot) -> None:
            newest[:] = [told(seen)]
            trend.saw(newest[-1])
            show()

        def press(key: str) -> None:
            if browsing is not None and newest:
                browsing.press(key, newest[-1].peers)
                over.set() if browsing.over else show()

        with keys(press):
            quits, watches = asyncio.create_task(over.wait()), asyncio.create_task(watch(peer, interval_s, saw))
            try:
                await asyncio.wait({quits, watches}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                quits.cancel()
                watches.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watches


@contextlib.contextmanager
def telling(peer: PeerConfig, metrics: Address | None, compare: Compare) -> Iterator[Compare]:
    """Within the block, Prometheus (at the address `metrics`; None: nowhere) and the OTLP endpoint get the snapshot
    that the yielded function returned last. That function does what `compare` does."""
    if metrics is None and peer.otlp_endpoint is None:
        yield compare
        return
    newest: list[Snapshot] = []

    def keep(seen: Snapshot) -> Snapshot:
        newest[:] = [compare(seen)]
        return newest[0]

    from p2p_diloco.node.metrics import PeersCollector, told
    from p2p_diloco.observe.run_metrics import RunCollector

    peers = PeersCollector(peer.run_id, lambda: [one for seen in tuple(newest) for one in seen.peers])
    with told(metrics, peer.otlp_endpoint, peers, RunCollector(lambda: next(iter(newest), None))):
        yield keep


async def _warn(peer: PeerConfig, seen: Snapshot, dht: Records) -> None:
    """Say that a run is open, or that it is private and can't be seen without an invitation."""
    from p2p_diloco.net.invitation_used import on_this_machine
    from p2p_diloco.node.privacy import OPEN, is_private

    if await is_private(dht, peer.run_id):
        log.warning("the run %s is private: look at it with --invite", peer.run_id)
    elif seen.run.config is not None and not on_this_machine(peer):
        log.warning("the run %s is OPEN: %s", peer.run_id, OPEN)


async def watch(
    peer: PeerConfig,
    interval_s: float | None,
    show_it: Callable[[Snapshot], None],
    past: Callable[[Mapping[str, Sequence[Point]]], None] | None = None,
) -> None:
    """Take a snapshot every `interval_s` seconds (None: only once), and call `show_it` with each. `past`: is called
    before that, with the curves of the run's peers up to now, by peer id; None: they are not read."""
    from p2p_diloco.net.invited import read_invitation
    from p2p_diloco.node import curves
    from p2p_diloco.observe.look import look, observer

    invitation = None if peer.invite is None else read_invitation(peer)
    async with observer(peer.initial_peers, invitation) as dht:
        seen = await look(dht, peer.run_id)
        if invitation is None:
            await _warn(peer, seen, dht)
        if past is not None:
            past(await curves.read(dht, peer.run_id, seen.time))
        show_it(seen)
        while interval_s is not None:
            await asyncio.sleep(interval_s)
            show_it(await look(dht, peer.run_id))
