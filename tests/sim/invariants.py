"""The invariants of a simulated run, by their letters in docs/testing.md: checked after every event, and at the end.

Law: this module only reads, except that `account` first ends the exchanges under way. It raises Violation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

from p2p_diloco.core import holding
from p2p_diloco.core.applying import KEPT_ASYNC
from p2p_diloco.core.events import Merge
from p2p_diloco.core.messages import Choice, Close, Commit, Message, Ready
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.version import ModelVersion

from .faults import PAUSE_S
from .model import Violation, require
from .standstill import stands_still

if TYPE_CHECKING:
    from .face import Step
    from .process import Process
    from .world import World

EXCHANGES_TOLD = 2
"""The most exchanges that one merge reports as counted: the last one, and the one whose progress it carried on."""
LAG_MOST = 1.3
"""The longest transfer of a state takes this many times as long as the usual one (`World.send`)."""


def said(process: Process, message: Message) -> None:
    """Check that a peer signs nothing that contradicts what it signed before in this life: others would expel it."""
    about: tuple[object, ...]
    says: object
    match message:
        case Ready(fragment=fragment, id=id, root=root) if message.weight:
            about, says = (Ready, fragment, id), root
        case Close(choice=Choice()) if message.leader == process.name:
            about, says = (Close, message.fragment, message.base, message.term, message.attempt), message.key
        case Commit() if message.leader == process.name:
            about, says = (Commit, message.fragment, message.base, message.term), message.key
        case _:
            return
    first = process.said.setdefault(about, says)
    require(first == says, "z", f"{process.name} contradicts itself: {about}")


def after_event(world: World, process: Process, ticked: bool) -> None:
    """Check the peer that has just handled an event: its model version has not fallen, unless it has said that it goes
    over to what most others hold (invariant b), and it has not forgotten a revision (h). If the event was a wakeup
    (``ticked``), the peer also must not wait without need (e), nor its trainer stand still for long (r)."""
    model = process.replica.model
    if model < process.best and process.goes_over:
        process.goes_over = False
    elif model < process.best:
        raise Violation(f"(b) the model version of {process.name} went back from {process.best} to {model}")
    process.best = model
    known = process.replica.roster.mine.revision
    if known < process.known:
        raise Violation(f"(h) {process.name} forgot {process.known} and now knows {known}")
    process.known = known
    if ticked:
        stuck = [] if process.replica.departed else process.replica.could_close(process.clock(world.now))
        require(not stuck, "e", f"{process.name} could make commits of units {stuck} but waits")
        _blame(world, process)
        stands_still(world, process)
    if world.ways.on:
        _bury(world, process)


def advanced(world: World, process: Process, unit: int) -> None:
    """Called when a peer's unit has a new version. If that version is on the same lineage as the unit's last one, check
    that its revision is not lower. If it directly follows the last one, check that it counts the inner steps of one
    more round, by that round's H (invariant h)."""
    replica = process.replica
    before, made = process.reached.get(unit, (None, 0))
    state, steps = process.reached[unit] = replica.of(unit), replica.steps_made(unit)
    if before is not None and replica.remembers(unit, before.version):
        fell = state.revision < before.revision
        require(not fell, "h", f"{process.name}: unit {unit} went back from {before.revision} to {state.revision}")
        if state.version.epoch == before.version.epoch + 1:
            round, counts = world.rules.steps_between(before.revision, unit), steps - made
            require(counts == round, "h", f"{process.name}: unit {unit} counts {counts} steps for a round of {round}")
    if world.data is not None and unit == 0:  # the one with the tables
        world.data.advanced(process)


def drafted(world: World, process: Process, step: Step) -> None:
    """Called when a peer takes an outer step of which it makes a commit. Check whom the step counts (invariants h, i
    and m), whom its plan names (o), and the buffer (j)."""
    world.membership.drafted(process, step)
    if world.ways.on:
        _elects(world, process, step)
    _obeys(world, process, step)
    world.witness.drafted(process, step)


def _obeys(world: World, process: Process, step: Step) -> None:
    """Check a commit that counts contributions: the run must not have ended with the state that the commit is made on,
    and the commit must count as many contributions as its own revision requires (invariant h)."""
    if not step.counted:
        return
    state, count = process.replica.of(step.unit), len(step.counted)
    what = f"{process.name}: a commit of unit {step.unit} after epoch {state.version.epoch}"
    require(not process.replica.final(step.unit), "h", f"{what} comes after the end, {state.revision}")
    least = world.rules.needed(step.revision, first=not state.version.epoch)
    require(world.rules.asynchronous or count >= least, "h", f"{what} counts {count} peers: {step.revision}")


