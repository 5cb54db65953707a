"""What the control plane of a large swarm costs each peer, and what many deaths or joins at once do to it.

    python examples/scale.py --peers 10 30 100

The time it takes grows with the square of the peers, and with the slices.

Every peer is the package's own `Replica`, and every message is packed as in a real run; virtual time. Imitated are the
links (each message takes `LATENCY_S`; payloads are counted, and take no time), the tensors (lengths alone) and the
trainers. Replicas that hold equal states share one object, and what follows from it is computed once for all.

Prints, for each number of peers: messages and bytes of headers that a peer sends in a second, by kind; the busiest
peer's share; the time from the death of a tenth of the peers, in the middle of an exchange, to the next commit; and how
many of as many newcomers are counted two rounds later. The exit code is 1 if replicas differ at the end.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from p2p_diloco.core import admission, applying, events, fetching, state
from p2p_diloco.core.messages import Choice, Close, Commit, Mean, Message, Ready, Slice
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.roster import Peer as Known
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, founding, hash_of, key_of, rooted
from p2p_diloco.core.version import ContributionId, Version, incarnation
from p2p_diloco.node import headers
from p2p_diloco.node.wire import TOKEN_BYTES

LATENCY_S = 0.05
BREAKS_WITHIN_S = 0.3
"""The connections of a peer that dies break within this time."""
STEPS, STEP_S = 50, 0.5
REPORTS_EVERY_S = 5.0
"""A trainer reports its steps at least so often."""
TELLS_EVERY_S = 60.0
"""The seconds of processor time between two lines of progress."""
SEAL = bytes(64)
"""A signature."""
SEALED = Ready | Close | Commit | Mean
"""Messages that their senders sign."""
EXCHANGING = 0.975
"""The part of a round after which the peers exchange: they end their steps from 0.95 of it on."""
JOINED_AFTER = 2.7
"""Rounds after which newcomers should be counted: the one that they come into, and two more."""
REMEMBERED = 4096


def rules_of(slices: int) -> Rules:
    """The rules of a run of one fragment with so many slices."""
    return Rules(run="scale", fragments=(tuple(range(slices)),), sync_every=STEPS)


def progress(text: str) -> None:
    """Say how far a long measurement is."""
    sys.stderr.write(f"{text}\n")


def remembered(function: Callable[..., Any], keys: int) -> Callable[..., Any]:
    """Remember the results of a pure function by the identity of its first ``keys`` arguments."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        key = tuple(map(id, arguments[:keys]))
        if key not in known:
            if len(known) >= REMEMBERED:
                del known[next(iter(known))]
            known[key] = arguments, function(*arguments)  # the arguments stay alive, so that their ids stay theirs
        return known[key][1]

    return call


def digest(of: bytes) -> str:
    """A digest of the length of a real one."""
    return blake2b(of, digest_size=16).hexdigest()


