"""What must hold of a world, by the letters of docs/testing.md: after every event, and once there is peace.

Law: looks, and changes nothing; but `account`, which ends what is under way first. Raises Violation.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from p2p_diloco.core.events import Merge
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.state import final
from p2p_diloco.core.synchronous import SynchronousLog
from p2p_diloco.core.version import ModelVersion, Version

from .model import Violation, require

if TYPE_CHECKING:
    from .process import Process
    from .world import World


def after_event(world: World, process: Process, ticked: bool) -> None:
    """(b), (e), (h): of the peer that was fed an event; ``ticked``: it woke up by itself."""
    model = process.replica.roster.mine.model
    if model < process.best:
        raise Violation(f"(b) {process.name} went back from {process.best} to {model}")
    process.best = model
    known = process.replica.roster.mine.revision
    require(known >= process.known, "h", f"{process.name} forgot {process.known}, and knows {known}")
    process.known = known
    for log in process.replica.logs if ticked and not process.replica.departed else ():
        if world.rules.asynchronous:
            now = process.clock(world.now)
            require(not log.close(now), "e", f"{process.name} could commit to shard {log.shard} and waits")
            continue
        if (
            not isinstance(log, SynchronousLog)
            or log.waits is None
            or log.final
            or log.round.working
            or log.frozen
            or log.round.damaged is not None
            or not log.aggregating
        ):
            continue
        stuck = log.waits.may_close(process.clock(world.now))
        require(not stuck, "e", f"{process.name} has all it needs for shard {log.shard} and waits")
    if ticked:
        _blame(world, process)


def advanced(world: World, process: Process, shard: int, version: Version) -> None:
    """(h): along a lineage the revision never falls, and who has a shard at one knows of it."""
    before, state = process.reached.get(shard), process.replica.state(shard)
    if before is not None and state.history.get(before[0].epoch) == before[0].digest:
        fell = state.revision < before[1]
        require(not fell, "h", f"{process.name}: shard {shard} went back from {before[1]} to {state.revision}")
    process.reached[shard] = version, state.revision


def _blame(world: World, process: Process) -> None:
    """(e): nobody waits for a peer that has long been dead, cut off, or without a running trainer."""
    in_turn = world.rules.asynchronous
    aggregated = [log for log in process.replica.logs if (log.round.inbox or in_turn) and log.aggregating]
    waited_for = {peer for log in aggregated for peer in log.waited_for()}
    frozen = world.now < process.frozen_until + 1.0
    gone = [p for p in sorted(waited_for) if not frozen and not _at_work(world, p, process.name)]
    process.waiting_for = {p: process.waiting_for.get(p, world.now) for p in gone}
    for peer, since in process.waiting_for.items():
        blamed = world.now - since >= world.settings.blame_after
        require(not blamed, "e", f"{process.name} has waited for {peer} for {world.now - since:.1f} s")


def _at_work(world: World, peer: str, seen_by: str) -> bool:
    process = world.alive.get(peer)
    if process is None or not world.carries(peer, seen_by):
        return False
    return world.rules.asynchronous or process.stalled_until <= world.now  # whose trainer is stuck may hold a commit


def lineage(world: World) -> set[tuple[Any, ...]]:
    """What the living hold; asynchronous: what those hold that don't stand on an ancestor of it."""
    if not world.rules.asynchronous:
        return {p.replica.versions for p in world.alive.values()}
    logs = [newest(world, shard).replica.logs[shard] for shard in range(world.rules.shards)]
    found: set[tuple[Any, ...]] = {tuple(log.version for log in logs)}
    for process in world.alive.values():
        mine = process.replica.versions
        related = (v is not None and log.relation(v) for log, v in zip(logs, mine, strict=True))
        if not all(relation in ("equal", "ancestor") for relation in related):
            found.add(mine)
    return found


def newest(world: World, shard: int) -> Process:
    """Who has the greatest version of a shard."""

    def version(process: Process) -> Version:
        return process.replica.versions[shard] or Version(-1, 0, 0, "")

    return max(world.alive.values(), key=version)


def relied_upon(world: World) -> None:
    """(g): what a trainer was told is counted is there in the end, if no more holders died than may."""
    for shard, steps in enumerate(world.trainers.answered):
        lost = steps & ~newest(world, shard).store.present[shard].steps
        require(not lost, "g", f"steps {bin(lost)} of shard {shard} were answered for, and are lost")


def intact(world: World) -> None:
    """Whatever was changed in memory has been mended, wherever commits still came after it."""
    for name, process in world.alive.items():
        for shard in range(world.rules.shards) if not process.replica.finished else ():
            require(not world.damaged(process, shard), "a", f"{name}: shard {shard} is not what its version says")


def ended_damaged(world: World) -> bool:
    """The run has ended for all that hold its greatest state, and they were changed in memory since: no commit
    comes to mend it, and nobody else can have it."""
    greatest = max((p.replica.roster.mine.model for p in world.alive.values()), default=ModelVersion())
    holders = [p for p in world.alive.values() if p.replica.roster.mine.model == greatest and p.replica.finished]
    return bool(holders) and all(any(world.damaged(p, s) for s in range(world.rules.shards)) for p in holders)


def revised(world: World, asked: Revision) -> None:
    """(h): all know of the highest revision, which is ``asked`` at least, and every log that goes on is at it."""
    highest = world.founder.highest()
    require(highest >= asked, "h", f"{asked} was known, and now {highest} is the highest")
    for name, process in world.alive.items():
        known = process.replica.roster.mine.revision
        require(known == highest, "h", f"{name} knows of {known}, others of {highest}")
    for shard in range(world.rules.shards):
        state = newest(world, shard).replica.state(shard)
        at_it = final(state.version, world.rules) or state.revision == highest
        require(at_it, "h", f"shard {shard} is at {state.revision}, not at {highest}")


def account(world: World) -> Counter[str]:
    """(f): every inner step is counted, pending with a live peer, died with its holder, or was dropped by rule.

    How many became what, summed over all shards.
    """
    for process in world.alive.values():
        process.blocked = process.blocked and not process.released
        if not process.blocked:
            world.feed(process, Merge())
    blocked = {id(p.trainer) for p in world.alive.values() if p.blocked}
    living = {id(p.trainer) for p in world.alive.values()}
    present = [newest(world, shard).store.present[shard].steps for shard in range(world.rules.shards)]
    steps: Counter[str] = Counter()
    for name, trainer in world.trainers.all:
        for shard in range(world.rules.shards):
            counted = present[shard]
            pending = trainer.pending(shard)
            if id(trainer) in blocked:
                pending &= ~(trainer.delta[shard] & counted)
            if id(trainer) in living:
                require(not pending & counted, "c", f"{name}: steps both counted and pending in shard {shard}")
                missing = trainer.taken & ~counted & ~pending & ~trainer.dropped[shard]
                require(not missing, "f", f"{name}: steps {bin(missing)} of shard {shard} are unaccounted for")
                steps["pending"] += (pending & ~counted).bit_count()
                steps["dropped"] += (trainer.dropped[shard] & ~counted & ~pending).bit_count()
            else:
                steps["died"] += (trainer.taken & ~counted).bit_count()
            steps["taken"] += trainer.taken.bit_count()
            steps["counted"] += (trainer.taken & counted).bit_count()
    return steps
