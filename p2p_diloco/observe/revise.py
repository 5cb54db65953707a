"""Changes the outer rates of a run in its founder's name, and waits until a peer has adopted them.

Law: takes no part in the run. It stores one signed record in the DHT and observes. A live peer that has read the record
tells the others, and all of them adopt the revision, even if this process ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from p2p_diloco.config import RunConfig
from p2p_diloco.core.revision import Revision
from p2p_diloco.errors import ConfigError, GaveUpWaiting, Refused
from p2p_diloco.net.interface import Records
from p2p_diloco.node import revising
from p2p_diloco.node.revising import Founding
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.look import look, run_record
from p2p_diloco.observe.snapshot import Snapshot

if TYPE_CHECKING:
    from p2p_diloco.net.signing import SigningKey

T = TypeVar("T")
LOOK_EVERY_S = 1.0
FOUND_S = 5.0
"""Deadline for finding the run's record."""
LIVES_S = 20.0
"""A peer counts as live if its record is at most this old; each peer writes one every 10 s."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The revision that the run has adopted or will adopt. `known_by`: the names of the peers that know of it;
    `adopted_by`: of those that have adopted it in all shards. `news`: True if this call made the revision; False if the
    run had the wanted rates already."""

    revision: Revision
    news: bool
    known_by: tuple[str, ...] = ()
    adopted_by: tuple[str, ...] = ()


async def revise(dht: Records, run_id: str, asker: SigningKey, rates: Mapping[str, float], within_s: float) -> Outcome:
    """Change `outer_lr`, `outer_momentum` or both of a run. Then wait until a live peer has adopted the change, for
    `within_s` seconds at most. A rate that is not in `rates` stays as it is.

    Raises:
        Refused: there is no such run, the asker has not founded it, another revision of the founder came first, or the
            rate that is to stay is unknown.
        ConfigError: a value can't be used in this run.
        GaveUpWaiting: no live peer has read the record in time.
    """
    founding, config = await _founding(dht, run_id, asker)
    seen, there = await look(dht, run_id), await revising.read(dht, founding)
    present, highest, readable = _present(config, seen, there)
    if not readable and len(rates) < len(present):
        wrong = f"peers know of a revision {highest} of the run {run_id} that can't be read from here"
        raise Refused(wrong, mend="try again in a moment, or name both outer_lr and outer_momentum")
    wanted = {**present, **rates}
    if "outer_momentum" in rates and config.outer_optimizer != "sgd":
        wrong = f"has no meaning for outer_optimizer={config.outer_optimizer}"
        raise ConfigError(wrong, key="outer_momentum", value=rates["outer_momentum"], mend="leave it out")
    revised = RunConfig(**{**config.to_wire(), **wanted})
    for doubt in revised.doubts():
        log.warning("%s", doubt)
    if wanted == present:
        return Outcome(Revision(highest, revised.outer_lr, revised.outer_momentum), news=False)
    bare = Revision(highest + 1, revised.outer_lr, revised.outer_momentum)
    revision = dataclasses.replace(bare, proof=asker.sign(founding.statement(bare)))
    await _store(dht, founding, revision, within_s)
    return await _adopted(dht, founding, revision, within_s)


async def _founding(dht: Records, run_id: str, asker: SigningKey) -> tuple[Founding, RunConfig]:
    """Read which peer has founded the run, and the run's settings. Raises Refused if there is no such run, or if a peer
    other than the asker has founded it."""
    record = await _until(lambda: run_record(dht, run_id), FOUND_S)
    if record is None:
        wrong = "is no run that these peers know, or a run of another version"
        mend = "check that its peers are up, and the spelling; `p2p-diloco status` shows a run"
        raise Refused(wrong, key="run_id", value=run_id, mend=mend)
    if record.founder != asker.peer_id:
        raise Refused(
            f"holds the identity {asker.peer_id}, but the run {run_id} was founded by {record.founder}",
            key="identity_path",
            mend="only its founder may change its rates: name the file that this peer was started with",
        )
    return Founding.of(run_id, record), RunConfig.from_wire(record.config)


def _present(config: RunConfig, seen: Snapshot, there: Revision) -> tuple[dict[str, float], int, bool]:
    """Three values: the rates that the run has or will adopt; the number of the highest revision that any peer knows
    of; whether the rates are those of that revision."""
    told = [n for peer in seen.peers for n in (peer.revision, peer.revision_known) if n is not None]
    rates = there.rates or (config.outer_lr, config.outer_momentum)
    adopted = seen.run.revision or 0
    if adopted > there.number and seen.run.outer_lr is not None and seen.run.outer_momentum is not None:
        rates = seen.run.outer_lr, seen.run.outer_momentum
    highest, read = max([there.number, *told]), max(there.number, adopted)
    return {"outer_lr": rates[0], "outer_momentum": rates[1]}, highest, highest == read


async def _store(dht: Records, founding: Founding, revision: Revision, within_s: float) -> None:
    """Store the revision in the DHT, where every peer looks for it."""
    if not await _until(lambda: revising.store(dht, founding, revision), within_s):
        raise GaveUpWaiting(f"the DHT did not store {revision}", mend="check that its peers are up, and try again")


async def _until(ask: Callable[[], Awaitable[T]], within_s: float) -> T:
    """Call `ask` until its result is true or `within_s` has passed. Returns the last result."""
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + within_s
    while not (found := await ask()) and clock() < give_up_at:
        await asyncio.sleep(LOOK_EVERY_S)
    return found


async def _adopted(dht: Records, founding: Founding, revision: Revision, within_s: float) -> Outcome:
    """Wait until a live peer has adopted the revision in all its shards. Once `within_s` has passed, a live peer that
    knows of the revision is enough."""
    clock = asyncio.get_running_loop().time
    give_up_at, told = clock() + within_s, ""
    while True:
        live = _live(await look(dht, founding.run_id))
        known = tuple(p.name for p in live if (p.revision_known or 0) >= revision.number)
        adopted = tuple(p.name for p in live if (p.revision or 0) >= revision.number)
        text = f"of {len(live)} peers {len(known)} know of it, {len(adopted)} have adopted it in all shards"
        if text != told:
            log.info("revision %d: %s", revision.number, text)
            told = text
        there = await revising.read(dht, founding)
        if there > revision:
            wrong, mend = f"{revision} lost to another: the run adopts {there}", "set the rates again"
            raise Refused(wrong, mend=mend)
        if adopted or (known and clock() >= give_up_at):
            return Outcome(revision, True, known, adopted)
        if clock() >= give_up_at:
            kept = f"{revising.RECORD_TTL_S / 60:.0f} minutes"
            mend = f"check that its peers are up; the DHT keeps the revision for {kept}"
            wrong = f"no peer of the run {founding.run_id} has read {revision} within {within_s:g} s"
            raise GaveUpWaiting(wrong, mend=mend)
        await asyncio.sleep(LOOK_EVERY_S)


def _live(seen: Snapshot) -> list[PeerStatus]:
    return [p for p in seen.peers if seen.last_seen_s(p) < LIVES_S and p.state not in ("leaving", "finished")]
