"""The invariants of a simulated run, by their letters in docs/testing.md: checked after every event, and at the end.

Law: this module only reads, except that `account` first ends the exchanges under way. It raises Violation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

from p2p_diloco.core.events import Average, Merge
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.state import final, steps_of
from p2p_diloco.core.synchronous import SynchronousLog
from p2p_diloco.core.version import ModelVersion, Version

from .faults import PAUSE_S
from .model import Violation, require
from .standstill import stands_still

if TYPE_CHECKING:
    from .process import Process
    from .world import World

EXCHANGES_TOLD = 2
"""The most exchanges that one merge reports as counted: the last one, and the one whose progress it carried on."""
LAG_MOST = 1.3
"""The longest transfer of a state takes this many times as long as the usual one (`World.send`)."""


def after_event(world: World, process: Process, ticked: bool) -> None:
    """Check the peer that has just handled an event: its model version has not fallen (invariant b), and it has not
    forgotten a revision (h). If the event was a wakeup (``ticked``), the peer also must not wait without need (e), nor
    its trainer stand still for long (r)."""
    model = process.replica.roster.mine.model
    if model < process.best:
        raise Violation(f"(b) the model version of {process.name} went back from {process.best} to {model}")
    process.best = model
    known = process.replica.roster.mine.revision
    if known < process.known:
        raise Violation(f"(h) {process.name} forgot {process.known} and now knows {known}")
    process.known = known
    for log in process.replica.logs if ticked and not process.replica.departed else ():
        if world.rules.asynchronous:
            now = process.clock(world.now)
            require(not log.close(now), "e", f"{process.name} could make a commit of shard {log.shard} but waits")
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
        require(not stuck, "e", f"{process.name} could close the round of shard {log.shard} but waits")
    if ticked:
        _blame(world, process)
        stands_still(world, process)
    if world.ways.on:
        _bury(world, process)


def advanced(world: World, process: Process, shard: int) -> None:
    """Called when a peer's shard has a new version. If that version is on the same lineage as the shard's last one,
    check that its revision is not lower. If it directly follows the last one, check that it counts the inner steps of
    one more round, by that round's H (invariant h)."""
    before, state = process.reached.get(shard), process.replica.state(shard)
    if before is not None and state.history.get(before.version.epoch) == before.version.digest:
        fell = state.revision < before.revision
        require(not fell, "h", f"{process.name}: shard {shard} went back from {before.revision} to {state.revision}")
        if state.version.epoch == before.version.epoch + 1:
            fragment = world.rules.fragment_of(shard)
            steps = steps_of(state, world.rules, fragment) - steps_of(before, world.rules, fragment)
            round = world.rules.steps_between(before.revision, fragment)
            require(steps == round, "h", f"{process.name}: shard {shard} counts {steps} steps for a round of {round}")
    process.reached[shard] = state
    if world.data is not None and shard == world.data.ledger:
        world.data.advanced(process)


def obeys(world: World, process: Process, work: Average) -> None:
    """Check a commit that counts contributions: the run must not have ended with the state that the commit is made on,
    and the commit must count as many contributions as its own revision requires (invariant h)."""
    log, count = process.replica.logs.look_at(work.shard), len(work.contributions)
    if log.state is None or not count:
        return
    what = f"{process.name}: a commit of shard {work.shard} after epoch {log.state.version.epoch}"
    require(not final(log.state, world.rules), "h", f"{what} comes after the end, {log.state.revision}")
    least = world.rules.needed(work.revision, first=not log.state.version.epoch)
    require(world.rules.asynchronous or count >= least, "h", f"{what} counts {count} peers: {work.revision}")


def _blame(world: World, process: Process) -> None:
    """Check that no round of this peer has waited for long for a peer that is dead or cut off, or that has no running
    trainer (invariant e)."""
    in_turn = world.rules.asynchronous
    aggregated = [log for log in process.replica.logs if (log.round.inbox or in_turn) and log.aggregating]
    waited_for = {peer for log in aggregated for peer in log.waited_for()}
    frozen = world.now < process.frozen_until + 1.0
    gone = [p for p in sorted(waited_for) if not frozen and not _at_work(world, p, process.name)]
    process.waiting_for = {p: process.waiting_for.get(p, world.now) for p in gone}
    for peer, since in process.waiting_for.items():
        blamed = world.now - since >= world.settings.blame_after
        require(not blamed, "e", f"{process.name} has waited for {peer} for {world.now - since:.1f} s")