def _blame(world: World, process: Process) -> None:
    """Check that no round of this peer has waited for long for a peer that is dead or cut off, or that has no running
    trainer (invariant e)."""
    frozen = world.now < process.frozen_until + 1.0
    gone = [p for p in sorted(process.replica.waits_for()) if not frozen and not _at_work(world, p, process.name)]
    process.waiting_for = {p: process.waiting_for.get(p, world.now) for p in gone}
    for peer, since in process.waiting_for.items():
        blamed = world.now - since >= world.settings.blame_after
        require(not blamed, "e", f"{process.name} has waited for {peer} for {world.now - since:.1f} s")


def _bury(world: World, process: Process) -> None:
    """Check that each peer that this process has just declared dead is dead (invariant p). An error is excused if
    lately the two peers had no path to each other, or one of them was frozen or started."""
    dead = process.replica.dead()
    lately = world.now - world.rules.deaf_after * world.rules.probe_every - 2.0
    for peer in sorted(dead - process.buried):
        other = world.alive.get(peer)
        if other is None or other.replica.departed or world.drop or world.settings.drop:
            continue
        excused = any(max(p.born, p.frozen_until, p.woke) > lately for p in (process, other))
        excused = excused or world.ways.apart_at(process.name, peer) > lately
        require(excused, "p", f"{process.name} counts {peer} as dead, but it lives and can be reached")
    process.buried, known = dead, process.replica.roster.summaries()
    process.news |= {p: world.now for p, summary in known.items() if process.summaries.get(p) is not summary}
    process.summaries = known


def _elects(world: World, process: Process, step: Step) -> None:
    """Check the plan of a commit. It may name a private peer as aggregator or successor only if the commit's author
    knows no reachable peer that could be named instead (invariant o): a live one that nothing shows on another
    lineage, or further behind than the commits that are kept, and that was not waited for in vain. It may have told so
    after the choice, while the mean was computed."""
    known, line = process.replica.roster.summaries(), step.line
    if world.rules.asynchronous:
        line = tuple(peer for peer in line if peer != process.name)
        here = {peer for peer, summary in known.items() if summary.epochs and process.replica.is_here(step.unit, peer)}
        near = {peer for peer in here if step.base.epoch - known[peer].epochs[step.unit] <= KEPT_ASYNC}
        vain = {peer for peer in near if holding.was_waited_for(process.replica.logs[step.unit], peer)}
        could = near - vain - {process.name, *line}
    else:
        own = {process.name} & process.replica.of(step.unit).roll.keys()
        line, could = line[:1], {one.peer for one in step.counted if one.peer in known} | own
    hidden = {peer for peer, summary in known.items() if not summary.eligible} if step.private is None else step.private
    private = [peer for peer in line if peer in known and peer in hidden]
    news = {peer for peer, when in process.news.items() if world.now - when <= world.settings.work_time}
    better = sorted(could - hidden - step.late - news)
    text = f"{process.name}: a commit of unit {step.unit} names {private}, which are private, and not {better}"
    require(not private or not better, "o", text)


