"""A `Snapshot` for people: a table on a terminal, lines anywhere else.

Law: draws a snapshot and knows nothing else: no DHT, no clock, no terminal of its own choosing.
"""

from __future__ import annotations

from dataclasses import astuple, fields

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from p2p_diloco.observe.snapshot import LastRound, PeerStatus, RunStatus, Snapshot

COLOURS = {"training": "green", "waiting": "yellow", "joining": "cyan", "idle": "red", "finished": "blue"}
BAR_CELLS = 20
UNKNOWN = "-"
EVENTS_SHOWN = 5
SHARDS_SHOWN = 4
SETTINGS_SHOWN = (
    "sync_every",
    "pace",
    "num_fragments",
    "codec",
    "outer_optimizer",
    "outer_lr",
    "outer_momentum",
    "min_peers",
    "stop_after_epochs",
    "stop_after_samples",
)
"""What of the run's config is worth a line; `--json` has all."""
SHOWN_ASYNCHRONOUS = ("dn_buffer_size", "dylu", "async_grace", "max_staleness", "successors")
"""What of it in asynchronous mode."""
BINS = ("0", "1", "2", "3", "4–5", "6–7", "8–11", "12–15", "16–23", "24–31", "32–63", "64+")
"""Epochs behind, of a staleness histogram."""
SHARES = tuple(field.name.replace("_", " ") for field in fields(LastRound))
TITLES = (
    "epoch", "step", "steps/s", "loss", "samples", "waited", "sent", "received", "link", "direct", "shards", "seen",
)  # fmt: skip


def drawn(snapshot: Snapshot) -> RenderableType:
    """The run as a table of its peers, with its round above; below, where their time went, and the newest events."""
    table = Table(expand=True, pad_edge=False)
    for title in ("peer", "host", "role", "state"):
        table.add_column(title, overflow="ellipsis", no_wrap=True)
    for title in TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for peer in snapshot.peers:
        name, host, role, state, *numbers = _cells(peer)
        table.add_row(
            escape(name), escape(host), escape(role), Text(state, COLOURS.get(state, "dim")), *numbers
        )
    settings = [Text(line, "dim") for line in _settings(snapshot.run)]
    events = [Text(line, "dim") for line in _events(snapshot.run)]
    spent = [*_submissions(snapshot), *_last_rounds(snapshot)]
    return Group(Text(_headline(snapshot), "bold"), *settings, *_progress(snapshot.run), table, *spent, *events)


def _last_rounds(snapshot: Snapshot) -> list[RenderableType]:
    """A table of those that tell how many steps their last round had, and where its time went, if any do."""
    rounds = [(peer, peer.last_round) for peer in snapshot.peers if peer.last_round is not None]
    if not rounds:
        return []
    table = Table(pad_edge=False, title="the last round: shares of its time, and of its exchange", title_justify="left")
    table.add_column("peer", overflow="ellipsis", no_wrap=True)
    for title in ("steps", *SHARES):
        table.add_column(title, justify="right", no_wrap=True)
    for peer, last in rounds:
        table.add_row(escape(peer.name), _number(peer.sync_every), *_shares(last))
    return [table]


def _submissions(snapshot: Snapshot) -> list[RenderableType]:
    """A table of what became of submissions, in asynchronous mode."""
    told = [peer for peer in snapshot.peers if peer.submissions is not None]
    if not told:
        return []
    table = Table(pad_edge=False, title="submissions, and how many epochs behind", title_justify="left")
    table.add_column("peer", overflow="ellipsis", no_wrap=True)
    bins = max(len(peer.submissions.staleness) for peer in told if peer.submissions is not None)
    for title in ("steps", "counted", "refused", "buffer", *BINS[:bins]):
        table.add_column(title, justify="right", no_wrap=True)
    for peer in told:
        assert peer.submissions is not None
        subs, empty = peer.submissions, bins - len(peer.submissions.staleness)
        counts = [_number(count) for count in (*subs.staleness, *[0] * empty)]
        ends = _number(peer.sync_every), _number(subs.counted), _number(subs.refused), _buffer(peer)
        table.add_row(escape(peer.name), *ends, *counts[:bins])
    return [table]


