"""Describes the state of a run by one frozen value. It is made from DHT records: the run's own and its peers', which
`look` reads.

Law: an observer only reads, in client mode, stores nothing and takes no messages. All else is pure. Records come from
strangers and were validated on reading (`node.status`); nothing here raises. What the records say of the run as a whole
is the middle of what its peers say (`weighed`), so no single peer decides it. The fields, and what `to_json` makes of
them, are documented in docs/status.md; a change of their meaning raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median_high

from p2p_diloco.config import PeerConfig
from p2p_diloco.net.interface import Records, Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.membership import Membership, SealedRecords
from p2p_diloco.node.board import clean
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.run_record import BOARD, RunRecord
from p2p_diloco.node.status import Deaths, PeerStatus, RoundProgress, highest

SCHEMA_VERSION = 2
MAX_PEERS = 1024
MAX_EVENTS = 20
TRAINING = ("training", "waiting", "paused")
"""The states of peers that take part now. A paused peer does too: it evaluates or saves, and then goes on."""
LETTERS = 6
DEAD = re.compile(r"…(\w{6})\)?$")
"""Finds the last letters of the dead peer's id in a death, which names the peer by its name and these letters, or by
these alone."""
SLOWEST = 1e-9
"""Steps a second; a peer that tells fewer doesn't train."""
SILENT_S = 15.0
"""Seconds after which a peer that has written no record is probably dead: a live one writes a record every 10 s."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One entry of a peer's event log: the time, the peer, and what happened."""

    time: float
    """Seconds since 1970, by that peer's clock."""
    peer: str
    text: str


@dataclass(frozen=True, slots=True)
class Compared:
    """A run's loss beside a baseline's at equal samples."""

    which: str
    """`loss` or `held_out_loss`."""
    samples: int
    loss: float
    baseline: float
    excess: float
    """The share by which the run's loss is higher: 0.06 is 6 %. Negative: it is lower."""
    bound: float
    above: bool
    """Whether the excess is more than the bound."""

    @property
    def told(self) -> str:
        """The name of the loss in words."""
        return "held-out loss" if self.which == "held_out_loss" else "loss"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of the run as a whole."""

    run_id: str
    mode: str | None
    epoch: int
    """The epoch of the middle one of the peers that are there now; of two middle ones, the higher epoch."""
    samples: int | None
    """The training samples of all peers that the commits have counted since the run's start, by the middle peer."""
    loss: float | None
    """The mean of the losses that the training peers reported last."""
    held_out_loss: float | None
    """The mean of the held-out losses that the training peers reported last."""
    slices: int | None
    revision: int | None
    """The revision that the middle one of the peers has adopted in all its fragments. 0: no peer reports one, so the
    rates are those of the config. None: the run's record isn't known either."""
    outer_lr: float | None
    """The outer learning rate at that revision."""
    outer_momentum: float | None
    """The outer momentum at that revision."""
    changed: dict[str, float | None]
    """The settings that this revision changes, with their values. None in place of a value: no stop."""
    config: dict[str, object] | None
    """The run config as published; None if it isn't published yet or can't be read."""
    ends_in_s: float | None
    """About how many seconds of inner steps are left until the run stops after its epochs. None without such a stop, in
    asynchronous mode, and while no peer tells its speed."""
    round: RoundProgress | None
    deaths: Deaths
    """All deaths of the run's peers since its founding, as far as its present peers know."""
    events: tuple[RunEvent, ...]
    """The newest events, oldest first."""
    compared: Compared | None = None
    """None without a baseline, and where the baseline has no loss at the run's samples."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment."""

    time: float
    """Seconds since 1970."""
    run: RunStatus
    peers: tuple[PeerStatus, ...]
    """Sorted by name, then by identity."""
    deaths: Mapping[str, float] = field(default_factory=dict)
    """By the last letters of a peer's id: when other peers last noticed its death, in seconds since 1970."""

    def last_seen_s(self, peer: PeerStatus) -> float:
        """Seconds since a peer wrote its record. 0 if the peer's clock is ahead of this machine's."""
        return round(max(0.0, self.time - peer.time), 3)

    def state(self, peer: PeerStatus) -> str:
        """The state that the peer told; `dead` or `silent` in its place if the records show that it no longer holds."""
        return _seen_as(peer, self.deaths, self.time)

    def to_json(self) -> str:
        """The snapshot as one line of JSON, described in docs/status.md."""
        peers = [
            {
                **asdict(peer),
                "death": None if peer.death is None else asdict(peer.death),
                "last_seen_s": self.last_seen_s(peer),
                "seen_as": self.state(peer),
            }
            for peer in self.peers
        ]
        content = {"schema_version": SCHEMA_VERSION, "time": self.time, "run": asdict(self.run), "peers": peers}
        return json.dumps(content, ensure_ascii=False, allow_nan=False)