def _bury(world: World, process: Process) -> None:
    """Check that each peer that this process has just declared dead is dead (invariant p). An error is excused if
    lately the two peers had no path to each other, or one of them was frozen or started."""
    dead = {peer for peer, member in process.replica.roster.members.items() if member.dead}
    lately = world.now - world.rules.deaf_after * world.rules.probe_every - 2.0
    for peer in sorted(dead - process.buried):
        other = world.alive.get(peer)
        if other is None or other.replica.departed or world.drop or world.settings.drop:
            continue
        excused = any(max(p.born, p.frozen_until, p.woke) > lately for p in (process, other))
        excused = excused or world.ways.apart_at(process.name, peer) > lately
        require(excused, "p", f"{process.name} counts {peer} as dead, but it lives and can be reached")
    process.buried = dead


def elects(world: World, process: Process, work: Average) -> None:
    """Check the plan of a drafted commit. It may name a private peer as aggregator or successor only if the commit's
    author knows no reachable peer that could be named instead (invariant o)."""
    draft = process.replica.logs[work.shard].round.draft
    if not world.ways.on or draft is None:
        return
    known, line = process.replica.roster.summaries(), draft.plan.succession
    if world.rules.asynchronous:
        line = tuple(peer for peer in line if peer != process.name)
        could = {peer for peer, summary in known.items() if summary.epochs} - {process.name, *line}
    else:
        line, could = line[:1], {peer for peer, _ in work.contributions if peer in known} | {process.name}
    private = [peer for peer in line if peer in known and not known[peer].eligible]
    better = sorted(peer for peer in could if known[peer].eligible)
    text = f"{process.name}: a commit of shard {work.shard} names {private}, which are private, and not {better}"
    require(not private or not better, "o", text)


def stays_level(world: World, process: Process, work: Average) -> None:
    """Check that a synchronous outer step takes its shard at most one epoch ahead of the fragment's other shards, as
    the step's author holds them (invariant w). Shards for which the run has ended do not matter."""
    if world.rules.asynchronous or not work.contributions:
        return
    logs = process.replica.logs
    of_fragment = map(logs.look_at, world.rules.fragments[logs.look_at(work.shard).fragment])
    held = [(log.shard, log.version) for log in of_fragment if not log.final]
    behind = [shard for shard, version in held if version is not None and version.epoch < work.base.epoch]
    require(not behind, "w", f"{process.name}: shard {work.shard} leaves shards {behind} two epochs behind")


def aggregate(world: World) -> None:
    """Check at the end that no private peer aggregates a shard while there is a reachable worker that has been live for
    long (invariant o)."""
    patience = world.membership.patience
    for shard in range(world.rules.shards) if world.ways.on else ():
        state = newest(world, shard).replica.state(shard)
        since = max(when for when, _, moved, _ in world.commits if moved == shard)
        lived = [n for n, p in world.alive.items() if p.born < since - patience and p.replica.has_state]
        settled = since - patience > world.membership.quiet_from and not final(state, world.rules)
        better, first = sorted({*lived} - world.ways.private), state.plan.succession[0]
        held = first not in world.ways.private or not better or not settled
        require(held, "o", f"{first} is private and aggregates shard {shard}, though {better} are reachable")


def masked(world: World) -> bool:
    """Whether relays have masked every fault so far. That means that all peers lived and trained, always had a way to
    each other, and no message was lost."""
    deadly = ("crash", "flip", "freeze", "leave", "restart", "stall")
    whole = world.ways.on and world.ways.never_apart and not world.settings.drop
    return whole and not any(world.happened[kind] for kind in deadly)


def never_still(world: World) -> None:
    """If relays masked every fault of the run, check that no peer ever waited for a commit for long (invariant p). Such
    a wait may include a pause of a trainer."""
    limit = world.membership.patience + PAUSE_S[1]
    for name, process in world.alive.items() if masked(world) else ():
        moments = [when for when, who, *_ in world.commits if who == name]
        moments = moments if process.replica.finished else [*moments, world.now]
        longest = max((b - a for a, b in itertools.pairwise(moments)), default=0.0)
        require(longest < limit, "p", f"relays reach every peer, but {name} saw no commit for {longest:.1f} s")


def never_passed(world: World) -> None:
    """Check at the end of an asynchronous run that no round went on without a live peer (invariant s). Called only for
    runs without cuts. If states take long to arrive, nothing is checked: a peer that must fetch one may confirm
    late."""
    quick = 2 * LAG_MOST * world.settings.state_lag < world.rules.confirms_within
    require(not quick or not world.happened["note passed"], "s", "a round went on without a live peer")


