"""Changes a run in its founder's name: settings, its end, a checkpoint of all peers. Waits until the peers know of it.

Law: takes no part in the run. It stores one signed record in the DHT and observes. A live peer that has read the record
tells the others, and all of them adopt the revision, even if this process ends. Peers' records are what the peers say
of themselves: none decides by itself that the run has come somewhere, or has heard of a revision.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING, Any, TypeVar

from p2p_diloco.config import RunConfig
from p2p_diloco.core.revision import CHANGEABLE, NEVER, Revision
from p2p_diloco.errors import ConfigError, GaveUpWaiting, Refused
from p2p_diloco.net.interface import Records
from p2p_diloco.net.signing import as_text
from p2p_diloco.node.fields import COUNT_MAX, MOST
from p2p_diloco.node.run_record import REVISION, REVISIONS, Founding, read_revision, store_revision
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.snapshot import Snapshot, look, run_record, weighed

if TYPE_CHECKING:
    from p2p_diloco.net.certificates import RunKey
    from p2p_diloco.net.signing import SigningKey

T = TypeVar("T")
STOP = "stop_after_epochs"
RATES = {"outer_lr", "outer_momentum"}
OUTER_LR_MAX = 2.0
"""The highest outer learning rate that a run with a lower one may be given: a higher one would undo what it learnt."""
LOOK_EVERY_S = 1.0
FOUND_S = 5.0
"""The most seconds to look for the run's record, and then for the revision that its peers know."""
LIVES_S = 20.0
"""A peer counts as live if its record is at most this old; each peer writes one every 10 s."""
ARRIVES_S = 6.0
"""Seconds that a stop may take to reach all peers of a run whose rounds are short."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks for a change. `key`: the key that signs it: the identity of the founder, or the run key of a private
    run. `run`: the public run key of that run; empty in an open run."""

    key: SigningKey | RunKey
    run: bytes = b""

    @property
    def peer_id(self) -> str | None:
        """The peer whose identity signs; None if the run key does."""
        return getattr(self.key, "peer_id", None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The revision that the run has adopted or will adopt. `settings`: the values of all settings that can change.
    `told`: what was asked for, in words. `known_by`, `adopted_by`, `saved_by`: the names of the live peers that know of
    the revision, that have adopted it in all fragments, and that have begun a checkpoint since it was asked for.
    `news`: True if this call made the revision; False if the run had the wanted values already."""

    revision: Revision
    news: bool
    settings: Mapping[str, float | None]
    told: str = ""
    known_by: tuple[str, ...] = ()
    adopted_by: tuple[str, ...] = ()
    saved_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Present:
    """A run as the asker found it: its config, its highest revision, and a snapshot of what its peers tell."""

    founding: Founding
    config: RunConfig
    revision: Revision
    seen: Snapshot

    @property
    def settings(self) -> dict[str, float | None]:
        """The values of all settings that can change."""
        return settings_at(self.config, self.revision)

    @property
    def live(self) -> list[PeerStatus]:
        """The live peers that have not come to the run's end."""
        return _live(self.seen)


def settings_at(config: RunConfig, revision: Revision) -> dict[str, float | None]:
    """The values that all changeable settings of a run have at a revision."""
    return {**{key: getattr(config, key) for key in CHANGEABLE}, **revision.changed}


async def revise(
    dht: Records, run_id: str, asker: Asker, changes: Mapping[str, float | None], within_s: float
) -> Outcome:
    """Change settings of a run. Then wait until all live peers know of the change and one has adopted it, for
    `within_s` seconds at most. A setting that is not in `changes` stays as it is.

    Raises:
        Refused: there is no such run, it has ended, the asker has not founded it, or another revision of the founder
            came first.
        ConfigError: a value can't be used in this run.
        GaveUpWaiting: fewer than half of the live peers have read the record in time.
    """
    present = await look_at(dht, run_id, asker)
    wanted = {**present.settings, **changes}
    if "outer_momentum" in changes and present.config.outer_optimizer != "sgd":
        wrong = f"has no meaning for outer_optimizer={present.config.outer_optimizer}"
        raise ConfigError(wrong, key="outer_momentum", value=changes["outer_momentum"], mend="leave it out")
    if (lr := changes.get("outer_lr") or 0.0) > max(OUTER_LR_MAX, present.settings["outer_lr"] or 0.0):
        wrong = f"is above {OUTER_LR_MAX:g}: each outer step would end further from the peers' mean than it began"
        raise ConfigError(wrong, key="outer_lr", value=lr, mend="choose a lower one")
    for key, value in changes.items():
        if value is not None and value > (most := MOST.get(key, COUNT_MAX)):
            # all peers would adopt it, and refuse each other's messages, which have it
            raise ConfigError(f"must be at most {most}", key=key, value=value, mend="choose a lower one")
    config = RunConfig(**{**present.config.to_wire(), **wanted})
    stop = config.stop_after_epochs if config.mode == "sync" else None
    for doubt in config.doubts(stop and max(stop, present.seen.run.epoch)):
        log.warning("%s", doubt)
    bare = _bare(present, wanted, changes)
    if bare.changed == present.revision.changed:
        outcome = Outcome(present.revision, False, wanted)
    else:
        _check_the_stop(present, wanted)
        outcome = await _revised(dht, present, asker, bare, within_s)
    values = {key: "none" if outcome.settings[key] is None else outcome.settings[key] for key in changes}
    return dataclasses.replace(outcome, told=" ".join(f"{key}={value}" for key, value in values.items()))


async def stop(dht: Records, run_id: str, asker: Asker, within_s: float, *, save: bool = False) -> Outcome:
    """End a run for all its peers: two epochs after the present one, or later if more epochs may pass before all peers
    know of the stop. `save`: True: refuse the stop if no live peer keeps checkpoints.

    Raises:
        As `revise`; Refused also if `save` can't be done.
    """
    present = await look_at(dht, run_id, asker)
    if save:
        _check_that_one_saves(present, "stop it without --save")
    if not present.live:  # the epoch is unknown, and the order would end the run when its peers come back
        raise Refused(f"no live peer of the run {run_id} is seen", mend="check that its peers are up, and try again")
    ends, set_already = _stop_epoch(present), present.settings[STOP]
    if set_already is not None and set_already <= ends:
        outcome = Outcome(present.revision, False, present.settings)
    else:
        bare = _bare(present, {**present.settings, STOP: ends})
        outcome = await _revised(dht, present, asker, bare, within_s)
    return dataclasses.replace(outcome, told=f"ends for all peers at epoch {outcome.settings[STOP]}")


async def save(dht: Records, run_id: str, asker: Asker, within_s: float) -> Outcome:
    """Let all peers that have a checkpoint folder save the run's state, at the epoch at which the last fragment adopts
    the order. Then wait until these peers have begun to save.

    Raises:
        As `revise`; Refused also if no live peer has a folder.
    """
    present = await look_at(dht, run_id, asker)
    _check_that_one_saves(present, "nothing can be saved until then")
    bare = dataclasses.replace(_bare(present, present.settings), saves=present.revision.saves + 1)
    outcome = await _revised(dht, present, asker, bare, within_s, saving=True)
    saved = f"being saved by {', '.join(outcome.saved_by)}" if outcome.saved_by else ""
    told = "; ".join(filter(None, (saved, outcome.told)))
    return dataclasses.replace(outcome, told=told or "each peer saves after its next commit")


async def look_at(dht: Records, run_id: str, asker: Asker) -> Present:
    """Read the run's settings and its highest revision.

    Raises:
        Refused: there is no such run, it has ended, or a peer other than the asker has founded it; or most of its peers
            know of a revision that can't be read.
    """
    record = await until(lambda: run_record(dht, run_id), FOUND_S)
    if record is None:
        wrong = "is no run that these peers know, or a run of another version"
        mend = "check that its peers are up, and the spelling; `p2p-diloco status` shows a run"
        raise Refused(wrong, key="run_id", value=run_id, mend=mend)
    if asker.peer_id not in (None, record.founder):
        raise Refused(
            f"holds the identity {asker.peer_id}, but the run {run_id} was founded by {record.founder}",
            key="identity_path",
            mend="only its founder may change it: name the file that this peer was started with",
        )
    founding = Founding.of(run_id, record, asker.run)
    found = await until(lambda: _revision(dht, founding), FOUND_S)
    if found is None:
        wrong = f"peers know of a revision of the run {run_id} that can't be read from here"
        raise Refused(wrong, mend="try again in a moment; its peers store it again")
    revision, seen = found
    recent = _recent(seen)
    if recent and all(peer.state == "finished" for peer in recent):
        mend = "go on from a checkpoint under another run_id (--from-checkpoint)"
        raise Refused(f"has ended at epoch {seen.run.epoch}", key="run_id", value=run_id, mend=mend)
    return Present(founding, RunConfig.from_wire(record.config), revision, seen)


async def _revision(dht: Records, founding: Founding) -> tuple[Revision, Snapshot] | None:
    """The highest revision in the DHT, with a snapshot; None while more than half of the peers tell of a higher
    revision than the DHT has: they will store it again. Fewer of them may invent it; the peers tell each other of a
    revision within a second or two."""
    seen, there = await look(dht, founding.run_id), await read_revision(dht, founding)
    peers = weighed(_recent(seen) or seen.peers, founding.founder)
    told = [max(peer.revision or 0, peer.revision_known or 0) for peer in peers]
    return (there, seen) if median_low(told or [0]) <= there.number else None


def _bare(present: Present, wanted: Mapping[str, float | None], changes: Collection[str] = ()) -> Revision:
    """The next revision, not yet signed: those of the wanted values that differ from the founder's config. Also, once
    they were among the `changes`, those that say more than the config: min_peers=1, by which one of a pair may go on
    without the other, and a rate that outer=auto would still move."""
    values: dict[str, Any] = {}
    more = RATES if present.config.outer == "auto" else set[str]()
    more = (more | {"min_peers"} if wanted["min_peers"] == 1 else more) & {*changes, *present.revision.changed}
    for key, value in wanted.items():
        if key in more or value != getattr(present.config, key):
            values[key] = NEVER if value is None else value
    return Revision(present.revision.number + 1, saves=present.revision.saves, **values)


def _stop_epoch(present: Present) -> int:
    """The epoch with which a stop ends the run: two after the present one, and as many more as may pass until all
    peers know of the stop. How often peers exchange is what the middle one of them says; in asynchronous mode, where
    each peer's exchange is an epoch, none counts for more than twice as often as that."""
    passing_s = max(map(present.seen.last_seen_s, present.live)) + ARRIVES_S
    workers = [peer for peer in present.live if peer.role != "aggregator"]
    rates = [(peer.steps_per_second or 0.0) / max(1, peer.sync_every or 1) for peer in workers]
    usual = median_low(rates or [0.0])
    more = passing_s * (sum(min(rate, 2 * usual) for rate in rates) if present.config.mode == "async" else usual)
    return present.seen.run.epoch + 2 + (math.ceil(more) if more >= 1 else 0)


def _check_the_stop(present: Present, wanted: Mapping[str, float | None]) -> None:
    """Refuse to remove or delay a stop that some fragment may have reached already: it would stay behind."""
    was, now, epoch = present.settings[STOP], wanted[STOP], present.seen.run.epoch
    if was is not None and epoch + 1 >= was and (now is None or now > was):
        wrong = f"can't be moved any more: the run is at epoch {epoch}, and ends at {was}"
        raise Refused(wrong, key=STOP, value=now, mend="go on from a checkpoint under another run_id")


def _check_that_one_saves(present: Present, otherwise: str) -> None:
    if not any(peer.checkpoint is not None for peer in present.live):
        wrong = f"no live peer of the run {present.founding.run_id} has a checkpoint folder"
        raise Refused(wrong, mend=f"start a peer with --checkpoint-dir; {otherwise}")


async def _revised(
    dht: Records, present: Present, asker: Asker, bare: Revision, within_s: float, *, saving: bool = False
) -> Outcome:
    """Sign the revision, store it in the DHT, and wait until it has arrived."""
    founding = present.founding
    revision = dataclasses.replace(bare, proof=as_text(asker.key.sign(REVISION, founding.statement(bare))))
    if not await until(lambda: store_revision(dht, founding, revision), within_s):
        raise GaveUpWaiting(f"the DHT did not store {revision}", mend="check that its peers are up, and try again")
    there, least = len(present.live), settings_at(present.config, revision)["min_peers"] or 1
    if there < least:
        mend = f"start more, or run p2p-diloco set --min-peers {max(1, there)}"
        log.warning("live peers: %d, fewer than min_peers=%g, so no round ends; %s", there, least, mend)
    return await _arrived(dht, present, revision, within_s, saving=saving)


async def until(ask: Callable[[], Awaitable[T]], within_s: float) -> T:
    """Call `ask` until its result is true or `within_s` has passed. Returns the last result."""
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + within_s
    while not (found := await ask()) and clock() < give_up_at:
        await asyncio.sleep(LOOK_EVERY_S)
    return found


async def _arrived(dht: Records, present: Present, revision: Revision, within_s: float, *, saving: bool) -> Outcome:
    """Wait until all live peers know of the revision and one has adopted it in all its fragments; with `saving` also
    until all of them that have a checkpoint folder have begun to save. After `within_s` seconds it is enough that half
    of the live peers know of the revision."""
    clock, founding = asyncio.get_running_loop().time, present.founding
    before = {peer.peer_id: peer.checkpoint for peer in present.seen.peers}
    give_up_at, told = clock() + within_s, ""
    while True:
        seen = await look(dht, founding.run_id)
        live = _live(seen, revision.number)
        known = tuple(p.name for p in live if (p.revision_known or 0) >= revision.number)
        adopted = tuple(p.name for p in live if (p.revision or 0) >= revision.number)
        keepers = [p for p in live if p.checkpoint is not None]
        begun = [p for p in keepers if p.checkpoint != before.get(p.peer_id)] if saving else []
        text = f"of {len(live)} peers {len(known)} know of it, {len(adopted)} have adopted it in all fragments"
        text += f", {len(begun)} of {len(keepers)} have begun to save" if saving else ""
        if text != told:
            log.info("revision %d: %s", revision.number, text)
            told = text
        there = await read_revision(dht, founding)
        if there > revision:
            wrong = f"{revision} lost to another: the run adopts {there}"
            raise Refused(wrong, mend="ask for the change again")
        late, all_know = clock() >= give_up_at, len(known) == len(live)
        if (adopted and all_know and (not saving or len(begun) == len(keepers))) or (
            late and known and 2 * len(known) >= len(live)
        ):
            saved = tuple(p.name for p in begun if not p.unsaved)
            failed = "; ".join(f"{p.name} could not save: {p.unsaved}" for p in begun if p.unsaved)
            return Outcome(revision, True, settings_at(present.config, revision), failed, known, adopted, saved)
        if late:
            kept = f"{REVISIONS.ttl_s / 60:.0f} minutes"
            mend = f"check that its peers are up; the DHT keeps the revision for {kept}"
            who = f"{len(known)} of the {len(live)}" if known else "no"
            wrong = f"{who} peers of the run {founding.run_id} have read {revision} within {within_s:g} s"
            raise GaveUpWaiting(wrong, mend=mend)
        await asyncio.sleep(LOOK_EVERY_S)


def _recent(seen: Snapshot) -> list[PeerStatus]:
    return [p for p in seen.peers if seen.last_seen_s(p) < LIVES_S and not p.gone]


def _live(seen: Snapshot, number: int | None = None) -> list[PeerStatus]:
    """The live peers that have not come to the run's end. `number`: also those that have come to it with a revision of
    this number or a higher one."""
    at_it = {p.peer_id for p in seen.peers if number is not None and (p.revision or 0) >= number}
    recent = [p for p in seen.peers if seen.last_seen_s(p) < LIVES_S]
    return [p for p in recent if not (p.gone or p.state == "finished") or p.peer_id in at_it]