@contextlib.asynccontextmanager
async def observer(initial_peers: Sequence[str], invitation: Invitation | None = None) -> AsyncIterator[Records]:
    """A member of the DHT that no peer can dial; it leaves at the end of the `with` block. `invitation`: one to the
    private run whose records are read; None: they belong to an open run.

    Raises:
        NoBootstrapReached: none of the initial peers answered. ConfigError: the invitation can't be used.
    """
    from p2p_diloco.net.dht import DhtPeer

    dht = await DhtPeer.create(PeerConfig(initial_peers=tuple(initial_peers), client_mode=True))
    try:
        if invitation is None:
            yield dht
        else:
            yield SealedRecords(dht, Membership(invitation, dht.peer_id, time.time()))
    finally:
        await dht.close()


async def look(dht: Records, run_id: str) -> Snapshot:
    """Make a snapshot of a run from its present DHT records. Records that can't be fetched are left out."""
    # at once: a member of the DHT that has frozen holds up each question for seconds
    peers, record = await asyncio.gather(read_peers(dht, run_id), run_record(dht, run_id))
    return snapshot(run_id, record, peers.values(), time.time())


async def run_record(dht: Records, run_id: str) -> RunRecord | None:
    """Read the run's record; None if none can be read. If several peers have founded the run, the record with the
    lowest hash wins, as it does for joiners; in a private run only records that the run key signed count."""
    try:
        found = await BOARD.fetch(dht, run_id)
    except Unreachable:
        return None
    access = Access(dht.membership) if isinstance(dht, SealedRecords) else None
    for _, value in sorted(found.items()):
        if access is None or access.founded_by_the_key(run_id, value):
            with contextlib.suppress(ValueError):
                return RunRecord.unpack(value)
    return None


def snapshot(run_id: str, record: RunRecord | None, peers: Iterable[PeerStatus], now: float) -> Snapshot:
    """Make the snapshot of a run from its records. `now`: the present time, in seconds since 1970."""
    newest = sorted(peers, key=lambda peer: peer.time)[-MAX_PEERS:]
    deaths = _deaths(newest)
    training = [peer for peer in newest if _seen_as(peer, deaths, now) in TRAINING]
    present = [peer for peer in newest if not peer.gone and now - peer.time <= SILENT_S] or newest
    voters = weighed(present, None if record is None else record.founder)
    epoch = middle(peer.epoch for peer in voters) or 0
    config = None if record is None else _config(record)
    revision, outer_lr, outer_momentum, changed = _adopted(record, voters)
    mode = config.get("mode") if config else None
    run = RunStatus(
        run_id=run_id,
        mode=mode if isinstance(mode, str) else None,
        epoch=epoch,
        samples=middle(peer.counted_samples for peer in voters),
        loss=_mean(peer.loss for peer in training),
        held_out_loss=_mean(peer.held_out_loss for peer in training),
        slices=None if record is None else record.slices,
        revision=revision,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        changed=changed,
        config=config,
        ends_in_s=_ends_in_s(config, changed, epoch, training),
        round=_round(peer for peer in newest if (peer.epoch or 0) == epoch),
        deaths=highest(newest),
        events=_events(newest),
    )
    return Snapshot(now, run, tuple(sorted(newest, key=lambda peer: (peer.name, peer.peer_id))), deaths)


def weighed(peers: Sequence[PeerStatus], founder: str | None) -> list[PeerStatus]:
    """The peers whose records together tell what holds for the run. The founder, whose word changes the run anyway,
    comes twice, so that the other one of a pair does not decide."""
    return [*peers, *(peer for peer in peers if peer.peer_id == founder)]


def middle(values: Iterable[int | None]) -> int | None:
    """The middle one of the values that peers tell; of two, the higher. A minority of peers can't move it beyond what
    an honest peer tells. None: no peer tells one."""
    told = [value for value in values if value is not None]
    return median_high(told) if told else None


