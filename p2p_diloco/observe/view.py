"""A `Snapshot` for people: a table on a terminal, lines anywhere else.

Law: draws a snapshot and knows nothing else: no DHT, no clock, no terminal of its own choosing.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from p2p_diloco.observe.snapshot import PeerStatus, RunStatus, Snapshot

COLOURS = {"training": "green", "waiting": "yellow", "joining": "cyan", "idle": "red", "finished": "blue"}
BAR_CELLS = 20
UNKNOWN = "-"


def drawn(snapshot: Snapshot) -> RenderableType:
    """The run as a table of its peers, with its round above and its newest events below."""
    table = Table(expand=True, pad_edge=False)
    for title in ("peer", "host", "role", "state"):
        table.add_column(title, overflow="ellipsis", no_wrap=True)
    for title in (
        "epoch",
        "step",
        "steps/s",
        "loss",
        "samples",
        "waited",
        "sent",
        "received",
        "shards",
        "seen",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for peer in snapshot.peers:
        name, host, role, state, *numbers = _cells(peer)
        table.add_row(
            escape(name), escape(host), escape(role), Text(state, COLOURS.get(state, "dim")), *numbers
        )
    events = [Text(f"{event.peer}: {event.text}", "dim") for event in snapshot.run.events[-5:]]
    return Group(Text(_headline(snapshot), "bold"), *_progress(snapshot.run), table, *events)


def lines(snapshot: Snapshot) -> list[str]:
    """The run as plain text: a line for the run, then one for each peer."""
    titles = ("epoch", "step", "steps/s", "loss", "samples", "waited", "sent", "received", "shards", "seen")
    told = [_headline(snapshot)]
    for peer in snapshot.peers:
        name, host, role, state, *numbers = _cells(peer)
        listed = " ".join(f"{title}={number}" for title, number in zip(titles, numbers, strict=True))
        told.append(f"  {name} {state} {role} on {host or UNKNOWN} {listed}")
    return told


def _headline(snapshot: Snapshot) -> str:
    run, count = snapshot.run, len(snapshot.peers)
    parts = [f"run {run.run_id}", f"epoch {run.epoch}", f"{count} peer{'' if count == 1 else 's'}"]
    if run.mode:
        parts.insert(1, run.mode)
    if run.shards is not None:
        parts.append(f"{run.shards} shard{'' if run.shards == 1 else 's'}")
    if run.round is not None:
        parts.append(f"round {run.round.got} of {run.round.want}")
    if run.config is None and not snapshot.peers:
        parts = [f"run {run.run_id}: nobody has founded it yet"]
    return ", ".join(parts)


def _progress(run: RunStatus) -> list[Text]:
    if run.round is None:
        return []
    full = round(BAR_CELLS * min(1.0, run.round.got / run.round.want))
    bar = "█" * full + "░" * (BAR_CELLS - full)
    return [Text(f"{bar} fragment {run.round.fragment}: {run.round.got} of {run.round.want} contributions")]


def _cells(peer: PeerStatus) -> tuple[str, ...]:
    return (
        peer.name,
        peer.host,
        peer.role,
        peer.state,
        _number(peer.epoch),
        _number(peer.step),
        _decimals(peer.steps_per_second, 2),
        _decimals(peer.loss, 4),
        _number(peer.samples),
        _seconds(peer.waiting_s),
        _bytes(peer.bytes_sent),
        _bytes(peer.bytes_received),
        str(peer.aggregates_count),
        _seconds(peer.last_seen_s),
    )


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _decimals(value: float | None, places: int) -> str:
    return UNKNOWN if value is None else f"{value:.{places}f}"


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}s" if value < 600 else f"{value / 60:.0f}min"


def _bytes(value: int | None) -> str:
    if value is None:
        return UNKNOWN
    amount, unit = float(value), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f}{unit}" if unit == "B" else f"{amount:.1f}{unit}"
