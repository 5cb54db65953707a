"""The state of a run as one frozen value, made of the records that its peers leave in the DHT.

Law: pure. Records come from strangers: whatever is missing or of the wrong kind becomes None (or the record
is left out), text is cut and freed of control characters, and nothing here raises. The fields, and what
`to_json` makes of them, are documented in docs/status.md; a change of their meaning raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

SCHEMA_VERSION = 1
MAX_PEERS = 1024
MAX_EVENTS = 20
MAX_TEXT = 120


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """How far the averaging of a fragment has come."""

    fragment: int
    got: int
    """Contributions that have arrived."""
    want: int
    """Contributions that are waited for."""


@dataclass(frozen=True, slots=True)
class Ways:
    """To how many of the live peers a peer's newest payload went each way."""

    direct: int
    libp2p: int
    relayed: int
    """Over libp2p, and passed on by a third peer."""


@dataclass(frozen=True, slots=True)
class Submissions:
    """What became of a peer's submissions, in asynchronous mode."""

    counted: int
    refused: int
    """Not counted, in part or in whole: too stale, or of a lineage that was left."""
    staleness: tuple[int, ...]
    """How many of the counted ones were 0, 1, 2, 3, 4–5, 6–7, 8–11, 12–15, 16–23, 24–31, 32–63 and more epochs behind;
    bins at the end that are left out are empty."""