class Swarm:
    """All peers, the clock, and the wires."""

    def __init__(self, peers: int, rules: Rules, seed: int) -> None:
        self.rules, self.rng, self.now = rules, random.Random(seed), 0.0
        self._tells_at = time.process_time() + TELLS_EVERY_S
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = self._named = 0
        self.live: dict[str, Peer] = {}
        self.messages, self.nbytes, self.of_peer = Counter[str](), Counter[str](), Counter[str]()
        self.payloads = Counter[str]()  # slices and means sent and received, by peer
        self.newest = 1  # the highest epoch that any peer has reached
        self._lengths: dict[int, tuple[Message, Message, int]] = {}
        names = [self._name() for _ in range(peers)]
        lives = {name: incarnation(1_000_000, number) for number, name in enumerate(names)}
        for name, life in lives.items():
            self.live[name] = Peer(self, name, life)
        begun = self._state(lives)
        for peer in self.live.values():
            peer.feed(events.Restore((begun,)))
        self._introduce()
        for peer in self.live.values():
            peer.start()

    def _name(self) -> str:
        self._named += 1
        return "12D3KooW" + blake2b(f"{self._named}".encode(), digest_size=22).hexdigest()

    def _state(self, lives: dict[str, int]) -> State:
        """The state after a first round of all peers."""
        names, slices = sorted(lives), self.rules.slices
        first = founding(0, Version(0, 0, 0, digest(b"theta0")), names[0], slices)
        ids = {name: ContributionId(life, 0) for name, life in lives.items()}
        hashes = (digest(b"slice"),) * slices
        entries = tuple(
            (name, rooted(Ready(0, first.version, ids[name], ids[name], float(STEPS), STEPS, hashes))) for name in names
        )
        choice = Choice(names[0], 0, entries)
        return state.append(first, choice, key_of(0, first.version, choice), hashes, self.rules)

    def _introduce(self) -> None:
        """Let all peers know each other, as they would after a while."""
        summaries = {name: peer.replica.roster.mine for name, peer in self.live.items()}
        for peer in self.live.values():
            for name in summaries.keys() - {peer.name}:
                member = peer.replica.roster.peers.setdefault(name, Known())
                member.summary, member.unanswered = summaries[name], None
                member.probed = self.rng.uniform(-len(summaries) / 3, 0.0)

    # -- time

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Let something happen at this time."""
        self._scheduled += 1
        heapq.heappush(self._queue, (max(when, self.now), self._scheduled, action))

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until then, or until ``stop()`` is true."""
        while self._queue and self._queue[0][0] <= until and not stop():
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if time.process_time() > self._tells_at:
                self._tells_at = time.process_time() + TELLS_EVERY_S
                progress(f"{len(self.live)} peers, {self.now:.1f} s: epoch {self.newest}")

    def all_move(self, within: float) -> float:
        """Let time pass until there is a newer version than now; returns how long that took, or inf."""
        began, before = self.now, self.newest
        self.run(began + within, lambda: self.newest > before)
        return self.now - began if self.newest > before else float("inf")

    # -- who takes part

    def kill(self, name: str) -> None:
        """A peer dies; connections break at the peers that exchange payloads with it."""
        dead = self.live.pop(name)
        for other in self.live.values():
            if other.name in dead.linked:
                moment = self.now + self.rng.uniform(0.01, BREAKS_WITHIN_S)
                self.at(moment, functools.partial(other.feed, events.Broke(name)))

    def join(self) -> str:
        """A newcomer finds all live peers; returns its name."""
        name, others = self._name(), list(self.live)
        peer = self.live[name] = Peer(self, name, incarnation(int(1e6 + 1e3 * self.now), self._named))
        peer.start()
        for other in others:
            moment = self.now + self.rng.uniform(0.1, 1.0)
            self.at(moment, functools.partial(peer.feed, events.Discovered(other)))
        return name

    # -- the wires

    def send(self, sender: Peer, to: str, message: Message) -> None:
        """Deliver a message, or report to its sender that it was not delivered."""
        message, nbytes = self._sealed(sender, message)
        kind = type(message).__name__
        self.messages[kind] += 1
        self.nbytes[kind] += nbytes
        self.of_peer[sender.name] += nbytes
        self.of_peer[to] += nbytes
        if (target := self.live.get(to)) is None:
            self.at(self.now + LATENCY_S, lambda: sender.feed(events.SendFailed(to, message, gone=True)))
            return
        if isinstance(message, Slice | Mean):
            self.payloads[sender.name] += 1
            self.payloads[to] += 1
            sender.linked.add(to)
            target.linked.add(sender.name)
        self.at(self.now + LATENCY_S, lambda: self._arrives(sender, target, message))

    def _arrives(self, sender: Peer, target: Peer, message: Message) -> None:
        if target.gone:
            sender.feed(events.SendFailed(target.name, message, gone=True))
            return
        target.feed(events.Received(sender.name, message))
        self.at(self.now + LATENCY_S, lambda: sender.feed(events.Delivered(target.name, message)))

    def _sealed(self, sender: Peer, message: Message) -> tuple[Message, int]:
        """A message as its sender signs it, and the bytes of its header."""
        known = self._lengths.get(id(message))
        if known is None:
            if len(self._lengths) > REMEMBERED:
                self._lengths.clear()
            whole = replace(message, seal=SEAL) if isinstance(message, SEALED) and not message.seal else message
            header, body = headers.pack(whole, bytes(TOKEN_BYTES))
            known = self._lengths[id(message)] = message, whole, len(header) + len(body or b"")
        return known[1:]


