"""A few replicas in a small deterministic world: messages take time, get lost on request, and peers die.

Tensors are sets of inner steps. A mean is the union of its contributions, an outer step adds it to θ; both unions must
be disjoint, so a step that is counted twice is found at once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from p2p_diloco.core import events as e
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.messages import Message, Part, Probe, ProbeAck, Summary
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, hash_of
from p2p_diloco.core.version import Version

Steps = frozenset[str]
NOTHING: Steps = frozenset()
WORK_S, DIGEST_S, FAILS_AFTER_S = 0.01, 0.02, 0.5


def rules(fragments: int = 1, slices: int = 3, **changes: Any) -> Rules:
    """Return rules with short times: an interval of 1 s, a heartbeat timeout of 5 s, rounds of 60 s at most."""
    numbers = iter(range(fragments * slices))
    cut = tuple(tuple(next(numbers) for _ in range(slices)) for _ in range(fragments))
    times = {"heartbeat_interval": 1.0, "heartbeat_timeout": 5.0, "round_timeout": 60.0}
    return Rules(run="story", fragments=cut, **{**times, **changes})


def disjoint(parts: Iterable[Steps]) -> Steps:
    """Return the union of these sets, which must not overlap."""
    found: set[str] = set()
    for part in parts:
        assert not found & part, f"counted twice: {sorted(found & part)}"
        found |= part
    return frozenset(found)


def digest(steps: Steps) -> str:
    return hash_of(sorted(steps))


@dataclass
class Progress:
    """A trainer's local progress in one fragment: steps that its base does not have, and those of its last
    contribution."""

    pending: Steps = NOTHING
    sent: Steps = NOTHING


@dataclass
class Peer:
    """One peer: its replica, its tensors, and its trainer."""

    name: str
    replica: Replica
    theta: list[list[Steps]]
    trains_s: float
    proposals: dict[tuple[int, Version], list[Steps]] = field(default_factory=dict)
    staged: dict[tuple[int, int], Steps] = field(default_factory=dict)
    progress: list[Progress] = field(default_factory=list)
    alive: bool = True
    made: int = 0
    dropped: set[str] = field(default_factory=set)
    seen: list[Any] = field(default_factory=list)  # all notes and complaints
    waits_for_release: bool = False
    contributed_at: float = 0.0
    waits: list[float] = field(default_factory=list)  # how long each exchange took, in seconds

    def state(self, fragment: int = 0) -> State:
        state = self.replica.logs[fragment].state
        assert state is not None
        return state

    @property
    def epoch(self) -> int:
        return min(log.epoch for log in self.replica.logs)

    def counted(self, fragment: int = 0) -> Steps:
        """Return the steps in θ, which must be the same in all slices."""
        assert len(set(self.theta[fragment])) == 1, "slices of one state have unlike steps"
        return self.theta[fragment][0]

    def notes(self, kind: str) -> list[str]:
        return [one.text for one in self.seen if isinstance(one, e.Note) and one.kind == kind]

    def complaints(self) -> list[str]:
        return [one.why for one in self.seen if isinstance(one, e.Complaint)]


Rule = Callable[[str, str, Message], float | None]
"""(sender, receiver, message) → how many seconds it is late; None: nothing special; inf: it is lost."""
LOST = float("inf")


class World:
    """The peers, the network between them, and the time."""

    def __init__(self, names: str, these: Rules | None = None, *, epoch: int = 0, trains_s: float = 3.0) -> None:
        self.rules = rules() if these is None else these
        self.now, self._number = 0.0, count()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.peers: dict[str, Peer] = {}
        self.rules_of_net: list[Rule] = []
        self.strict = True  # no memory is damaged
        self.lies: list[Callable[[str, str, Message], Message]] = []  # what hostile peers make of their messages
        self.cuts: set[frozenset[str]] = set()
        self.delivered: list[tuple[float, str, str, Message]] = []
        self.versions: dict[tuple[int, str], list[Steps]] = {}
        self.trains_s = trains_s
        self.busy = 400  # the most events a second
        self.confirms_after_s = 0.0  # how much later than a message its sender learns that it has arrived
        for name in names:
            self.start(name, found=name == names[0])
        for name in names:
            self.meet(name)
        if epoch:
            self.reach(epoch)

    @property
    def line(self) -> tuple[str, ...]:
        """Who may lead the next round, by what A holds: the leader first."""
        return self.peers["A"].state().plan.succession

    def log(self, name: str) -> FragmentLog:
        """Return a peer's log of the first fragment."""
        return self.peers[name].replica.logs[0]

    # -- peers

    def start(self, name: str, *, found: bool = False, role: str = "worker") -> Peer:
        """Start a peer; it may found the run."""
        replica = Replica(name, self.rules, role=role, incarnation=1 << 20, now=self.now)
        shape = [[NOTHING] * len(slices) for slices in self.rules.fragments]
        peer = self.peers[name] = Peer(name, replica, shape, self.trains_s)
        peer.progress = [Progress() for _ in self.rules.fragments]
        if found:
            self.handle(name, e.Found(0, tuple(f"theta0-{f}" for f in range(len(shape)))))
        self.wake(name)
        return peer

    def meet(self, name: str) -> None:
        """Let a peer and all others discover each other."""
        for other in self.peers:
            if other != name:
                self.handle(name, e.Discovered(other))
                self.handle(other, e.Discovered(name))

    def join(self, name: str, *, role: str = "worker") -> Peer:
        peer = self.start(name, role=role)
        self.meet(name)
        return peer

    def kill(self, name: str) -> None:
        self.peers[name].alive = False

    def dies_at(self, name: str, kind: type, seen: int) -> None:
        """Let a peer die once this many messages of a kind have been sent by it."""
        sent = count(1)

        def rule(sender: str, _to: str, message: Message) -> float | None:
            if sender != name or not isinstance(message, kind) or next(sent) <= seen:
                return None
            self.kill(name)
            return LOST

        self.rules_of_net.append(rule)

    # -- time

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self._number), act))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; stop early once ``until`` holds. Return whether it does."""
        end, most = self.now + seconds, int(self.busy * (seconds + 10))
        for played in count():
            if until():
                return True
            assert played < most, f"peers answer each other without end\n{self.tell()}"
            wakes = [(p.replica.next_wakeup(), name) for name, p in self.peers.items() if p.alive]
            wake, name = min(wakes, default=(LOST, ""))
            first = self.queue[0][0] if self.queue else LOST
            if min(wake, first) > end:
                self.now = end
                return until()
            if first <= wake:
                self.now, _, act = heapq.heappop(self.queue)
                act()
            else:
                self.now = max(self.now, wake)
                self.handle(name, e.Wakeup())
        raise AssertionError

    def reach(self, epoch: int, names: str = "", seconds: float = 120.0) -> None:
        """Run until these peers (all that live) have reached an epoch."""
        chosen = names or "".join(name for name, peer in self.peers.items() if peer.alive)
        assert self.run(seconds, lambda: all(self.peers[n].epoch >= epoch for n in chosen)), self.tell()

    def tell(self) -> str:
        """Return what each peer does, for a failed test."""
        lines = [f"now {self.now:.2f}"]
        for name, peer in self.peers.items():
            lines += [f"{name} alive={peer.alive} epoch {log.epoch} {log.round}" for log in peer.replica.logs]
            lines += [f"   {one}" for one in peer.seen[-6:]]
        return "\n".join(lines)

    # -- events and effects

    def wake(self, name: str) -> None:
        self.handle(name, e.Wakeup())

    def effects(self, name: str, event: e.Event) -> list[e.Effect]:
        """Feed an event to a peer's replica, and return the effects, which nobody carries out."""
        return list(self.peers[name].replica.handle(event, self.now))

    def handle(self, name: str, event: e.Event) -> None:
        """Feed an event to a peer's replica, and carry out the effects."""
        peer = self.peers[name]
        if not peer.alive:
            return
        for effect in peer.replica.handle(event, self.now):
            self.carry_out(peer, effect)

    def later(self, peer: Peer, seconds: float, event: e.Event) -> None:
        """Feed an event later, if the peer still lives."""
        self.after(seconds, lambda: self.handle(peer.name, event))

    def carry_out(self, peer: Peer, effect: e.Effect) -> None:
        match effect:
            case e.Send(to, message):
                self.send(peer, to, message)
            case e.Average(fragment, base, key, number, slices):
                mean = disjoint(part.payload for _, part in slices)
                done = e.Averaged(fragment, base, key, number, digest(mean), mean, b"signed")
                self.later(peer, WORK_S, done)
            case e.Apply(commit, means):
                old = peer.theta[commit.fragment]
                new = [disjoint((old[n], mean.payload)) for n, mean in enumerate(means)] if means else list(old)
                peer.proposals[commit.fragment, commit.version] = new
                self.later(peer, WORK_S, e.Applied(commit.fragment, commit.base, commit.version))
            case e.Fill(fragment, version, number, payload):
                peer.staged[fragment, number] = payload
                self.later(peer, WORK_S, e.Filled(fragment, version, number, digest(payload)))
            case e.Roll(commit, mean):
                place = commit.fragment, mean.number
                peer.staged[place] = disjoint((peer.staged[place], mean.payload))
                self.later(peer, WORK_S, e.Rolled(commit.fragment, commit.version, mean.number))
            case e.Accept():
                self.accept(peer, effect)
            case e.Note() | e.Complaint() | e.Died() | e.Finished():
                peer.seen.append(effect)
            case _:
                self.train(peer, effect)

    def accept(self, peer: Peer, effect: e.Accept) -> None:
        for fragment, version in effect.versions:
            slices = range(len(self.rules.fragments[fragment])) if effect.numbers is None else effect.numbers
            proposed = None if effect.staged else peer.proposals[fragment, version]
            for number in slices:
                new = peer.staged.pop((fragment, number)) if proposed is None else proposed[number]
                peer.theta[fragment][number] = new
            peer.proposals = {key: new for key, new in peer.proposals.items() if key[0] != fragment}
            known = self.versions.setdefault((fragment, version.chain), list(peer.theta[fragment]))
            if effect.numbers is None:
                assert not self.strict or known == peer.theta[fragment], "one version has unlike tensors"
            found = tuple(digest(steps) for steps in peer.theta[fragment])
            self.later(peer, DIGEST_S, e.Digested(fragment, version, found))

    # -- the network

    def send(self, peer: Peer, to: str, message: Message) -> None:
        if isinstance(message, Part):
            message = replace(message, payload=peer.theta[message.fragment][message.number])
        for lie in self.lies:
            message = lie(peer.name, to, message)
        target = self.peers.get(to)
        late = next((late for rule in self.rules_of_net if (late := rule(peer.name, to, message)) is not None), 0.0)
        if target is None or not target.alive:
            self.later(peer, 0.01, e.SendFailed(to, message, gone=True))
        elif frozenset((peer.name, to)) in self.cuts or late == LOST:
            self.later(peer, FAILS_AFTER_S, e.SendFailed(to, message, gone=False))
        else:
            self.after(0.02 + late, lambda: self.arrive(peer, to, message))

    def arrive(self, peer: Peer, to: str, message: Message) -> None:
        target = self.peers[to]
        if not target.alive:
            self.later(peer, 0.01, e.SendFailed(to, message, gone=True))
            return
        self.delivered.append((self.now, peer.name, to, message))
        if self.confirms_after_s:
            self.later(peer, self.confirms_after_s, e.Delivered(to, message))
        else:
            self.handle(peer.name, e.Delivered(to, message))
        self.handle(to, e.Received(peer.name, message))

    def lie(self, liars: str, kind: Any, changes: Callable[[Any], dict[str, Any]]) -> None:
        """From now on each message of this kind from these peers has these changes."""
        self.lies.append(lambda s, _, m: replace(m, **changes(m)) if s in liars and isinstance(m, kind) else m)

    def misstate(self, liars: str, changes: Callable[[Summary], dict[str, Any]]) -> None:
        """From now on the Summaries of these peers have these changes."""
        self.lie(liars, Probe | ProbeAck, lambda m: {"summary": replace(m.summary, **changes(m.summary))})

    def cut(self, one: str, others: str) -> None:
        self.cuts |= {frozenset((a, b)) for a in one for b in others}

    def sent(self, kind: type, *, by: str = "", to: str = "") -> list[Any]:
        """Return the delivered messages of a kind."""
        return [
            m for _, s, t, m in self.delivered if isinstance(m, kind) and (not by or s in by) and (not to or t in to)
        ]

    # -- the trainer

    def train(self, peer: Peer, effect: e.Effect) -> None:
        match effect:
            case e.Start():
                self.later(peer, 0.0, e.Merge())
            case e.Load(fragments, due):
                for loaded in fragments:
                    self.merge(peer, loaded)
                if due is not None and not peer.waits_for_release:
                    self.steps(peer, due)
            case e.Release():
                peer.waits_for_release = False
                peer.waits.append(self.now - peer.contributed_at)
                self.later(peer, 0.0, e.Merge())

    def merge(self, peer: Peer, loaded: e.Loaded) -> None:
        progress = peer.progress[loaded.fragment]
        if loaded.outcome.dropped:
            made = {f"{peer.name}{number}/{loaded.fragment}" for number in range(1, peer.made + 1)}
            peer.dropped |= made - peer.counted(loaded.fragment)  # with what a lost lineage counted
            progress.pending = NOTHING
        elif loaded.outcome.counted:
            progress.pending -= progress.sent

    def steps(self, peer: Peer, fragment: int) -> None:
        """Train for a round: one step for each fragment at its end, then contribute."""
        parts = max(1, int(peer.trains_s))
        for part in range(parts):
            self.later(peer, part * peer.trains_s / parts, e.Stepped(0.1))
        self.after(peer.trains_s, lambda: self.contribute(peer, fragment))

    def contribute(self, peer: Peer, fragment: int) -> None:
        if not peer.alive:
            return
        peer.made += 1
        for number, progress in enumerate(peer.progress):
            progress.pending |= {f"{peer.name}{peer.made}/{number}"}
        pending = peer.progress[fragment].pending
        slices = len(self.rules.fragments[fragment])
        peer.waits_for_release, peer.contributed_at = True, self.now
        event = e.Contribute(fragment, 1.0, 10, (digest(pending),) * slices, (pending,) * slices)
        self.handle(peer.name, event)
        own = peer.replica.own
        if own.fragment == fragment and own.parts:  # taken up again, it has what it had
            peer.progress[fragment].sent = own.parts[0].payload

    # -- what must hold

    def check(self) -> None:
        """Check that peers at one version have equal tensors, and that every live peer's step is counted, pending, or
        dropped and said."""
        for peer in self.peers.values():
            if not peer.alive:
                continue
            for fragment in range(len(self.rules.fragments)):
                state = peer.state(fragment)
                known = self.versions.setdefault((fragment, state.version.chain), list(peer.theta[fragment]))
                assert known == peer.theta[fragment], "peers at one version have unlike tensors"
                there, progress = peer.counted(fragment), peer.progress[fragment]
                mine = {f"{peer.name}{number}/{fragment}" for number in range(1, peer.made + 1)}
                lost = mine - there - progress.pending - peer.dropped
                assert not lost, f"steps of {peer.name} are lost: {sorted(lost)}"
