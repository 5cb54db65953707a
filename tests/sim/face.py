"""A replica as the simulator plays it: with its tensors, cut into slices, and what the laws ask of it. Laws (a), (x)
and (y) are checked here.

A unit is what has a log, a version and a θ of its own: a fragment. The node that is played here hashes each slice after
a step. It compares a slice with that hash before it sends it or takes a step from it, so damage that came since is
noticed here, and older damage by the digests that others tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from p2p_diloco.core import claims, closing, holding, waits
from p2p_diloco.core import events as e
from p2p_diloco.core.carry import Outcome
from p2p_diloco.core.leases import WEIGHT_MIN, Use
from p2p_diloco.core.messages import Commit, Mean, Message, Part
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.round import Phase
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, append, chain_at, hash_of, is_empty, steps_of
from p2p_diloco.core.version import ModelVersion, Version, model_version

from .invariants import drafted
from .model import Fate, Tensors, require

if TYPE_CHECKING:
    from .process import Process

# -- what the laws are told


class Counted(NamedTuple):
    """One contribution that an outer step counts. base: the version that it names. steps: its inner steps. empty: in a
    run with data, its author had trained nothing."""

    peer: str
    base: Version
    steps: int
    empty: bool


@dataclass(frozen=True, slots=True)
class Step:
    """An outer step of which a peer makes a commit: from ``base`` to ``version``. buffered: submissions in the Delayed
    Nesterov buffer before it. line: the succession that the commit names. private, late: peers that are private, or
    that can't come first, by what the commit itself says; None: the author's own view decides."""

    unit: int
    base: Version
    version: Version
    counted: tuple[Counted, ...]
    revision: Revision
    buffered: int
    line: tuple[str, ...]
    private: frozenset[str] | None = None
    late: frozenset[str] = frozenset()


class Merged(NamedTuple):
    """One unit of a merge: the version that the trainer merges, and what becomes of its local progress."""

    unit: int
    version: Version
    fate: Fate


def fate_of(outcome: Outcome) -> Fate:
    """Return what a merge with this outcome does with local progress."""
    return Fate.DROPPED if outcome.dropped else Fate.COUNTED if outcome.counted else Fate.KEEP


# -- tensors

Saved = tuple[tuple[State, ...], tuple[tuple["Piece", ...], ...]]
"""A checkpoint: states, and tensors by fragment and slice."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One slice: its tensors, and those that it would have if no memory had ever been damaged. ``flip``: what damaged
    it last; a copy has the same."""

    here: Tensors = field(default_factory=Tensors)
    true: Tensors = field(default_factory=Tensors)
    flip: bytes = b""

    @property
    def digest(self) -> str:
        return self.here.digest(b"")

    def step(self, revision: Revision, mean: Any) -> Piece:
        """Return the slice after the outer step with this mean."""
        return Piece(self.here.rated(revision).step(mean), self.true.rated(revision).step(mean), self.flip)


@dataclass(slots=True)
class Store:
    """A fragment's tensors, slice by slice. ``sums``: the digest of each after its last step. proposals: by version.
    staged: fetched slices."""

    present: list[Piece]
    sums: list[str] = field(default_factory=list)
    proposals: dict[Version, list[Piece]] = field(default_factory=dict)
    staged: dict[int, Piece] = field(default_factory=dict)

    def sum(self) -> None:
        self.sums = [piece.digest for piece in self.present]

    def wrong(self) -> tuple[int, ...]:
        """Return the slices that no longer have the digest that they had after their last step."""
        return tuple(n for n, piece in enumerate(self.present) if piece.digest != self.sums[n])


@dataclass(slots=True)
class Truth:
    """What all replicas of one world must agree on. tensors: by unit and version. versions: by unit, base and key.
    kept: damage that was taken as it is, because nobody had intact tensors."""

    tensors: dict[tuple[int, Version], list[Tensors]] = field(default_factory=dict)
    versions: dict[tuple[int, Version, str], Version] = field(default_factory=dict)
    kept: set[bytes] = field(default_factory=set)


# -- the replica


class Face(Replica):
    """A replica with its tensors and its trainer's records. ``truth``: what all replicas of its world share."""

    def __init__(self, me: str, rules: Rules, *, incarnation: int, now: float, truth: Truth | None = None) -> None:
        super().__init__(me, rules, incarnation=incarnation, now=now)
        self.stores = [Store([Piece()] * len(slices)) for slices in rules.fragments]
        self.made: set[Version] = set()  # of own commits
        self.hidden: dict[str, frozenset[str]] = {}  # by choice: the private peers when its means were begun
        self.truth = truth or Truth()

    def contribution(self, unit: int, samples: int, steps: int, uses: tuple[Use, ...]) -> e.Contribute:
        """Return the event that hands a contribution of these inner steps over."""
        slices = len(self.rules.fragments[unit])
        held = (hash_of(steps),) * slices, (steps,) * slices
        return e.Contribute(unit, samples or WEIGHT_MIN, samples, *held, uses)

    def sent(self, unit: int, steps: int) -> int:
        """Return the inner steps of the last contribution to this unit: ``steps``, or what it had when it was sent
        first if the exchange was taken up again."""
        return self.own.parts[0].payload if self.own.fragment == unit else steps

    def dead(self) -> set[str]:
        """Return the peers that count as dead here."""
        return {peer for peer, record in self.roster.peers.items() if record.dead}

    @property
    def model(self) -> ModelVersion:
        return model_version([v for v in self.versions if v is not None] if self.has_state else [])

    @property
    def incarnation(self) -> int:
        return self.own.incarnation

    @property
    def merging(self) -> bool:
        """Whether its trainer waits for the answer to a Merge."""
        return self.training.merging is not None

    # -- units

    def of(self, unit: int) -> State:
        """Return the replicated state of a unit."""
        return self.logs[unit].held

    def final(self, unit: int) -> bool:
        """Whether the run has ended for this unit."""
        return self.logs[unit].final

    def relation(self, unit: int, theirs: Version) -> str:
        """Return how a version relates to the present one: equal, ancestor, ahead or fork."""
        return self.logs[unit].relation(theirs)

    def is_here(self, unit: int, peer: str) -> bool:
        """Whether nothing shows this peer that another one is on another lineage."""
        return self.logs[unit].is_here(peer)

    def remembers(self, unit: int, version: Version) -> bool:
        """Whether this version is the present one or an ancestor that the state still names."""
        return chain_at(self.of(unit).links, version.epoch) == version.chain

    def steps_made(self, unit: int) -> int:
        """Return how many inner steps of one trainer the unit's commits stand for, each by the H of its time."""
        return steps_of(self.of(unit), self.rules)

    # -- rounds

    def could_close(self, now: float) -> list[int]:
        """Return the units whose next commit this peer may make now, by the rules, and has not begun to."""
        free = [log for log in self.logs if log.phase is Phase.COLLECTING and claims.holds_term(log)]
        if not self.rules.asynchronous:
            return [log.fragment for log in free if closing.may_close(log, now)]
        return [log.fragment for log in free if holding.may_close(log) and holding.window(log, now)]

    def waits_for(self) -> set[str]:
        """Return the peers without which the rounds that it leads don't go on."""
        in_turn = self.rules.asynchronous
        led = [log for log in self.logs if log.state is not None and (log.round.readys or in_turn)]
        return {peer for log in led for peer in waits.awaits(log, self.now)}

    def misses_often(self, unit: int, peer: str) -> bool:
        """Whether rounds no longer wait for this peer, because it has missed several of them."""
        return closing.misses_often(self.logs[unit], peer)

    # -- tensors

    def leaves_out(self, unit: int, peer: str) -> bool:
        """Whether this peer, as a leader, leaves the peer's contributions out, because slices of one did not come."""
        log = self.logs[unit]
        return log.undelivered.get(peer, (0, -1))[1] >= log.epoch

    def founds(self) -> e.Found:
        """Put the founding tensors in place, and return the event that founds the run on them."""
        for store in self.stores:
            store.sum()
        return e.Found(0, tuple(f"theta0-{unit}" for unit in range(len(self.logs))))

    def saved(self) -> Saved:
        """Return all that a checkpoint holds."""
        return tuple(log.held for log in self.logs), tuple(tuple(store.present) for store in self.stores)

    def restored(self, saved: Saved) -> e.Restore:
        """Put the tensors of a checkpoint in place, and return the event that restores it."""
        states, tensors = saved
        self.stores = [Store(list(pieces)) for pieces in tensors]
        for store in self.stores:
            store.sum()
        return e.Restore(states)

    def holds(self, unit: int) -> int:
        """Return the inner steps in this unit's θ: all its slices have the same ones (law y)."""
        found = {piece.here.steps for piece in self.stores[unit].present}
        require(len(found) == 1, "y", f"{self.me}: the slices of unit {unit} have unlike steps")
        return found.pop()

    def flip(self, unit: int, bits: bytes) -> None:
        """Damage the unit's tensors in memory: ``bits`` takes the place of a part of them."""
        present = self.stores[unit].present
        number = bits[0] % len(present)
        present[number] = replace(present[number], here=replace(present[number].here, chain=bits), flip=bits)

    def damaged(self, unit: int) -> bool:
        """Whether the unit's tensors are not those of its version, and were not kept as they are."""
        return any(p.here != p.true and p.flip not in self.truth.kept for p in self.stores[unit].present)

    def laden(self, process: Process, message: Message) -> tuple[Message, e.Damaged | None]:
        """Return the message with the tensors that travel in it; if these are damaged, also the event that says so."""
        if isinstance(message, Commit):
            log = self.logs[message.fragment]
            if log.phase is Phase.HOLDING and message is log.round.commit:
                means = log.means_of(message.key)
                self._makes(process, message, tuple(means[number] for number in sorted(means)))
        if not isinstance(message, Part):
            return message, None
        store = self.stores[message.fragment]
        laden = replace(message, payload=store.present[message.number])
        wrong = message.number in store.wrong()
        damage = e.Damaged(message.fragment, (message.number,)) if wrong else None
        return laden, damage

    # -- effects

    def carry_out(self, process: Process, effect: e.Effect) -> None:
        """Carry out an effect that `World` leaves to the replica's tensors and trainer."""
        world = process.world
        answer: e.Event
        match effect:
            case e.Average(fragment, base, key, number, slices):
                known = self.roster.summaries().items()
                self.hidden.setdefault(key, frozenset(peer for peer, summary in known if not summary.eligible))
                mean = tuple((part.author, part.payload) for _, part in slices)
                answer = e.Averaged(fragment, base, key, number, hash_of(mean), mean, b"signed")
            case e.Apply(commit):
                answer = self._apply(process, effect)
                self._agrees(commit)
            case e.Fill(fragment, version, number, payload):
                self.stores[fragment].staged[number] = payload
                answer = e.Filled(fragment, version, number, payload.digest)
            case e.Roll(commit, mean):
                staged = self.stores[commit.fragment].staged
                staged[mean.number] = staged[mean.number].step(commit.choice.revision, mean.payload)
                answer = e.Rolled(commit.fragment, commit.version, mean.number)
            case e.Accept():
                self._accept(process, effect)
                return
            case e.Keep(fragment, numbers):
                self._keep(process, fragment, numbers)
                return
            case e.Load(loaded, due):
                merged = [Merged(one.fragment, one.version, fate_of(one.outcome)) for one in loaded]
                world.trainers.load(process, merged, due)
                return
            case _:
                return
        world.later(process, world.rng.uniform(0, world.settings.work_time), answer)

    def _apply(self, process: Process, work: e.Apply) -> e.Applied:
        commit, world, store = work.commit, process.world, self.stores[work.commit.fragment]
        if wrong := store.wrong():
            damaged = e.Damaged(commit.fragment, wrong)
            world.later(process, 0.01, damaged)
        new = list(store.present)
        for mean in work.means:
            new[mean.number] = new[mean.number].step(commit.choice.revision, mean.payload)
        store.proposals[commit.version] = new
        if commit.leader == self.me:
            self._makes(process, commit, work.means)
        entries = commit.choice.entries
        count = sum(ready.weight > 0 and not is_empty(ready) for _, ready in entries)
        world.witness.buffers(commit.fragment, commit.base, commit.version, count, work.buffered)
        return e.Applied(commit.fragment, commit.base, commit.version)

    def _makes(self, process: Process, commit: Commit, means: tuple[Mean, ...]) -> None:
        """Let the laws judge an own commit, once."""
        if commit.version in self.made:
            return
        self.made.add(commit.version)
        state, steps = self.of(commit.fragment), dict(means[0].payload) if means else {}
        counted = (Counted(p, ready.base, steps.get(p, 0), is_empty(ready)) for p, ready in commit.choice.entries)
        after = append(state, commit.choice, commit.key, commit.hashes, self.rules)
        of = commit.fragment, commit.base, commit.version, tuple(counted)
        by = commit.choice.revision, state.buffered
        if self.rules.asynchronous:
            strange = frozenset(self.roster.summaries().keys() - state.roll.keys())  # not counted yet: none is named
            private = self.hidden.get(commit.key)  # as it was known when the choice was made
            drafted(process.world, process, Step(*of, *by, commit.choice.successors, private, strange))
            return
        private = frozenset(peer for peer, member in after.roll.items() if not member.reachable)
        late = frozenset(peer for peer, member in after.roll.items() if member.demoted[2] > after.version.epoch)
        drafted(process.world, process, Step(*of, *by, after.plan.succession, private, late))

    def _agrees(self, commit: Commit) -> None:
        """Check that one base and key make one version (law x)."""
        known = self.truth.versions.setdefault((commit.fragment, commit.base, commit.key), commit.version)
        same = known == commit.version or not commit.hashes
        require(same, "x", f"{self.me}: one key of unit {commit.fragment} makes {commit.version} and {known}")

    def _accept(self, process: Process, effect: e.Accept) -> None:
        world, truth = process.world, self.truth
        for fragment, version in effect.versions:
            store = self.stores[fragment]
            proposed = None if effect.staged else store.proposals[version]
            numbers = range(len(store.present)) if effect.numbers is None else effect.numbers
            for number in numbers:
                store.present[number] = store.staged.pop(number) if proposed is None else proposed[number]
            store.proposals = {} if effect.numbers is None else store.proposals
            self._sum(process, fragment, version)
            tensors = [piece.true for piece in store.present]
            known = truth.tensors.setdefault((fragment, version), tensors)
            same = known == tensors or world.flips > 0
            require(same, "a", f"{self.me}: unit {fragment} has other tensors at {version} than a peer before")
            if effect.numbers is None:
                if proposed is None:
                    world.witness.fills(fragment, version, self.of(fragment).buffered)
                world.accepted(process, fragment)

    def _keep(self, process: Process, fragment: int, numbers: tuple[int, ...]) -> None:
        """Take damaged slices, which nobody else has, as they are."""
        store = self.stores[fragment]
        for number in numbers:
            self.truth.kept.add(store.present[number].flip)
        self._sum(process, fragment, self.of(fragment).version)

    def _sum(self, process: Process, fragment: int, version: Version) -> None:
        """Hash the slices, and tell the digests later."""
        store, world = self.stores[fragment], process.world
        store.sum()
        sums = store.sums

        def tell() -> None:
            if store.sums is sums:  # else other slices have come since
                world.feed_alive(process, e.Digested(fragment, version, tuple(sums)))

        world.at(world.rng.uniform(0, world.settings.work_time), tell)