def undisturbed(world: World, steps: Counter[str]) -> None:
    """If relays masked every fault of the run, check at its end that no peer was declared dead, no lineage forked and
    no contribution was lost (invariant p)."""
    if not masked(world):
        return
    world.happened["undisturbed"] += 1
    for what in ("died", "fork", "takeover"):
        require(not world.happened[f"note {what}"], "p", f"relays reach every peer, but there is a note of {what}")
    excused = world.happened["note stale"] > 0
    require(excused or not steps["dropped"], "p", f"{steps['dropped']} inner steps were dropped")


def _at_work(world: World, peer: str, seen_by: str) -> bool:
    """Whether a peer can do what another peer (``seen_by``) waits for."""
    if world.hostile is not None and peer == world.hostile.name:
        return not world.hostile.silent
    process = world.alive.get(peer)
    if process is None or not world.carries(peer, seen_by):
        return False
    # in asynchronous mode a peer whose trainer is stuck can still confirm a commit
    return world.rules.asynchronous or process.stalled_until <= world.now


def lineage(world: World) -> set[tuple[Any, ...]]:
    """Return the set of lineages of the live peers; a set of one means that there is no fork. In synchronous mode it
    contains the different versions that the peers hold. In asynchronous mode it contains the newest versions of all
    shards, and also the versions of each peer that holds a version of another lineage."""
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
    """Return the live peer that holds the highest version of a shard."""

    def version(process: Process) -> Version:
        return process.replica.versions[shard] or Version(-1, 0, 0, "")

    return max(world.alive.values(), key=version)


def relied_upon(world: World) -> None:
    """Check at the end that every inner step that was reported to a trainer as counted is still counted (invariant g).
    Called only for runs in which no more peers fail at a time than the settings allow, or with a hostile member. A
    hostile member can split the honest peers by a commit that it sends to some of them only: each peer that then joins
    the other lineage may lose the steps that its last merge reported. Steps of a version that died unconfirmed are
    excused: the trainers that were told of them died, too."""
    # a contribution to a shard has the steps since the last one to its fragment, and the fragments take turns
    told_last = EXCHANGES_TOLD * world.rules.sync_every if world.settings.hostile else 0
    for shard, steps in enumerate(world.trainers.answered):
        lost = steps & ~newest(world, shard).store.present[shard].steps & ~world.witness.gone[shard]
        few = lost.bit_count() <= told_last * world.happened["note fork"]
        require(few, "g", f"steps {bin(lost)} of shard {shard} were reported as counted, but are lost")


def intact(world: World) -> None:
    """Check that damaged memory has been repaired on every peer for which the run goes on (invariant a)."""
    for name, process in world.alive.items():
        for shard in range(world.rules.shards) if not process.replica.finished else ():
            require(not world.damaged(process, shard), "a", f"{name}: shard {shard} does not match its version")


def ended_damaged(world: World) -> bool:
    """Whether the run has ended with damage: it has ended for all peers with the highest model version, and each of
    them has damaged memory. No commit will repair the damage then, and no other peer has that state."""
    greatest = max((p.replica.roster.mine.model for p in world.alive.values()), default=ModelVersion())
    holders = [p for p in world.alive.values() if p.replica.roster.mine.model == greatest and p.replica.finished]
    return bool(holders) and all(any(world.damaged(p, s) for s in range(world.rules.shards)) for p in holders)


def revised(world: World, asked: Revision) -> None:
    """Check that all peers know the highest revision, which is ``asked`` or a higher one, and that every shard uses it,
    except shards that have reached the run's end. A peer whose shards are all at the end has finished (invariant h)."""
    highest = world.founder.highest()
    require(highest >= asked, "h", f"{asked} was known, but now {highest} is the highest")
    for name, process in world.alive.items():
        known = process.replica.roster.mine.revision
        require(known == highest, "h", f"{name} knows {known}, others know {highest}")
        ended = all(log.final for log in process.replica.logs)
        require(ended <= process.replica.finished, "h", f"{name}: all shards are at the end, but training goes on")
    for shard in range(world.rules.shards):
        state = newest(world, shard).replica.state(shard)
        at_it = final(state, world.rules) or state.revision == highest
        require(at_it, "h", f"shard {shard} is at {state.revision}, not at {highest}")


def account(world: World) -> Counter[str]:
    """Check what became of every inner step: it is counted, it is pending with a live peer, its holder died, or a rule
    dropped it (invariant f).

    Returns the number of steps by what became of them, summed over all shards.
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
