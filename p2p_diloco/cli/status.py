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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from p2p_diloco.cli.flags import A_RUN, TOLD, above, with_settings
from p2p_diloco.cli.join import settings_of
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
    watch = watched(flags, config, baseline, baseline_bound, tokens_per_sample)
    if check:
        return run(_check(watch, stall_rounds, as_json=as_json))
    with watch.telling(metrics_host, metrics_port):
        if as_json or once or not sys.stdout.isatty():
            run(_print(watch, None if once else interval, as_json=as_json))
        else:
            run(_browse(watch, interval))
    return 0


async def _print(watch: Watch, interval_s: float | None, *, as_json: bool) -> None:
    """Print each snapshot."""
    from p2p_diloco.observe.view import lines

    await watch.follow(lambda seen: typer.echo(seen.to_json() if as_json else "\n".join(lines(seen))), interval_s)


async def _check(watch: Watch, stall_rounds: float, *, as_json: bool) -> int:
    """Print each fault as a line, or all as one JSON list. Returns 1 if there is any, else 0."""
    from p2p_diloco.observe.check import faults

    logging.getLogger("p2p_diloco.observe.baseline").setLevel(logging.ERROR)  # a fault says the same
    found: list[str] = []
    await watch.follow(lambda seen: found.extend(faults(seen, stall_rounds)))
    for line in [json.dumps(found, ensure_ascii=False)] if as_json else found:
        typer.echo(line)
    return 1 if found else 0


async def _browse(watch: Watch, interval_s: float) -> None:
    """Draw the run on the terminal, and follow the keys, until `q` or an interrupt."""
    from rich.live import Live

    from p2p_diloco.observe.view import Browsing, keys, page

    browsing = Browsing() if sys.stdin.isatty() else None
    with Live(auto_refresh=False) as live, above(live.console):

        def show(seen: Snapshot) -> None:
            live.update(page(seen, browsing, live.console.height), refresh=True)

        def press(key: str) -> None:
            if browsing is not None and watch.newest is not None:
                browsing.press(key, watch.newest.peers)
                follows.cancel() if browsing.over else show(watch.newest)

        follows = asyncio.create_task(watch.follow(show, interval_s))
        with keys(press), contextlib.suppress(asyncio.CancelledError):
            await follows


# -- what `dashboard` does, too


@dataclass(slots=True)
class Watch:
    """A run that is looked at from outside, and the baseline with which it is compared."""

    peer: PeerConfig
    baseline: Baseline | None = None
    newest: Snapshot | None = None

    @contextlib.contextmanager
    def telling(self, host: str, port: int | None) -> Iterator[None]:
        """Within the block, Prometheus, at this address (port None: nowhere), and the OTLP endpoint get the newest
        snapshot, and how it compares with the baseline.

        Raises:
            ConfigError: the address or the endpoint can't be used.
        """
        if port is None and self.peer.otlp_endpoint is None:
            yield
            return
        from p2p_diloco.node.metrics import PeersCollector, told

        peers = PeersCollector(self.peer.run_id, lambda: self.newest.peers if self.newest else ())
        baseline = [self.baseline] if self.baseline else []
        with told(None if port is None else (host, port), self.peer.otlp_endpoint, peers, *baseline):
            yield

    async def follow(
        self,
        saw: Callable[[Snapshot], None],
        interval_s: float | None = None,
        knew: Callable[[Mapping[str, Sequence[Point]]], None] | None = None,
    ) -> None:
        """Look at the run every `interval_s` seconds (None: once), and hand each snapshot to `saw`. `knew` is called
        before with the curves of the run's peers up to now, by peer id."""
        from p2p_diloco.net.invited import read_invitation
        from p2p_diloco.node import curves
        from p2p_diloco.observe.snapshot import look, observer

        peer = self.peer
        invitation = None if peer.invite is None else read_invitation(peer)
        async with observer(peer.initial_peers, invitation) as dht:
            seen = await look(dht, peer.run_id)
            if invitation is None:
                await _warn(peer, seen, dht)
            if knew is not None:
                knew(await curves.read(dht, peer.run_id, seen.time))
            while True:
                self.newest = seen if self.baseline is None else self.baseline.beside(seen)
                saw(self.newest)
                if interval_s is None:
                    return
                await asyncio.sleep(interval_s)
                seen = await look(dht, peer.run_id)


def watched(
    flags: Mapping[str, object],
    config_file: Path | None,
    baseline: Path | None,
    bound: float,
    tokens_per_sample: float | None,
) -> Watch:
    """The run that the flags name, some of whose peers answer, and the baseline in a file.

    Raises:
        UsageError, ConfigError: the flags or the file can't be used. NoBootstrapReached: no peer answers.
    """
    beside = None
    if baseline is not None:
        from p2p_diloco.observe.baseline import Baseline

        beside = Baseline.read(baseline, bound, tokens_per_sample)
    _, peer = settings_of(flags, config_file)
    check_initial_peers(peer.initial_peers)
    return Watch(peer, beside)


async def _warn(peer: PeerConfig, seen: Snapshot, dht: Records) -> None:
    """Say that a run is open, or that it is private and can't be seen without an invitation."""
    from p2p_diloco.net.invitation_used import on_this_machine
    from p2p_diloco.node.privacy import OPEN, is_private

    if await is_private(dht, peer.run_id):
        log.warning("the run %s is private: look at it with --invite", peer.run_id)
    elif seen.run.config is not None and not on_this_machine(peer):
        log.warning("the run %s is OPEN: %s", peer.run_id, OPEN)
