"""One simulated run, called a world: processes, clocks, a network and faults, all drawn from one seed. Every event is
checked."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random

from p2p_diloco.core import events as e
from p2p_diloco.core.messages import Message
from p2p_diloco.core.revision import FOUNDED
from p2p_diloco.history.reading import Entry

from .data import Data
from .face import Face, Saved, Truth
from .faults import Faults
from .founder import Founder
from .hostile import Hostile
from .invariants import advanced, after_event, said
from .membership import Membership
from .model import require
from .process import Process
from .settings import PLAIN, Settings
from .trainers import Trainers
from .ways import Ways
from .witness import Witness

STORM = 5_000
"""The most events in a simulated second; twelve peers with four fragments have about 800."""


class World:
    """One simulated run. It feeds events to the replicas and carries out their effects, as nodes do in a real run."""

    face: type[Face] = Face

    def __init__(self, seed: int, settings: Settings = PLAIN, trace: bool = False) -> None:
        self.seed, self.rng, self.settings = seed, Random(seed), settings
        self.lags, self.links = Random(f"lags {seed}"), Random(f"bandwidths {seed}")
        self.now, self.count = 0.0, 0
        self.in_second = 0  # events since the present second began
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.trace: list[Entry] | None = [] if trace else None
        self.rules = settings.rules()
        self.units = range(len(self.rules.fragments))
        self.truth = Truth()
        self.names = [f"p{i}" for i in range(settings.peers)]
        self.alive: dict[str, Process] = {}
        self.disks: dict[str, Saved] = {}  # peer → what its replica has saved
        self.cut: set[frozenset[str]] = set()
        self.mute: set[tuple[str, str]] = set()  # (from, to) of links that lose everything in this direction
        self.flips = 0
        self.happened: Counter[str] = Counter()  # number of faults, messages by what became of them, notes, versions
        self.drop, self.duplicate = settings.drop, settings.duplicate
        self.ways = Ways(self)
        self.faults = Faults(self)
        self.trainers = Trainers(self)
        self.data = Data(self) if settings.samples else None
        self.hostile = Hostile(self) if settings.hostile else None
        self.witness = Witness(self.rules, one_line=settings.deaths_at_once is not None)
        self.membership = Membership(self)
        self.founder = Founder(self)
        self.commits: list[tuple[float, str, int, int]] = []  # (time, peer, unit, epoch) of each new version
        for i, name in enumerate(self.names):
            within = settings.late if settings.late is not None and i > 1 else (0.0, 3.0)
            self.at(0.0 if i == 0 else self.rng.uniform(*within), self._starter(name, found=i == 0))

    # -- time

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Schedule an action after this delay."""
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay, self.count, action))

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Let time pass until ``until``, or until ``stop()`` is true (asked after every event)."""
        while self.queue and self.queue[0][0] <= until:
            before = int(self.now)
            self.now, _, action = heapq.heappop(self.queue)
            self.in_second = 1 if int(self.now) > before else self.in_second + 1
            require(self.in_second <= STORM, "n", f"more than {STORM} events in a second")
            action()
            if stop is not None and stop():
                return
        self.now = until

    # -- processes

    def _starter(self, name: str, found: bool = False) -> Callable[[], None]:
        def start() -> None:
            if name not in self.alive:
                self.start(name, found=found)

        return start

    def start(self, name: str, found: bool = False, from_disk: bool = False) -> Process:
        """Start an incarnation of a peer: as founder (``found``), with the state on its disk (``from_disk``; if the
        disk has none, without a state), or without a state."""
        saved = self.disks.get(name) if from_disk else None
        process = self.alive[name] = Process(self, name)
        self.trainers.all.append((name, process.trainer))
        self.say(name, "starts" + (" from disk" if saved else ""))
        self.ways.starts(process)
        if found:
            self.feed(process, process.replica.founds())
        elif saved is not None:
            self.feed(process, process.replica.restored(saved))
        self.feed(process, e.Wakeup())
        self._discover(process)
        self.at(self.links.uniform(*self.settings.measured_every), lambda: self._measure(process))
        return process

    def crash(self, name: str) -> None:
        """Kill a process at once, as by kill -9; its connections break."""
        process = self.alive.pop(name)
        self.membership.disturbed(self.now)
        self.say(name, "crashes")
        for other in list(self.alive.values()):
            linked = self.ways.joined(name, other.name) if self.ways.on else self.connected(name, other.name)
            if linked and process.replica.roster.live(other.name):
                self.later(other, self.rng.uniform(0.01, 0.3), e.Broke(name))
        self.ways.lost(name)
        self.ways.look()

    def _discover(self, process: Process) -> None:
        """Let the process find all live peers and the founder's record in the DHT. Schedule the next such search."""
        if self.alive.get(process.name) is not process:
            return
        for other in sorted(self.alive):
            if other != process.name:
                self.later(process, self.rng.uniform(0.1, 1.0), e.Discovered(other))
        if self.hostile is not None and not self.hostile.silent:
            self.later(process, self.rng.uniform(0.1, 1.0), e.Discovered(self.hostile.name))
        if self.founder.present > process.replica.roster.mine.revision:
            self.feed_alive(process, e.Revised(self.founder.present))
        elif self.settings.record_kept and process.known > FOUNDED:
            self.founder.record(process.known)
        self.at(5.0, lambda: self._discover(process))

    def _measure(self, process: Process) -> None:
        """Let a peer measure its bandwidth, for the first time or after a change. Schedule the next measurement."""
        if self.alive.get(process.name) is not process or self.settings.bandwidths is None:
            return
        slowest, fastest = self.settings.bandwidths
        self.feed_alive(process, e.Measured(slowest * (fastest / slowest) ** self.links.random()))
        self.at(self.links.uniform(*self.settings.measured_every), lambda: self._measure(process))

    def holders(self) -> list[str]:
        """Return the live peers that hold a state of every unit, sorted."""
        return sorted(n for n, p in self.alive.items() if p.replica.has_state)

    # -- network

    def connected(self, a: str, b: str) -> bool:
        """Whether no cut separates the two peers."""
        return frozenset((a, b)) not in self.cut

    def carries(self, sender: str, to: str) -> bool:
        """Whether messages from ``sender`` can reach the peer ``to``, on the direct link or through a relay."""
        if self.ways.on:
            return self.ways.joined(sender, to)
        return self.connected(sender, to) and (sender, to) not in self.mute

    @property
    def torn(self) -> bool:
        """Whether there are peers that can't send messages to each other at present."""
        return bool(self.ways.apart if self.ways.on else self.cut or self.mute)

    def send(self, sender: Process, to: str, message: Message) -> None:
        """Send a message. The message may be lost or duplicated; the sender gets Delivered or SendFailed."""
        light, (message, damage) = message, sender.replica.laden(sender, message)
        if damage is not None:
            self.later(sender, 0.01, damage)
            self.later(sender, 0.01, e.SendFailed(to, light, gone=False))
            return
        if self.hostile is not None:
            self.hostile.spoils(message)
            if self.hostile.takes(sender, to, message):
                return
        target = self.alive.get(to)
        if target is None:
            gone = self.ways.refused(sender.name, to)
            self.later(sender, self.rng.uniform(0.01, 0.2), e.SendFailed(to, message, gone=gone))
            return
        self.happened["sent"] += 1
        lag = self.settings.state_lag * self.lags.uniform(0.7, 1.3) if message is not light else 0.0
        detour = self.ways.delay(sender.name, to) if self.ways.on else 0.0 if self.carries(sender.name, to) else None
        if self.rng.random() < self.drop or detour is None:
            self.happened["lost"] += 1
            self.later(sender, 3.0, e.SendFailed(to, message, gone=False))
            return
        copies = 2 if self.rng.random() < self.duplicate else 1
        self.happened["doubled"] += copies - 1
        for copy in range(copies):
            delay = lag + detour + self.rng.expovariate(1 / self.settings.delay_mean)
            self.at(delay, lambda copy=copy: self._arrive(sender, target, message, answer=copy == 0))  # type: ignore[misc]

    def _arrive(self, sender: Process, target: Process, message: Message, answer: bool) -> None:
        """Feed a message to its receiver, and report the delivery to the sender if ``answer``."""
        if self.alive.get(target.name) is not target:
            if answer:
                self.feed_alive(sender, e.SendFailed(target.name, message, gone=True))
            return
        if target.frozen_until > self.now:
            self.at(target.frozen_until - self.now, lambda: self._arrive(sender, target, message, answer))
            return
        self.feed(target, e.Received(sender.name, message))
        if answer and self.carries(target.name, sender.name):
            self.later(sender, self.rng.expovariate(1 / self.settings.delay_mean), e.Delivered(target.name, message))
        elif answer:
            self.later(sender, 3.0, e.SendFailed(target.name, message, gone=False))

    # -- feeding events, carrying out effects

    def later(self, process: Process, delay: float, event: e.Event) -> None:
        """Feed an event to the process after this delay."""
        self.at(delay, lambda: self.feed_alive(process, event))

    def feed_alive(self, process: Process, event: e.Event) -> None:
        """Feed an event to the process if it still lives. A frozen process gets the event when its freeze ends."""
        if self.alive.get(process.name) is not process:
            return
        if process.frozen_until > self.now:
            self.later(process, process.frozen_until - self.now, event)
            return
        self.feed(process, event)

    def feed(self, process: Process, event: e.Event) -> None:
        """Feed an event to the process, carry out the effects, check the invariants and schedule the next wakeup."""
        effects = process.replica.handle(event, process.clock(self.now))
        if self.trace is not None:
            self.trace.append(Entry(self.now, process.name, event, tuple(effects)))
        for effect in effects:
            self._carry_out(process, effect)
        after_event(self, process, ticked=isinstance(event, e.Wakeup))
        wakeup = process.replica.next_wakeup() - process.skew
        if wakeup < process.woken_for - 1e-9 or process.woken_for <= self.now:
            process.woken_for = wakeup
            self.at(max(0.001, wakeup - self.now), lambda: self._wake(process))

    def _wake(self, process: Process) -> None:
        """Feed a Wakeup to the process, unless its next wakeup is later than now."""
        if process.woken_for <= self.now + 1e-9:
            process.woken_for = float("-inf")
            self.feed_alive(process, e.Wakeup())

    def _carry_out(self, process: Process, effect: e.Effect) -> None:
        """Carry out an effect, as a node would."""
        match effect:
            case e.Send(to, message):
                said(process, message)
                self.send(process, to, message)
            case e.Start():
                if not process.training:
                    process.training = True
                    self.at(process.step_time, lambda: self.trainers.step(process))
            case e.Changed():
                process.changed = True
            case e.Release():
                process.released = True
                self.trainers.land(process)
            case e.Note(kind):
                if kind == "fork":
                    self.membership.joins_lineage(process)
                    process.goes_over = True
                self.happened[f"note {kind}"] += 1
            case e.Complaint(peer, why):
                honest = peer in self.names and why.startswith(("a commit", "its Close"))
                require(not honest, "w", f"{process.name} refuses what the honest {peer} decided: {why}")
            case _:
                process.replica.carry_out(process, effect)

    def accepted(self, process: Process, unit: int) -> None:
        """Record that a peer has a new version of a unit, and check it."""
        version = process.replica.versions[unit]
        assert version is not None
        self.witness.accepts(process, unit, version, self.alive.values(), self.now)
        advanced(self, process, unit)
        self.commits.append((self.now, process.name, unit, version.epoch))
        self.happened["moved"] += 1

    def say(self, who: str, what: str) -> None:
        """Add a line to the trace, if a trace is kept, for something other than a replica's event."""
        if self.trace is not None:
            self.trace.append(Entry(self.now, who, what))

    @property
    def lines(self) -> list[str]:
        """The trace as text; empty if none is kept."""
        return [line for entry in self.trace or () for line in entry.lines()]

    def damaged(self, process: Process, unit: int) -> bool:
        """Whether a unit's tensors do not match its version. If so, raise Violation unless a bit was flipped in this
        run."""
        damaged = process.replica.damaged(unit)
        require(not damaged or self.flips > 0, "a", f"{process.name}: unit {unit} does not match its version")
        return damaged
