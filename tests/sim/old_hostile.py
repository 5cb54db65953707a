"""What a hostile member sends to replicas of `p2p_diloco.core`.

Law: it does not do two things that the core alone can't detect. It does not answer a question with a lineage of its own
(a higher model version, with states for it). And its commits do not list a contribution that their mean leaves out,
except with numbers that make the commit invalid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from p2p_diloco.core.events import Apply, Received
from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Counted,
    Fetch,
    Held,
    Leave,
    Message,
    Outdated,
    Plan,
    Probe,
    ProbeAck,
    Promise,
    Stale,
    State,
    Summary,
    TakeOver,
    Versions,
    Want,
)
from p2p_diloco.core.state import append, meta_of
from p2p_diloco.core.version import ContributionId, ModelVersion, Version

from .hostile import Hostile
from .model import Tensors, require

if TYPE_CHECKING:
    from .old_face import OldFace
    from .process import Process
    from .world import World

HUGE = 2**40
SAMPLES_MAX, INCARNATION_MAX = 2**48, 2**62
"""The greatest numbers that fit into a message (`node/misfit.py`)."""
GHOST = "x1"
"""A peer that the hostile member names, but that never lived."""
TACTICS = ("contribute", "claim", "commit", "state", "versions", "refuse", "confirm", "ask", "present", "leave")
"""What the hostile member may do. A run draws some of these."""
DELAYS = ("serve", "seize", "present")
"""What a hostile member does if it only wants to make others wait: it contributes so that plans name it, claims terms
but never commits, and says that it works."""


class OldHostile(Hostile):
    """The hostile member of one world that plays `p2p_diloco.core`."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        rng = self.rng
        self.tactics = sorted(rng.sample(TACTICS, rng.randint(1, len(TACTICS))))
        self.answers = rng.random() < 0.8  # whether it answers probes
        self.works = rng.random() < 0.7  # whether it says that it trains
        self.promises = rng.random() < 0.5  # whether it promises terms to others
        self.pause = rng.choice([0.1, 0.5, 2.0])  # mean seconds between two messages
        self.delays = rng.random() < 0.5  # whether it does nothing else than to make others wait
        if self.delays:
            self.tactics = sorted(rng.sample(DELAYS, rng.randint(1, len(DELAYS))))
        self.contests = rng.random() < 0.3  # whether it answers each claim with a higher one
        self.misleads = rng.random() < 0.3  # whether it answers contributions with the name of another aggregator
        self.confirms = rng.random() < 0.5  # whether it says that it holds the commits that it is sent
        self.forged = set[str]()  # digests that it made up
        self.sequence = 0
        self.incarnation = rng.choice([1, 1 << 40, 2**62])
        self.begin()

    @property
    def delay(self) -> float:
        """Three times ``commits_within``, and ``promises_within``: these waits follow each other.

        ``commits_within``: the member holds the term, has the contribution, and does not commit; each peer measures
        this from its own contribution. ``commits_within`` again: the others now wait for a peer that they believe to be
        the aggregator, and this peer waits for the member. Then it claims the term. ``promises_within``: it waits for
        the member's promise. ``commits_within`` a third time: the round has now lasted so long that the member may take
        the term once more.
        """
        return 3 * self.world.rules.commits_within + self.world.rules.promises_within

    def answer(self, sender: Process, message: Message) -> None:
        world = self.world
        match message:
            case Probe() if self.answers:
                self.tell(sender, ProbeAck(self._summary(sender)))
            case TakeOver(shard) if self.contests:
                for process in world.alive.values():
                    self.tell(process, self._claim(sender, shard))
            case TakeOver(shard, base, term) if self.promises:
                self.tell(sender, Promise(shard, base, term))
            case Contribution(shard, base) if self.misleads:
                holder = self.rng.choice([self.name, GHOST, *world.names])
                term = _replica(sender).logs.look_at(shard).lead.next_term_of(holder)
                self.tell(sender, Outdated(shard, base, term, holder))
            case Commit(shard, version=version) if self.confirms:
                self.tell(sender, Held(shard, version))

    def spoils(self, message: Message) -> None:
        match message:
            case Contribution(base=version, id=id):
                numbers = [(version.samples, SAMPLES_MAX), (id.incarnation, INCARNATION_MAX)]
            case Commit(version=version, term=term) | State(version=version, term=term):
                numbers = [(version.samples, SAMPLES_MAX), (term, HUGE)]
            case TakeOver(term=term) | Outdated(term=term):
                numbers = [(term, HUGE)]
            case Probe(summary) | ProbeAck(summary):
                require(not summary.unlike, "q", "a peer believes its machine to be unlike the others")
                numbers = [(summary.incarnation, INCARNATION_MAX)]
            case _:
                return
        for number, most in numbers:
            require(number <= most, "q", f"{number} does not fit into a message: {message}")

    def arrives(self, to: Process, message: Message) -> None:
        world, replica = self.world, _replica(to)
        answer = replica.roster.asked.open(self.name, to.clock(world.now))
        if isinstance(message, State):
            answer = answer or replica.logs.look_at(message.shard).expects_states_of(self.name)
        if answer and isinstance(message, (State, Versions)):
            return
        used = self._is_used(to, message)  # an honest peer may have passed the same commit on
        world.feed_alive(to, Received(self.name, message))
        require(answer or used or not self._is_used(to, message), "q", f"{to.name} uses {message}")

    def _is_used(self, process: Process, message: Message) -> bool:
        """Whether a peer uses a state, versions or another peer's commit for which it may not have asked."""
        catchup = _replica(process).catchup
        match message:
            case State(shard, version):
                return (shard, version) in catchup.filling
            case Versions(versions):
                return catchup.switching is not None and catchup.switching.vector == versions
            case Commit(shard, aggregator=author) if author != self.name:
                log = _replica(process).logs.look_at(shard)
                applied = isinstance(log.round.working, Apply) and log.round.working.commit is message
                return applied or any(commit is message for commit in log.incoming.commits.values())
        return False

    def message(self, process: Process, shard: int, tactic: str) -> Message | None:
        rng, replica = self.rng, _replica(process)
        state = replica.state(shard)
        version = self._near(state.version)
        somebody = rng.choice([self.name, *self.world.names])
        term = rng.choice([0, 1, 2, 3, 5, 17, HUGE])
        id = ContributionId(rng.choice([self.incarnation, 2**62, 1]), rng.choice([self.sequence, HUGE]))
        self.sequence += 1
        match tactic:
            case "contribute":
                weight, samples = rng.choice([1.0, 2.0**40, 2.0**-40]), rng.choice([0, 5, HUGE])
                return Contribution(shard, version, id, id, weight, samples, 0)
            case "serve":
                true = ContributionId(self.incarnation, self.sequence)
                return Contribution(shard, state.version, true, true, 1.0, 5, 0)
            case "seize":
                return self._claim(process, shard)
            case "claim":
                return TakeOver(shard, version, term)
            case "commit":
                return self._commit(process, shard, somebody, term, id)
            case "state":
                forged = Version(version.generation, version.samples + HUGE, version.epoch + 1, self._digest())
                history = {**state.history, forged.epoch: forged.digest}
                return State(shard, forged, term, self._plan(somebody), {}, history, 0, Tensors())
            case "versions":
                told = [Version(v.generation + rng.choice([0, 1, HUGE]), v.samples, v.epoch, self._digest())
                        for v in replica.versions if v is not None]  # fmt: skip
                return Versions(tuple(told), forked=rng.random() < 0.5)
            case "refuse":
                if rng.random() < 0.5:
                    return Outdated(shard, version, term, somebody)
                own = replica.logs.look_at(shard).own.mine
                return Stale(shard, id if own is None else own.id, version)
            case "confirm":
                return Held(shard, version) if rng.random() < 0.5 else Promise(shard, version, term)
            case "ask":
                have = replica.versions
                questions: list[Message] = [
                    Want(shard, version),
                    Fetch(have),
                    Fetch(have, True),
                    Fetch(have, shards=()),
                ]
                return rng.choice(questions)
            case "present":
                return Probe(self._summary(process))
        return Leave(self.incarnation) if rng.random() < 0.1 else None

    def _claim(self, process: Process, shard: int) -> TakeOver:
        """Claim the next term that this member may have, as ``process`` knows the shard."""
        log = _replica(process).logs.look_at(shard)
        return TakeOver(shard, _replica(process).state(shard).version, log.lead.next_term_of(self.name))

    def _commit(self, process: Process, shard: int, author: str, term: int, id: ContributionId) -> Commit:
        """Make up a commit. Half of these commits lead to the digest that they name. Half of them count no
        contribution; the others list numbers that no commit may have."""
        rng, state = self.rng, _replica(process).state(shard)
        base, listed = state.version, list[Counted]()
        if rng.random() < 0.5:
            id = replace(id, incarnation=INCARNATION_MAX)
            listed.append(Counted(rng.choice(self.world.names), id, rng.choice([1.0, 2.0**40]), rng.choice([7, HUGE])))
        version = Version(base.generation, base.samples + sum(c.samples for c in listed), base.epoch + 1, "")
        plan = self._plan(author)
        commit = Commit(shard, base, version, term, author, tuple(listed), plan, (), state.revision)
        if rng.random() < 0.5 or self.world.damaged(process, shard):
            return replace(commit, version=replace(version, digest=self._digest()))
        tensors = _replica(process).store.present[shard].rated(commit.revision).step(())
        digest = tensors.digest(meta_of(append(state, commit, self.world.rules)))
        return replace(commit, version=replace(version, digest=digest))

    def _plan(self, somebody: str) -> Plan:
        names = [self.name, GHOST, *self.world.names]
        return Plan(tuple(self.rng.sample(names, self.rng.randint(0, len(names)))), (somebody, self.name))

    def _near(self, version: Version) -> Version:
        """Return ``version`` itself, or a made-up one near it."""
        rng = self.rng
        if rng.random() < 0.6:
            return version
        epoch = max(0, version.epoch + rng.choice([-1, 0, 1, 5, HUGE]))
        return Version(version.generation + rng.choice([0, 0, 1]), version.samples, epoch, self._digest())

    def _digest(self) -> str:
        digest = self.rng.randbytes(8).hex()
        self.forged.add(digest)
        return digest

    def _summary(self, process: Process) -> Summary:
        """Return a Summary that may lie, but claims no greater model than ``process`` has."""
        rng, mine = self.rng, _replica(process).roster.mine
        if self.delays:
            return Summary(self.incarnation, "worker", True, mine.model, mine.epochs, False, 100.0, speed=1.0)
        epochs = mine.epochs if self.works else ()
        model = mine.model if self.works else ModelVersion()
        if epochs and rng.random() < 0.3:
            epochs = tuple(rng.choice([0, epoch, HUGE]) for epoch in epochs)
        return Summary(
            self.incarnation if rng.random() < 0.95 else rng.choice([1, 2**62]),
            "worker",
            rng.random() < 0.8,
            model,
            epochs,
            idle=rng.random() < 0.2,
            bandwidth=rng.choice([0.0, 1.0, 2.0**50]),
            unlike=rng.random() < 0.1,
            speed=rng.choice([0.0, 1.0, 2.0**40]),
            paused=rng.random() < 0.1,
        )


def _replica(process: Process) -> OldFace:
    """Return the process's replica: this member is brought along by `OldFace`, so all replicas are of it."""
    return cast("OldFace", process.replica)