def _seen_as(peer: PeerStatus, deaths: Mapping[str, float], now: float) -> str:
    """The state that the peer's record tells. Instead, unless the peer leaves or has finished: `dead` if another peer
    has noticed its death since the record was written, or else `silent` if the record is older than SILENT_S. A peer
    whose trainer died tells itself that it is `dead`."""
    if peer.gone or peer.state == "finished":
        return peer.state
    if deaths.get(peer.peer_id[-LETTERS:], -math.inf) > peer.time:
        return "dead"
    return "silent" if now - peer.time > SILENT_S else peer.state


def _deaths(peers: Iterable[PeerStatus]) -> dict[str, float]:
    """By the last letters of a dead peer's id, as the texts of deaths name it: when others last noticed the death."""
    found = dict[str, float]()
    for peer in peers:
        for death in peer.newest_deaths:
            if dead := DEAD.search(death.peer):
                found[dead[1]] = max(death.time, found.get(dead[1], -math.inf))
    return found


def named(peer: PeerStatus) -> str:
    """A peer as the texts of deaths name it."""
    return f"{peer.name} (…{peer.peer_id[-LETTERS:]})" if peer.name else f"…{peer.peer_id[-LETTERS:]}"


def _adopted(
    record: RunRecord | None, voters: Iterable[PeerStatus]
) -> tuple[int | None, float | None, float | None, dict[str, float | None]]:
    """The revision that the middle peer has adopted in all its fragments; of the peers that have adopted just this one
    the middle outer lr and momentum, and the changes that most of them tell. If no peer tells them, those in the run's
    record."""
    told = [
        (peer.revision, peer.outer_lr, peer.outer_momentum, peer.changed)
        for peer in voters
        if peer.revision is not None and peer.outer_lr is not None and peer.outer_momentum is not None
    ]
    if told:
        number = median_high(number for number, *_ in told)
        rates, momenta, changes = zip(*(values for adopted, *values in told if adopted == number), strict=True)
        (changed, _), *_ = Counter(changes).most_common(1)
        return number, median_high(rates), median_high(momenta), {clean(key): _whole(key, v) for key, v in changed}
    if record is None:
        return None, None, None, {}
    founded = (record.config.get(key) for key in ("outer_lr", "outer_momentum"))
    first_lr, first_momentum = (v if isinstance(v, float) and math.isfinite(v) else None for v in founded)
    return 0, first_lr, first_momentum, {}


def _ends_in_s(
    config: Mapping[str, object] | None, changed: Mapping[str, float | None], epoch: int, training: Sequence[PeerStatus]
) -> float | None:
    """The inner steps that are left, divided by the speed of the peer that the others wait for: the slowest; with
    pace=time the fastest, because it makes all steps of a round."""
    now = {**(config or {}), **changed}
    stop, steps = now.get("stop_after_epochs"), now.get("sync_every")
    speeds = [speed for peer in training if (speed := peer.steps_per_second or 0.0) > SLOWEST]
    if not (isinstance(stop, int) and isinstance(steps, int) and speeds) or now.get("mode") == "async":
        return None
    speed = max(speeds) if now.get("pace") == "time" else min(speeds)
    return round(max(0, stop - epoch) * steps / speed, 1)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _whole(key: str, value: float | None) -> float | None:
    """A changed setting's value. All but the rates are whole numbers, which come as floats."""
    return value if value is None or key.startswith("outer_") else int(value)


def _round(peers: Iterable[PeerStatus]) -> RoundProgress | None:
    """The progress of the round, from the peer that reports the least progress."""
    found = [peer.round for peer in peers if peer.round is not None]
    return min(found, key=lambda progress: (progress.got / progress.want, progress.fragment), default=None)


def _events(peers: Iterable[PeerStatus]) -> tuple[RunEvent, ...]:
    events = [RunEvent(event.time, peer.name, event.text) for peer in peers for event in peer.events]
    return tuple(sorted(events, key=lambda event: (event.time, event.peer))[-MAX_EVENTS:])


def _config(record: RunRecord) -> dict[str, object] | None:
    """The settings in the run's record, as JSON values. None if they can't be converted."""
    try:
        json.dumps(dict(record.config), allow_nan=False)
    except (TypeError, ValueError):
        return None
    return {str(key): clean(value) if isinstance(value, str) else value for key, value in record.config.items()}
