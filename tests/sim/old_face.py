"""The face of `p2p_diloco.core`, whose units are shards: its tensor work, and its own law (w)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from p2p_diloco.core.events import (
    Accept,
    Applied,
    Apply,
    Average,
    Averaged,
    Carry,
    Damaged,
    Event,
    Fill,
    Filled,
    Found,
    Load,
    Restore,
)
from p2p_diloco.core.lending import is_empty, submissions
from p2p_diloco.core.messages import Commit, Contribution, State
from p2p_diloco.core.replica import Replica, founding_meta, meta_of
from p2p_diloco.core.revision import FOUNDED, Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import steps_of
from p2p_diloco.core.synchronous import SynchronousLog
from p2p_diloco.core.version import ModelVersion, Version
from p2p_diloco.history.entry import Entry

from .face import Counted, Merged, Step
from .hostile import Hostile
from .invariants import drafted
from .model import Fate, Tensors, require
from .old_hostile import OldHostile

if TYPE_CHECKING:
    from .process import Process

FATES = dict.fromkeys(Carry, Fate.DROPPED) | {Carry.KEEP: Fate.KEEP, Carry.SUBTRACT: Fate.COUNTED}


@dataclass(slots=True)
class Store:
    """A node's present outer state, and its proposals by (shard, digest)."""

    present: list[Tensors]
    proposals: dict[tuple[int, str], Tensors] = field(default_factory=dict)

    def average(
        self,
        shard: int,
        contributions: tuple[tuple[str, Contribution], ...],
        meta: bytes,
        revision: Revision = FOUNDED,
    ) -> tuple[str, object]:
        """Propose the outer step with these contributions; return its digest and the mean."""
        mean = tuple((peer, c.payload) for peer, c in contributions)
        return self.propose(shard, self.present[shard].rated(revision).step(mean), meta), mean

    def propose(self, shard: int, tensors: Tensors, meta: bytes) -> str:
        """Store a proposal for a shard and return its digest."""
        digest = tensors.digest(meta)
        self.proposals[shard, digest] = tensors
        return digest

    def accept(self, shard: int, digest: str) -> None:
        """Replace the shard's present state with the proposal of this digest, and discard its other proposals."""
        self.present[shard] = self.proposals[shard, digest]
        self.proposals = {key: t for key, t in self.proposals.items() if key[0] != shard}