def aggregate(world: World) -> None:
    """Check at the end that no private peer aggregates a unit while there is a reachable worker that has been live for
    long (invariant o)."""
    patience = world.membership.patience
    for unit in world.units if world.ways.on else ():
        replica = newest(world, unit).replica
        since = max(when for when, _, moved, _ in world.commits if moved == unit)
        lived = [n for n, p in world.alive.items() if p.born < since - patience and p.replica.has_state]
        settled = since - patience > world.membership.quiet_from and not replica.final(unit)
        better, first = sorted({*lived} - world.ways.private), replica.of(unit).plan.succession[0]
        held = first not in world.ways.private or not better or not settled
        require(held, "o", f"{first} is private and aggregates unit {unit}, though {better} are reachable")


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
    units, and also the versions of each peer that holds a version of another lineage."""
    if not world.rules.asynchronous:
        return {tuple(p.replica.versions) for p in world.alive.values()}
    holders = [newest(world, unit).replica for unit in world.units]
    found: set[tuple[Any, ...]] = {tuple(holder.versions[unit] for unit, holder in enumerate(holders))}
    for process in world.alive.values():
        mine = tuple(process.replica.versions)
        related = (v is not None and holders[unit].relation(unit, v) for unit, v in enumerate(mine))
        if not all(relation in ("equal", "ancestor") for relation in related):
            found.add(mine)
    return found


def newest(world: World, unit: int) -> Process:
    """Return the live peer that holds the highest version of a unit."""
    held = {p: version for p in world.alive.values() if (version := p.replica.versions[unit]) is not None}
    return max(held, key=held.__getitem__)


def relied_upon(world: World) -> None:
    """Check at the end that every inner step that was reported to a trainer as counted is still counted (invariant g).
    Called only for runs in which no more peers fail at a time than the settings allow, or with a hostile member. A
    hostile member can split the honest peers by a commit that it sends to some of them only: each peer that then joins
    the other lineage may lose the steps that its last merge reported. Steps of a version that died unconfirmed are
    excused: the trainers that were told of them died, too."""
    # a contribution to a unit has the steps since the last one to its fragment, and the fragments take turns
    told_last = EXCHANGES_TOLD * world.rules.sync_every if world.settings.hostile else 0
    for unit, steps in enumerate(world.trainers.answered):
        lost = steps & ~newest(world, unit).replica.holds(unit) & ~world.witness.gone[unit]
        few = lost.bit_count() <= told_last * world.happened["note fork"]
        require(few, "g", f"steps {bin(lost)} of unit {unit} were reported as counted, but are lost")


def intact(world: World) -> None:
    """Check that damaged memory has been repaired on every peer for which the run goes on (invariant a)."""
    for name, process in world.alive.items():
        for unit in world.units if not process.replica.finished else ():
            require(not world.damaged(process, unit), "a", f"{name}: unit {unit} does not match its version")


def ended_damaged(world: World) -> bool:
    """Whether the run has ended with damage: it has ended for all peers with the highest model version, and each of
    them has damaged memory. No commit will repair the damage then, and no other peer has that state."""
    greatest = max((p.replica.model for p in world.alive.values()), default=ModelVersion())
    holders = [p for p in world.alive.values() if p.replica.model == greatest and p.replica.finished]
    return bool(holders) and all(any(world.damaged(p, unit) for unit in world.units) for p in holders)


def revised(world: World, asked: Revision) -> None:
    """Check that all peers know the highest revision, which is ``asked`` or a higher one, and that every unit uses it,
    except units that have reached the run's end. A peer whose units are all at the end has finished (invariant h)."""
    highest = world.founder.highest()
    require(highest >= asked, "h", f"{asked} was known, but now {highest} is the highest")
    for name, process in world.alive.items():
        known = process.replica.roster.mine.revision
        require(known == highest, "h", f"{name} knows {known}, others know {highest}")
        ended = all(map(process.replica.final, world.units))
        require(ended <= process.replica.finished, "h", f"{name}: all units are at the end, but training goes on")
    for unit in world.units:
        replica = newest(world, unit).replica
        at = replica.of(unit).revision
        require(replica.final(unit) or at == highest, "h", f"unit {unit} is at {at}, not at {highest}")


def account(world: World) -> Counter[str]:
    """Check what became of every inner step: it is counted, it is pending with a live peer, its holder died, or a rule
    dropped it (invariant f).

    Returns the number of steps by what became of them, summed over all units.
    """
    for process in world.alive.values():
        process.blocked = process.blocked and not process.released
        if not process.blocked:
            world.feed(process, Merge())
    # these have not merged yet what their contribution led to: an exchange goes on, or a state is fetched first
    blocked = {p.trainer for p in world.alive.values() if p.blocked or p.replica.merging}
    living = {p.trainer for p in world.alive.values()}
    present = [newest(world, unit).replica.holds(unit) for unit in world.units]
    steps: Counter[str] = Counter()
    for name, trainer in world.trainers.all:
        for unit in world.units:
            counted = present[unit]
            pending = trainer.pending(unit)
            if trainer in blocked:
                pending &= ~(trainer.delta[unit] & counted)
            if trainer in living:
                require(not pending & counted, "c", f"{name}: steps both counted and pending in unit {unit}")
                missing = trainer.taken & ~counted & ~pending & ~trainer.dropped[unit]
                require(not missing, "f", f"{name}: steps {bin(missing)} of unit {unit} are unaccounted for")
                steps["pending"] += (pending & ~counted).bit_count()
                steps["dropped"] += (trainer.dropped[unit] & ~counted & ~pending).bit_count()
            else:
                steps["died"] += (trainer.taken & ~counted).bit_count()
            steps["taken"] += trainer.taken.bit_count()
            steps["counted"] += (trainer.taken & counted).bit_count()
    return steps