class Peer:
    """One peer: its replica, and a trainer that makes steps in virtual time."""

    def __init__(self, swarm: Swarm, name: str, life: int) -> None:
        self.swarm, self.name, self.linked = swarm, name, set[str]()
        self.replica = Replica(name, swarm.rules, incarnation=life, now=swarm.now)
        self._events: list[events.Event] = []
        self._wakes_at = float("inf")
        self._trained = False

    @property
    def gone(self) -> bool:
        """Whether the peer has died."""
        return self.swarm.live.get(self.name) is not self

    def start(self) -> None:
        """Begin to wake up, at a moment of its own."""
        self.replica.next_tick = self.swarm.now + self.swarm.rng.uniform(0.0, self.swarm.rules.probe_every)
        self.swarm.at(self.replica.next_tick, lambda: self.feed(events.Wakeup()))

    def feed(self, event: events.Event) -> None:
        """Feed an event to the replica and carry out what follows."""
        self._events.append(event)
        if self.gone or len(self._events) > 1:
            return
        while self._events:
            for effect in self.replica.handle(self._events[0], self.swarm.now):
                self._carry_out(effect)
            self._events.pop(0)
        due = self.replica.next_wakeup()
        if due < self._wakes_at or self._wakes_at <= self.swarm.now:
            self._wakes_at = due
            self.swarm.at(max(due, self.swarm.now + 1e-3), self._wake)

    def _wake(self) -> None:
        if self._wakes_at <= self.swarm.now:
            self._wakes_at = float("-inf")
            self.feed(events.Wakeup())

    def _carry_out(self, effect: events.Effect) -> None:
        swarm, told = self.swarm, self._events.append
        match effect:
            case events.Send(to, message):
                swarm.send(self, to, message)
            case events.Average(fragment, base, key, number):
                mean = hash_of(base, key, number)
                told(events.Averaged(fragment, base, key, number, mean, None, SEAL))
            case events.Apply(commit):
                told(events.Applied(commit.fragment, commit.base, commit.version))
            case events.Fill(fragment, version, number):
                told(events.Filled(fragment, version, number, hash_of(version, number)))
            case events.Roll(commit, mean):
                told(events.Rolled(commit.fragment, commit.version, mean.number))
            case events.Accept(((fragment, version),)):
                swarm.newest = max(swarm.newest, version.epoch)
                sums = tuple(hash_of(version, number) for number in range(swarm.rules.slices))
                told(events.Digested(fragment, version, sums))
            case events.Start() | events.Release():
                self._trained = False
                swarm.at(swarm.now, lambda: self.feed(events.Merge()))
            case events.Load() if not self._trained:
                self._train(swarm.now + STEPS * STEP_S * swarm.rng.uniform(0.95, 1.0))
            case events.Load(_, int(due)):
                hashes = tuple(hash_of(self.name, swarm.now, number) for number in range(swarm.rules.slices))
                told(events.Contribute(due, float(STEPS), STEPS, hashes, (None,) * len(hashes)))

    def _train(self, until: float) -> None:
        """Make steps until then; then contribute what is due."""
        if self.gone:
            return
        swarm = self.swarm
        swarm.at(swarm.now, lambda: self.feed(events.Stepped(STEP_S)))
        if swarm.now < until:
            swarm.at(min(until, swarm.now + REPORTS_EVERY_S), lambda: self._train(until))
        else:
            self._trained = True
            swarm.at(swarm.now, lambda: self.feed(events.Merge()))