@dataclass(frozen=True, slots=True)
class Buffered:
    """How full the Delayed Nesterov buffers of the shards are that a peer aggregates."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class LastRound:
    """Where the time of a peer's last round went: six shares of it that add up to 1, pauses left out."""

    inner: float
    encode: float
    group: float
    transfer: float
    outer_step: float
    merge: float
    hidden: float
    """How much of the round's exchange was hidden behind training."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a peer thought worth telling."""

    time: float
    """Seconds since 1970, by that peer's clock."""
    peer: str
    text: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What is true of the run as a whole."""

    run_id: str
    mode: str | None
    epoch: int
    """The furthest peer's."""
    shards: int | None
    revision: int | None
    """The highest that a peer has in all its shards; 0: the rates are those of the config. None if nobody tells."""
    outer_lr: float | None
    """The outer learning rate at that revision."""
    outer_momentum: float | None
    """The outer momentum at it."""
    config: dict[str, object] | None
    """The run config as it was published; None when nobody has, or it can't be read."""
    round: RoundProgress | None
    events: tuple[Event, ...]
    """The newest, oldest first."""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """What one peer says of itself."""

    name: str
    peer_id: str
    host: str
    role: str
    state: str
    epoch: int | None
    """Outer steps, the lowest over its shards; None while it holds no state."""
    step: int | None
    steps_per_second: float | None
    loss: float | None
    samples: int | None
    last_seen_s: float
    """Seconds since it wrote its record."""
    bytes_sent: int | None
    bytes_received: int | None
    revision: int | None
    """The lowest over its shards; None if it doesn't tell."""
    revision_known: int | None
    """The highest that it has heard of: each shard adopts it with its next commit."""
    waiting_s: float | None
    """Seconds that its training has stood still for exchanges, in all."""
    last_round: LastRound | None
    """None before it has made one, or if it doesn't tell."""
    bandwidth: int | None
    """Bytes a second that its link carries, the slower direction; None while nobody knows."""
    ways: Ways | None
    """How its payloads go; None if it doesn't tell."""
    aggregates: tuple[int, ...]
    """Shards that it aggregates now, at most 16 of them."""
    aggregates_count: int
    """All of the shards that it aggregates now."""
    sync_every: int | None
    """Inner steps between two of its exchanges of the whole model; with dylu or pace="time" its own number, as it
    last made them."""
    submissions: Submissions | None
    """None in synchronous mode."""
    buffered: Buffered | None
    """None without Delayed Nesterov, and for a peer that aggregates nothing."""
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment."""

    schema_version: int
    time: float
    """Seconds since 1970."""
    run: RunStatus
    peers: tuple[PeerStatus, ...]
    """Sorted by name, then by identity."""

    def to_json(self) -> str:
        """One line of JSON, as docs/status.md describes it."""
        return json.dumps(asdict(self), ensure_ascii=False, allow_nan=False)


def snapshot(
    run_id: str,
    config_record: Mapping[str, object] | None,
    peer_records: Iterable[Mapping[str, object]],
    now: float,
) -> Snapshot:
    """What the records say about a run at `now` (seconds since 1970)."""
    records = [record for record in peer_records if _text(record, "peer_id")]
    newest: dict[str, Mapping[str, object]] = {}
    for record in sorted(records, key=lambda record: _number(record, "time") or 0.0):
        newest[_text(record, "peer_id")] = record
    current = list(newest.values())[-MAX_PEERS:]
    peers = sorted((_peer(record, now) for record in current), key=lambda peer: (peer.name, peer.peer_id))
    epoch = max((peer.epoch or 0 for peer in peers), default=0)
    config = _config(config_record)
    revision, outer_lr, outer_momentum = _highest(config, current)
    mode = config.get("mode") if config else None
    run = RunStatus(
        run_id=run_id,
        mode=mode if isinstance(mode, str) else None,
        epoch=epoch,
        shards=_count(config_record, "shards") if config_record else None,
        revision=revision,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        config=config,
        round=_round(record for record in current if (_count(record, "epoch") or 0) == epoch),
        events=_events(current),
    )
    return Snapshot(SCHEMA_VERSION, now, run, tuple(peers))


def _peer(record: Mapping[str, object], now: float) -> PeerStatus:
    aggregates = tuple(shard for shard in _items(record, "agg") if _is_count(shard))
    peer_id = _text(record, "peer_id")
    return PeerStatus(
        name=_text(record, "name") or peer_id[-8:],
        peer_id=peer_id,
        host=_text(record, "host"),
        role=_text(record, "role"),
        state=_text(record, "state"),
        epoch=_count(record, "epoch"),
        step=_count(record, "step"),
        steps_per_second=_number(record, "sps"),
        loss=_number(record, "loss"),
        samples=_count(record, "samples"),
        last_seen_s=round(max(0.0, now - (_number(record, "time") or 0.0)), 3),
        bytes_sent=_count(record, "sent"),
        bytes_received=_count(record, "recv"),
        revision=_revision(record)[0],
        revision_known=_revision(record)[3],
        waiting_s=_number(record, "wait_s"),
        bandwidth=_count(record, "bw") or None,
        last_round=_last_round(record),
        ways=_ways(record),
        aggregates=tuple(shard for shard in aggregates if isinstance(shard, int)),
        aggregates_count=_count(record, "agg_n") or len(aggregates),
        sync_every=_count(record, "h"),
        submissions=_submissions(record),
        buffered=_buffered(record),
        addresses=tuple(_clean(address) for address in _items(record, "addrs") if isinstance(address, str)),
    )


def _revision(record: Mapping[str, object]) -> tuple[int | None, float | None, float | None, int | None]:
    """(the lowest of its shards, outer_lr, outer_momentum, the highest that it knows of), as the record tells."""
    match _items(record, "rev"):
        case [int(number), float(lr), float(momentum), int(known)] if _is_count(number) and _is_count(known):
            if math.isfinite(lr) and math.isfinite(momentum):
                return number, lr, momentum, known
    return None, None, None, None


def _highest(
    config: Mapping[str, object] | None, records: Iterable[Mapping[str, object]]
) -> tuple[int | None, float | None, float | None]:
    """The highest revision that a peer has in all its shards, and its rates."""
    told = [(number, lr, momentum) for number, lr, momentum, _ in map(_revision, records) if number]
    if told:
        return max(told, key=lambda entry: (entry[0] or 0, entry[1] or 0.0, entry[2] or 0.0))
    if config is None:
        return None, None, None
    return 0, _number(config, "outer_lr"), _number(config, "outer_momentum")


def _last_round(record: Mapping[str, object]) -> LastRound | None:
    """Told in thousandths."""
    told = [share / 1000 for share in _items(record, "spent") if isinstance(share, int) and 0 <= share <= 1000]
    return LastRound(*told) if len(told) == len(fields(LastRound)) and any(told) else None


def _ways(record: Mapping[str, object]) -> Ways | None:
    match record.get("ways"):
        case Mapping() as ways:
            return Ways(*(_count(ways, way) or 0 for way in ("direct", "libp2p", "relayed")))
    return None


def _submissions(record: Mapping[str, object]) -> Submissions | None:
    staleness = tuple(count for count in _items(record, "stale") if isinstance(count, int) and _is_count(count))
    match _items(record, "subs"):
        case [int(counted), int(refused)] if counted >= 0 and refused >= 0:
            return Submissions(counted, refused, staleness)
    return None


def _buffered(record: Mapping[str, object]) -> Buffered | None:
    match _items(record, "fill"):
        case [int(least), int(most)] if 0 <= least <= most:
            return Buffered(least, most)
    return None


def _round(records: Iterable[Mapping[str, object]]) -> RoundProgress | None:
    """The round that is furthest from its end: a fragment is through when its slowest shard is."""
    found: list[RoundProgress] = []
    for record in records:
        match _items(record, "round"):
            case [int(fragment), int(got), int(want)] if want > 0 and fragment >= 0 <= got:
                found.append(RoundProgress(fragment, got, want))
    return min(found, key=lambda progress: (progress.got / progress.want, progress.fragment), default=None)


def _events(records: Iterable[Mapping[str, object]]) -> tuple[Event, ...]:
    events: list[Event] = []
    for record in records:
        teller = _text(record, "name") or _text(record, "peer_id")[-8:]
        for entry in _items(record, "events"):
            match entry:
                case [int() | float() as time, str(text)] if math.isfinite(time):
                    events.append(Event(float(time), teller, _clean(text)))
    return tuple(sorted(events, key=lambda event: (event.time, event.peer))[-MAX_EVENTS:])


def _config(record: Mapping[str, object] | None) -> dict[str, object] | None:
    """The settings in the run's record, as far as JSON can carry them."""
    config = record.get("config") if record else None
    if not isinstance(config, Mapping):
        return None
    try:
        json.dumps(dict(config), allow_nan=False)
    except (TypeError, ValueError):
        return None
    return {str(key): _clean(value) if isinstance(value, str) else value for key, value in config.items()}


def _text(record: Mapping[str, object], key: str) -> str:
    value = record.get(key)
    return _clean(value) if isinstance(value, str) else ""


def _clean(text: str) -> str:
    """Text that can't move a cursor or fill a screen."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:MAX_TEXT])


def _number(record: Mapping[str, object], key: str) -> float | None:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _count(record: Mapping[str, object], key: str) -> int | None:
    value = record.get(key)
    return value if isinstance(value, int) and _is_count(value) else None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _items(record: Mapping[str, object], key: str) -> list[object]:
    value = record.get(key)
    return list(value[:64]) if isinstance(value, (list, tuple)) else []