def _submitted(peer: PeerStatus) -> str:
    """The same in words, if the peer tells."""
    if (subs := peer.submissions) is None:
        return ""
    behind = " ".join(f"{title}:{count}" for title, count in zip(BINS, subs.staleness, strict=False) if count)
    counts = f"counted={subs.counted} refused={subs.refused} buffer={_buffer(peer)}"
    return f"; submissions: steps={_number(peer.sync_every)} {counts} behind={behind or UNKNOWN}"


def _buffer(peer: PeerStatus) -> str:
    """How full the Delayed Nesterov buffers are of the shards that it aggregates."""
    if (found := peer.buffered) is None:
        return UNKNOWN
    return str(found.least) if found.least == found.most else f"{found.least}–{found.most}"


def lines(snapshot: Snapshot) -> list[str]:
    """The run as plain text: a line for the run, one for its settings, one for each peer, then the newest events."""
    told = [_headline(snapshot), *(f"  {line}" for line in _settings(snapshot.run))]
    for peer in snapshot.peers:
        name, host, role, state, *numbers = _cells(peer)
        listed = " ".join(f"{title}={number}" for title, number in zip(TITLES, numbers, strict=True))
        told.append(f"  {name} {state} {role} on {host or UNKNOWN} {listed}{_submitted(peer)}{_spent(peer)}")
    return [*told, *(f"  {line}" for line in _events(snapshot.run))]


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


def _settings(run: RunStatus) -> list[str]:
    """One line of what was settled when the run was founded, or since, or none if nobody tells."""
    now = {**(run.config or {}), "outer_lr": run.outer_lr, "outer_momentum": run.outer_momentum}
    shown = (*SETTINGS_SHOWN, *SHOWN_ASYNCHRONOUS) if run.mode == "async" else SETTINGS_SHOWN
    settings = [(key, now[key]) for key in shown if now.get(key) is not None]
    revised = f" (revision {run.revision})" if run.revision else ""
    return [" ".join(f"{key}={value}" for key, value in settings) + revised] if settings else []


def _events(run: RunStatus) -> list[str]:
    return [f"{event.peer}: {event.text}" for event in run.events[-EVENTS_SHOWN:]]


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
        UNKNOWN if peer.bandwidth is None else f"{_bytes(peer.bandwidth)}/s",
        _direct(peer),
        _shards(peer),
        _seconds(peer.last_seen_s),
    )


def _spent(peer: PeerStatus) -> str:
    """Where the time of the last round went, if the peer tells."""
    if peer.last_round is None:
        return ""
    cells = zip(SHARES, _shares(peer.last_round), strict=True)
    shares = " ".join(f"{title.replace(' ', '-')}={share}" for title, share in cells)
    return f"; last round: steps={_number(peer.sync_every)} {shares}"


def _shares(last: LastRound) -> tuple[str, ...]:
    return tuple(f"{share:.1%}" for share in astuple(last))


def _direct(peer: PeerStatus) -> str:
    """To how many of those that it sends payloads they go directly; and how many a third peer passes on."""
    if (ways := peer.ways) is None or not (total := ways.direct + ways.libp2p + ways.relayed):
        return UNKNOWN
    relayed = f" ({ways.relayed} relayed)" if ways.relayed else ""
    return f"{ways.direct}/{total}{relayed}"


def _shards(peer: PeerStatus) -> str:
    """The shards that it aggregates: the first few by number, then how many there are."""
    first = ",".join(str(shard) for shard in peer.aggregates[:SHARDS_SHOWN])
    return f"{first}… ({peer.aggregates_count})" if peer.aggregates_count > SHARDS_SHOWN else first or UNKNOWN


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
