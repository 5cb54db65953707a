"""What a peer tells Prometheus and OpenTelemetry: its status as metrics.

Law: reads `PeerStatus` alone, so nothing is told here that `p2p-diloco status` doesn't show. Names and units follow
Prometheus's conventions (https://prometheus.io/docs/practices/naming/). A value that is unknown is left out. At a
loopback address only requests to this machine's own names are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.reach import names_this_machine
from p2p_diloco.node.status import SHARES, PeerStatus

EVERY_S = 1.0
"""Seconds between two readings of the status. A scrape gets the newest reading."""
PREFIX = "p2p_diloco_"
STATES = ("joining", "training", "waiting", "paused", "idle", "aggregating", "leaving", "finished", "dead")
LABELS = ("run", "peer", "peer_id")

log = logging.getLogger(__name__)

Values = float | None | Mapping[str, float]
"""One value; None if it is unknown; or a value for each value of the label `by`."""


@dataclass(frozen=True, slots=True)
class Told:
    """One metric. A name that ends in `_total` is a counter's, any other a gauge's."""

    name: str
    help: str
    of: Callable[[PeerStatus], Values]
    by: str | None = None
    """The name of a further label; None if there is none."""


METRICS = (
    Told("state", "1 for the state that the peer is in, 0 for the others.", lambda peer: _state(peer), "state"),
    Told("epoch", "Outer steps that every fragment of the peer's model has made.", lambda peer: peer.epoch),
    Told("inner_steps_total", "Inner steps since the peer's start.", lambda peer: peer.step),
    Told("inner_steps_per_second", "The peer's speed.", lambda peer: peer.steps_per_second),
    Told("samples_total", "Samples since the peer's start.", lambda peer: peer.samples),
    Told("counted_samples", "Samples of all peers that the commits up to the peer's state have counted.",
         lambda peer: peer.counted_samples),
    Told("loss", "The loss that the trainer reported last.", lambda peer: peer.loss),
    Told("held_out_loss", "The held-out loss of the global parameters, reported last.",
         lambda peer: peer.held_out_loss),
    Told("waiting_seconds_total", "Seconds that training stood still for exchanges.", lambda peer: peer.waiting_s),
    Told("sent_bytes_total", "Bytes sent to other peers.", lambda peer: peer.bytes_sent),
    Told("received_bytes_total", "Bytes received from other peers.", lambda peer: peer.bytes_received),
    Told("link_bytes_per_second", "The measured bandwidth of the peer's link.", lambda peer: peer.bandwidth),
    Told("reached_peers", "Live peers by the kind of path that the last payload to each took.",
         lambda peer: _ways(peer), "way"),
    Told("memory_bytes", "Memory of the trainer's process and of the node's.", lambda peer: peer.memory_bytes),
    Told("sync_every_steps", "Inner steps between two exchanges of the whole model.", lambda peer: peer.sync_every),
    Told("last_round_seconds", "Seconds of the last round by part; hidden: of its exchange, while training went on.",
         lambda peer: _round(peer), "part"),
    Told("aggregated_slices", "Slices that the peer aggregates now.", lambda peer: peer.aggregates_count),
    Told("revision", "The lowest revision over the peer's fragments.", lambda peer: peer.revision),
    Told("outer_lr", "The outer learning rate of that revision.", lambda peer: peer.outer_lr),
    Told("outer_momentum", "The outer momentum of that revision.", lambda peer: peer.outer_momentum),
    Told("submissions_total", "Submissions in asynchronous mode.", lambda peer: _submissions(peer), "outcome"),
    Told("deaths_total", "Deaths of peers since the run's founding, as far as the peer knows, by what died.",
         lambda peer: None if peer.deaths is None else asdict(peer.deaths), "cause"),
    Told("record_timestamp_seconds", "When the peer wrote this, in seconds since 1970.", lambda peer: peer.time),
)  # fmt: skip


class PeersCollector(Collector):
    """Makes metrics of peers' statuses at each scrape."""

    def __init__(self, run_id: str, peers: Callable[[], Iterable[PeerStatus]]) -> None:
        """`peers` returns the newest statuses. It is called in the HTTP server's thread."""
        self._run_id, self._peers = run_id, peers

    def collect(self) -> Iterator[Metric]:
        """Yield each metric for which at least one peer has a value."""
        peers = list(self._peers())
        for told in METRICS:
            counter = told.name.endswith("_total")
            labels = [*LABELS, *([told.by] if told.by else [])]
            family = (CounterMetricFamily if counter else GaugeMetricFamily)(
                PREFIX + told.name, told.help, labels=labels
            )
            for peer in peers:
                values = told.of(peer)
                each = values.items() if isinstance(values, Mapping) else [(None, values)]
                for label, value in each:
                    if value is not None:
                        own = [self._run_id, peer.name, peer.peer_id]
                        family.add_metric([*own, label] if label is not None else own, value)
            if family.samples:
                yield family


@contextlib.contextmanager
def served(host: str, port: int, *collectors: Collector) -> Iterator[int]:
    """Within the block, answer scrapes at `host` and `port` with what the collectors yield. Yields the port.

    Raises:
        ConfigError: the address can't be used.
    """
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"can't be listened on: {error.strerror or error}", key="metrics_port", value=f"{host}:{port}",
            mend="choose another port, 0 for any, or another metrics_host",
        ) from error  # fmt: skip
    # at other addresses any machine may ask, and Prometheus names this one as its DNS does
    if ip_address(str(server.server_address[0])).is_loopback:
        server.set_app(_to_this_machine(make_wsgi_app(registry)))
    try:
        log.info("metrics for Prometheus are at http://%s:%s/metrics", host, server.server_port)
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def told(address: tuple[str, int] | None, endpoint: str | None, *collectors: Collector) -> Iterator[None]:
    """Within the block, answer scrapes at `address`, and export to the OTLP `endpoint`; None: leave that out.

    Raises:
        ConfigError: the address can't be used, or OpenTelemetry is not installed.
    """
    with contextlib.ExitStack() as stack:
        if address is not None:
            stack.enter_context(served(*address, *collectors))
        if endpoint is not None:
            from p2p_diloco.node.otlp import exported  # an extra

            stack.enter_context(exported(endpoint, *collectors))
        yield


async def tell(
    run_id: str, address: tuple[str, int] | None, endpoint: str | None, status: Callable[[], PeerStatus]
) -> None:
    """Offer this peer's status as metrics, as in `told`, until cancelled.

    Raises:
        ConfigError: the address can't be used, or OpenTelemetry is not installed.
    """
    newest: list[PeerStatus] = []
    with told(address, endpoint, PeersCollector(run_id, lambda: tuple(newest))):
        while True:
            newest[:] = [status()]
            await asyncio.sleep(EVERY_S)


def _to_this_machine(app: Callable[..., Any]) -> Callable[..., Any]:
    """The WSGI application, which refuses requests to a host name that isn't this machine's own."""

    def answer(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Any:
        if names_this_machine(environ.get("HTTP_HOST", "")):
            return app(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"ask by an address or by this machine's name"]

    return answer


def _state(peer: PeerStatus) -> Values:
    return {state: float(state == peer.state) for state in STATES}


def _ways(peer: PeerStatus) -> Values:
    return None if peer.ways is None else asdict(peer.ways)


def _round(peer: PeerStatus) -> Values:
    return None if peer.last_round is None else {name: getattr(peer.last_round, name) for name in SHARES}


def _submissions(peer: PeerStatus) -> Values:
    told = peer.submissions
    return None if told is None else {"counted": told.counted, "refused": told.refused}