def measured(peers: int, slices: int, rounds: int, seed: int, storms: Sequence[str]) -> dict[str, Any]:
    """Let a swarm of this size go through its rounds and storms; the figures."""
    began, round_s = time.process_time(), STEPS * STEP_S
    swarm = Swarm(peers, rules_of(slices), seed)
    swarm.run(0.8 * round_s)
    for counts in (swarm.messages, swarm.nbytes, swarm.of_peer, swarm.payloads):
        counts.clear()
    since = swarm.now
    swarm.run(since + rounds * round_s)
    peer_seconds = peers * (swarm.now - since)
    sent = sorted(swarm.messages.items())
    a_second = {kind: (count / peer_seconds, swarm.nbytes[kind] / peer_seconds) for kind, count in sent}
    busiest = [max(counts.values()) / statistics.fmean(counts.values()) for counts in (swarm.of_peer, swarm.payloads)]
    told: dict[str, Any] = {"peers": peers, "slices": slices, "a_second": a_second, "busiest": busiest}
    progress(json.dumps(told))
    if "deaths" in storms:
        swarm.all_move(2 * round_s)
        swarm.run(swarm.now + EXCHANGING * round_s)
        for name in swarm.rng.sample(sorted(swarm.live), max(1, peers // 10)):
            swarm.kill(name)
        told["deaths_s"] = swarm.all_move(20 * round_s)
        progress(f"a tenth has died: {told['deaths_s']:.1f} s")
    if "joins" in storms:
        swarm.run(swarm.now + 0.5 * round_s)
        joined = [swarm.join() for _ in range(max(1, peers // 10))]
        swarm.run(swarm.now + JOINED_AFTER * round_s)
        held = next(iter(swarm.live.values())).replica.logs[0].held
        counted = {name for name, member in held.roll.items() if member.epoch == held.version.epoch}
        told["joins"] = len(joined), len(counted & {*joined})
    swarm.run(swarm.now + 0.5 * round_s)  # in the middle of the next steps all hold the same
    told["equal"] = len({peer.replica.versions for peer in swarm.live.values()}) == 1
    return {**told, "cpu_s": round(time.process_time() - began, 1)}


def main() -> int:
    """Measure swarms of the given sizes and print the tables."""
    parser = argparse.ArgumentParser(description="What the control plane of a large swarm costs each peer.")
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--slices", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storms", nargs="*", choices=["deaths", "joins"], default=["deaths", "joins"])
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each size")
    asked = parser.parse_args()
    append = remembered(state.append, 2)
    for module in (admission, applying, fetching, state):
        module.append = append  # type: ignore[attr-defined]
    equal = True
    for peers in asked.peers:
        told = measured(peers, asked.slices, asked.rounds, asked.seed, asked.storms)
        equal = equal and told["equal"]
        sys.stdout.write((json.dumps(told) if asked.json else text_of(told)) + "\n")
        sys.stdout.flush()
    return int(not equal)


def text_of(told: dict[str, Any]) -> str:
    """The figures of one swarm, in words."""
    rows = told["a_second"]
    lines = [f"{told['peers']} peers, {told['slices']} slices: {sum(n for n, _ in rows.values()):.1f} messages and "
             f"{sum(b for _, b in rows.values()):,.0f} bytes of headers a second, sent by each peer"]  # fmt: skip
    lines += [f"  {kind:13} {count:8.2f} messages  {nbytes:10,.0f} bytes" for kind, (count, nbytes) in rows.items()]
    lines.append("  the busiest peer: {:.1f} x the mean of headers, {:.1f} x of payloads".format(*told["busiest"]))
    if "deaths_s" in told:
        lines.append(
            f"  a tenth dies in the middle of an exchange: the next commit is there {told['deaths_s']:.1f} s later"
        )
    if "joins" in told:
        lines.append("  {} join at once: {} of them are counted two rounds later".format(*told["joins"]))
    lines.append(f"  replicas {'are equal' if told['equal'] else 'DIFFER'}; {told['cpu_s']} s of processor time")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
