"""`status`: takes snapshots of a run, and draws them.

Law: chooses the view and the interval; `observe` takes the snapshots and draws them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from p2p_diloco.cli.flags import A_RUN, TOLD, with_settings
from p2p_diloco.cli.join import settings_of
from p2p_diloco.cli.logs import above
from p2p_diloco.cli.reach import check_initial_peers
from p2p_diloco.config import PeerConfig
from p2p_diloco.interrupts import run

if TYPE_CHECKING:
    from p2p_diloco.net.interface import Records
    from p2p_diloco.node.curves import Point
    from p2p_diloco.observe.baseline import Baseline
    from p2p_diloco.observe.snapshot import Snapshot

BASELINE = Option(None, help="Losses of another run, to compare at equal samples (docs/metrics.md).", metavar="PATH")
BASELINE_BOUND = Option(
    0.05, min=0, help="Warn if the loss is above the baseline's by more than this fraction.", metavar="X"
)
TOKENS_PER_SAMPLE = Option(None, help="For a baseline by tokens: tokens of one sample of the run.", metavar="X")
METRICS_PORT = Option(
    None, min=0, max=65535, help="TCP port at which Prometheus gets the metrics of all peers; 0: any.", metavar="N"
)
METRICS_HOST = Option("127.0.0.1", help="Address at which --metrics-port listens.", metavar="ADDR")

log = logging.getLogger(__name__)


@with_settings((*A_RUN, "otlp_endpoint"), TOLD)
def status(
    flags: dict[str, Any],
    config: Path | None,
    as_json: bool = Option(False, "--json", help="JSON, described in docs/status.md."),
    once: bool = Option(False, "--once", help="Look once and leave."),
    check: bool = Option(
        False, "--check", help="Look once, and print what is wrong; the exit code is 1 if anything is."
    ),
    stall_rounds: float = Option(
        5.0,
        min=0.01,
        help="For --check: a run without a commit for X times a round's usual length is stalled.",
        metavar="X",
    ),
    interval: float = Option(2.0, min=0.01, help="Seconds between two looks.", metavar="X"),
    baseline: Path | None = BASELINE,
    baseline_bound: float = BASELINE_BOUND,
    tokens_per_sample: float | None = TOKENS_PER_SAMPLE,
    metrics_port: int | None = METRICS_PORT,
    metrics_host: str = METRICS_HOST,
) -> int:
    """Show the peers and the progress of a run. Reads the DHT, and takes no part in the run."""
    beside = read_baseline(baseline, baseline_bound, tokens_per_sample)
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    peer = watched(flags, config)
    if check:
        return run(_check(looks(peer, None, beside, []), stall_rounds, as_json=as_json))
    with telling(peer, metrics, beside) as newest:
        seen_in_turn = looks(peer, None if once else interval, beside, newest)
        if as_json or once or not sys.stdout.isatty():
            run(_print(seen_in_turn, as_json=as_json))
        else:
            run(_browse(seen_in_turn))
    return 0


async def _print(seen_in_turn: AsyncGenerator[Snapshot, None], *, as_json: bool) -> None:
    """Print each snapshot."""
    from p2p_diloco.observe.view import lines

    async with contextlib.aclosing(seen_in_turn):
        async for seen in seen_in_turn:
            typer.echo(seen.to_json() if as_json else "\n".join(lines(seen)))


async def _check(seen_in_turn: AsyncGenerator[Snapshot, None], stall_rounds: float, *, as_json: bool) -> int:
    """Print each fault as a line, or all as one JSON list. Returns 1 if there is any, else 0."""
    from p2p_diloco.observe.check import faults

    logging.getLogger("p2p_diloco.observe.baseline").setLevel(logging.ERROR)  # a fault says the same
    async with contextlib.aclosing(seen_in_turn):
        found = [fault async for seen in seen_in_turn for fault in faults(seen, stall_rounds)]
    for line in [json.dumps(found, ensure_ascii=False)] if as_json else found:
        typer.echo(line)
    return 1 if found else 0


def read_baseline(path: Path | None, bound: float, tokens_per_sample: float | None) -> Baseline | None:
    """The baseline in a file; None: no file was named."""
    if path is None:
        return None
    from p2p_diloco.observe.baseline import Baseline

    return Baseline.read(path, bound, tokens_per_sample)


def watched(flags: Mapping[str, object], config_file: Path | None) -> PeerConfig:
    """The settings with which to look at a run, some of whose peers answer.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    _, peer = settings_of(flags, config_file)
    check_initial_peers(peer.initial_peers)
    return peer


async def _browse(seen_in_turn: AsyncGenerator[Snapshot, None]) -> None:
    """Draw the run on the terminal, and follow the keys, until `q` or an interrupt."""
    from rich.live import Live

    from p2p_diloco.observe.browsing import Browsing, keys
    from p2p_diloco.observe.view import page

    over = asyncio.Event()
    newest: list[Snapshot] = []
    browsing = Browsing() if sys.stdin.isatty() else None

    with Live(auto_refresh=False) as live, above(live.console):

        def show() -> None:
            live.update(page(newest[-1], browsing, live.console.height), refresh=True)

        async def follow() -> None:
            async with contextlib.aclosing(seen_in_turn):
                async for seen in seen_in_turn:
                    newest[:] = [seen]
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


@contextlib.contextmanager
def telling(peer: PeerConfig, metrics: tuple[str, int] | None, baseline: Baseline | None) -> Iterator[list[Snapshot]]:
    """Within the block, Prometheus, at the address and port `metrics` (None: nowhere), and the OTLP endpoint get the
    snapshot in the yielded list, and how it compares with the `baseline`.

    Raises:
        ConfigError: the address or the endpoint can't be used.
    """
    newest: list[Snapshot] = []
    if metrics is None and peer.otlp_endpoint is None:
        yield newest
        return
    from p2p_diloco.node.metrics import PeersCollector, told

    peers = PeersCollector(peer.run_id, lambda: [one for seen in tuple(newest) for one in seen.peers])
    with told(metrics, peer.otlp_endpoint, peers, *([baseline] if baseline else [])):
        yield newest


async def looks(
    peer: PeerConfig,
    interval_s: float | None,
    baseline: Baseline | None,
    newest: list[Snapshot],
    past: Callable[[Mapping[str, Sequence[Point]]], None] | None = None,
) -> AsyncGenerator[Snapshot, None]:
    """Yield a snapshot of a run every `interval_s` seconds (None: only one), compared with the `baseline` if there is
    one. `newest` then has the last one alone.

    `past`: is called before the first one, with the curves of the run's peers up to now, by peer id. Whoever iterates
    closes it (`contextlib.aclosing`), so that it leaves the DHT before the loop ends.
    """
    from p2p_diloco.net.invited import read_invitation
    from p2p_diloco.node import curves
    from p2p_diloco.observe.snapshot import look, observer

    invitation = None if peer.invite is None else read_invitation(peer)
    async with observer(peer.initial_peers, invitation) as dht:
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