class OldFace(Replica):
    """A replica of `p2p_diloco.core`, with its tensors."""

    hostile: ClassVar[type[Hostile]] = OldHostile
    many_win: ClassVar[bool] = False

    def __init__(self, me: str, rules: Rules, *, incarnation: int, now: float) -> None:
        super().__init__(me, rules, incarnation=incarnation, now=now)
        self.store = Store([Tensors()] * rules.shards)

    @staticmethod
    def units(rules: Rules) -> list[int]:
        return [fragment for fragment, shards in enumerate(rules.fragments) for _ in shards]

    def entry(self, time: float, event: Any, effects: list[Any]) -> Entry:
        return Entry(time, self.me, event, tuple(effects))

    def dead(self) -> set[str]:
        return {peer for peer, member in self.roster.members.items() if member.dead}

    @property
    def model(self) -> ModelVersion:
        return self.roster.mine.model

    @property
    def incarnation(self) -> int:
        return self.own.incarnation

    @property
    def merging(self) -> bool:
        return self.training.merging is not None

    # -- shards

    def final(self, shard: int) -> bool:
        return self.logs.look_at(shard).final

    def relation(self, shard: int, theirs: Version) -> str:
        return self.logs.look_at(shard).relation(theirs)

    def remembers(self, shard: int, version: Version) -> bool:
        return self.state(shard).history.get(version.epoch) == version.digest

    def steps_made(self, shard: int) -> int:
        return steps_of(self.state(shard), self.rules, self.rules.fragment_of(shard))

    # -- rounds

    def could_close(self, now: float) -> list[int]:
        if self.rules.asynchronous:
            return [log.shard for log in self.logs if log.close(now)]
        return [log.shard for log in self.logs if isinstance(log, SynchronousLog) and _could_close(log, now)]

    def waits_for(self) -> set[str]:
        in_turn = self.rules.asynchronous
        aggregated = [log for log in self.logs if (log.round.inbox or in_turn) and log.aggregating]
        return {peer for log in aggregated for peer in log.waited_for()}

    def misses_often(self, shard: int, peer: str) -> bool:
        return self.logs.look_at(shard).attendance.misses_often(peer)

    # -- tensors

    def founds(self) -> Event:
        meta, digests = founding_meta(0, self.me, "worker"), []
        for shard in range(self.rules.shards):
            digests.append(self.store.propose(shard, Tensors(), meta))
            self.store.accept(shard, digests[-1])
        return Found(0, tuple(digests))

    def saved(self) -> tuple[tuple[State, ...], tuple[Tensors, ...]]:
        return tuple(map(self.state, range(self.rules.shards))), tuple(self.store.present)

    def restored(self, saved: tuple[tuple[State, ...], tuple[Tensors, ...]]) -> Event:
        states, tensors = saved
        self.store.present = list(tensors)
        return Restore(states)

    def holds(self, shard: int) -> int:
        return self.store.present[shard].steps

    def flip(self, shard: int, bits: bytes) -> None:
        self.store.present[shard] = replace(self.store.present[shard], chain=bits)

    def damaged(self, shard: int) -> bool:
        state = self.state(shard)
        return self.store.present[shard].digest(meta_of(state)) != state.version.digest

    def laden(self, process: Process, message: Any) -> tuple[Any, Event | None]:
        if not isinstance(message, State):
            return message, None
        damaged = process.world.damaged(process, message.shard)
        laden = replace(message, payload=self.store.present[message.shard])
        return laden, Damaged(message.shard, message.version) if damaged else None

    # -- effects

    def carry_out(self, process: Process, effect: Any) -> None:
        world, store = process.world, self.store
        answer: Event
        match effect:
            case Average(shard, base) if effect.held is not None and world.damaged(process, shard):
                answer = Damaged(shard, base)
            case Average(shard, base, contributions, meta, held):
                digest, mean = store.average(shard, contributions, meta, effect.revision)
                drafted(world, process, self._step(effect, digest))
                _stays_level(self, process, effect)
                if held is None:
                    world.witness.one_line = False  # a commit of damaged tensors may make a fork
                answer = Averaged(shard, base, effect.number, digest, mean)
            case Apply(commit, meta):
                present = store.present[commit.shard]
                digest = store.propose(commit.shard, present.rated(commit.revision).step(commit.payload), meta)
                same = digest == commit.version.digest or self.excused(process, commit)
                which = f"{process.name}: the commit of shard {commit.shard} epoch {commit.version.epoch}"
                require(same, "a", f"{which} leads to digest {digest}, but names {commit.version.digest}")
                made = commit.shard, commit.base, commit.version
                world.witness.buffers(*made, submissions(commit), effect.buffered)
                answer = Applied(commit.shard, commit.base, digest)
            case Fill(state, meta):
                world.witness.fills(state.shard, state.version, state.buffered)
                digest = store.propose(state.shard, state.payload, meta)
                answer = Filled(state.shard, state.version, digest)
            case Accept(proposals):
                for shard, digest in proposals:
                    store.accept(shard, digest)
                    world.accepted(process, shard)
                return
            case Load(loaded, due):
                merged = tuple(Merged(one.shard, one.version, FATES[one.carry]) for one in loaded)
                world.trainers.load(process, merged, due)
                return
            case _:
                return
        world.later(process, world.rng.uniform(0, world.settings.work_time), answer)

    def _step(self, work: Average, digest: str) -> Step:
        """Return the outer step of this work, which leads to ``digest``."""
        draft = self.logs.look_at(work.shard).round.draft
        assert draft is not None
        counted = tuple(Counted(peer, c.base, c.payload, is_empty(c)) for peer, c in work.contributions)
        version = replace(draft.version, digest=digest)
        return Step(work.shard, work.base, version, counted, work.revision, work.buffered, draft.plan.succession)

    def excused(self, process: Process, commit: Commit) -> bool:
        """Whether a commit may lead to another digest here: a hostile member made its digest up; this peer's tensors
        are damaged; or the commit has no contributions, because its author's tensors were damaged."""
        hostile = process.world.hostile
        forged = isinstance(hostile, OldHostile) and commit.version.digest in hostile.forged
        return forged or process.world.damaged(process, commit.shard) or not commit.contributions


def _could_close(log: SynchronousLog, now: float) -> bool:
    """Whether this peer may make the shard's next commit now, and has not begun to."""
    busy = log.final or log.round.working or log.frozen or log.round.damaged is not None
    return log.waits is not None and not busy and log.aggregating and log.waits.may_close(now)


def _stays_level(replica: Replica, process: Process, work: Average) -> None:
    """Check that a synchronous outer step takes its shard at most one epoch ahead of the fragment's other shards, as
    the step's author holds them (invariant w). Shards for which the run has ended do not matter."""
    if replica.rules.asynchronous or not work.contributions:
        return
    of_fragment = map(replica.logs.look_at, replica.rules.fragments[replica.logs.look_at(work.shard).fragment])
    held = [(log.shard, log.version) for log in of_fragment if not log.final]
    behind = [shard for shard, version in held if version is not None and version.epoch < work.base.epoch]
    require(not behind, "w", f"{process.name}: shard {work.shard} leaves shards {behind} two epochs behind")
