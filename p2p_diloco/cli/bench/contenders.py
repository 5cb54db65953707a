"""Who is measured: processes started, told what to do, and listened to, one round at a time.

Law: every wait is bounded, ends early when a signal asks us to end, and fails with a sentence that has the last words
of who didn't answer. Nothing here computes a figure.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.cli.bench import measure
from p2p_diloco.cli.bench.measure import Memory, Result, Round
from p2p_diloco.cli.bench.network import Network
from p2p_diloco.cli.bench.plan import AVERAGER, GLOO, RAW, WIDTHS, Plan
from p2p_diloco.cli.demo.processes import Child, Children, Signals

START_S = 180.0
"""How long processes may take to import torch, all at once on few cores."""
LOOK_EVERY_S = 0.01
SEED = "seed"
"""A peer, and its machine, that only shows others the way, and what processes without a model take."""
Line = dict[str, Any]


class Interrupted(Exception):
    """A signal asked us to end; its number."""


class Failed(Exception):
    """A process ended, didn't answer in time, or answered what can't be; the sentence says which and what."""


class Member:
    """A measured process, and what it has said."""

    def __init__(self, child: Child) -> None:
        self.child, self.name = child, child.name
        self._said: list[Line] = []
        self._heard = 0

    def tell(self, do: str, **values: Any) -> None:
        """A command."""
        self.child.tell(json.dumps({"do": do, **values}))

    def next(self, what: str) -> Line | None:
        """The next line of a kind, if it has come; those before it are passed over.

        Raises:
            Failed: it never will.
        """
        ended = self.child.status is not None
        self._said += self.child.printed.new()
        while self._heard < len(self._said):
            line = self._said[self._heard]
            self._heard += 1
            if line["what"] == what:
                return line
        if ended:
            raise Failed(f"{self.name} ended with status {self.child.status}: {self.child.last_words()}")
        return None


@dataclass
class Bench:
    """What all contenders share. `network`: None on loopback."""

    plan: Plan
    children: Children
    signals: Signals
    network: Network | None
    machines: dict[str, list[str]] = field(default_factory=dict)

    def start(self, name: str, module: str, machine: str, options: Mapping[str, Any]) -> Member:
        """Start a process on a machine."""
        common = {"name": name, "host_maddrs": [self.listens(machine)], "round_s_max": self.plan.round_s_max}
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        device = loopback if self.network is None else "eth0"
        child = self.children.start(
            name,
            f"p2p_diloco.cli.bench.{module}",
            json.dumps({**common, **options}),
            on=self._machine(machine),
            listens=True,
            environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device},
        )
        return Member(child)

    def listens(self, machine: str) -> str:
        """Where a process on a machine listens."""
        self._machine(machine)
        host = "127.0.0.1" if self.network is None else self.network.machines[machine]
        return f"/ip4/{host}/tcp/0"

    def heard(self, members: Sequence[Member], what: str, within_s: float = START_S) -> list[Line]:
        """The next line of a kind from each.

        Raises:
            Failed: not all said it in time. Interrupted: a signal came.
        """
        lines: dict[str, Line] = {}
        give_up_at = time.monotonic() + within_s
        while len(lines) < len(members):
            if self.signals.received:
                raise Interrupted(self.signals.received[0])
            for member in members:
                if member.name not in lines and (line := member.next(what)) is not None:
                    lines[member.name] = line
            late = [member for member in members if member.name not in lines]
            if late and time.monotonic() >= give_up_at:
                words = late[0].child.last_words()
                raise Failed(f"{late[0].name} did not say {what!r} within {within_s:.0f} s: {words}")
            if late:
                time.sleep(LOOK_EVERY_S)
        return [lines[member.name] for member in members]

    def _machine(self, name: str) -> list[str]:
        """The beginning of a command line on a machine, which is made when it is first asked for."""
        if self.network is None:
            return []
        if name not in self.machines:
            self.machines[name] = self.network.machine(name)
            if name != SEED and self.plan.links_mbit:
                self.network.throttle(name, self.plan.links_mbit[int(name.removeprefix("m"))])
        return self.machines[name]


class Contender:
    """One of those who take turns. `sent_bytes`: that a peer of it sends in a round. In a `ring` each member is told
    who the next one is.
    """

    def __init__(
        self, bench: Bench, name: str, members: Sequence[Member], sent_bytes: int, *, ring: bool = False
    ) -> None:
        self.name, self.members, self.sent_bytes, self.ring = name, list(members), sent_bytes, ring
        self.rounds: list[Round] = []
        self.failed = ""
        self.idle = Memory({})
        self._bench = bench

    def play(self) -> Round:
        """One round.

        Raises:
            Failed: it didn't come to its end. Interrupted: a signal came.
        """
        within_s, children = self._bench.plan.round_s_max, [member.child for member in self.members]
        for do, answer in (("train", "trained"), ("round", "round")):
            before = measure.cpu_s(children)
            for member in self.members:
                member.tell(do)
            lines = self._bench.heard(self.members, answer, within_s)
        self.check(lines)
        self.rounds.append(measure.round_of(lines, measure.less(measure.cpu_s(children), before)))
        return self.rounds[-1]

    def check(self, lines: Sequence[Line]) -> None:
        """Whether the round was what it should be.

        Raises:
            Failed: it was not.
        """
        exchanges = {line["exchanges"] for line in lines if "exchanges" in line}
        expected = self._bench.plan.fragments
        first = not self.rounds and bool(self._bench.plan.overlap)  # its last exchange is merged in the next
        if exchanges - ({expected, expected - 1} if first else {expected}):
            raise Failed(f"{self.name}: a peer made {max(exchanges)} exchanges in a round")
        if len({line["digest"] for line in lines if "digest" in line}) > 1:
            raise Failed(f"{self.name}: peers differ after a round")

    def result(self, warm_up: int) -> Result:
        """What it came to, without the first rounds."""
        peaks = [measure.peak(member.child) for member in self.members if member.child.status is None]
        highest = max(peaks, key=lambda memory: memory.total, default=Memory({}))
        counted = tuple(self.rounds[warm_up:])
        failed = self.failed or ("" if counted else "no round of it counts")
        return Result(self.name, counted, self.sent_bytes, len(self.members), self.idle, highest, failed)


def all_of(bench: Bench) -> list[Contender]:
    """Everybody who takes part, ready for the first round.

    Raises:
        Failed: a process didn't start. Interrupted: a signal came.
    """
    plan = bench.plan
    seed = _peer(bench, SEED, SEED, 0, [])
    beside = _beside(bench)
    wire_bytes = bench.heard([seed], "sizes")[0]["wire_bytes"]
    seed.tell("make")
    addresses = bench.heard([seed], "ready")[0]["addresses"]
    ours = [_peer(bench, f"peer-{rank}", f"m{rank}", rank, addresses) for rank in range(plan.peers)]
    sent = round(plan.share * wire_bytes)
    run = Contender(bench, f"p2p_diloco {plan.codec}", ours, sent)
    for contender in beside:
        contender.sent_bytes = contender.sent_bytes or sent
    for contender in (run, *beside):
        bench.heard(contender.members, "idle")
        contender.idle = measure.held(contender.members[0].child)
    run.idle = measure.held(seed.child)  # its node and its daemon too
    ours[0].tell("make")  # it founds the run: the others fetch its state, and its link is the one named first
    bench.heard(ours[:1], "ready")
    for contender in (run, *beside):
        new = contender.members[1:] if contender is run else contender.members
        for member in new:
            member.tell("make", nbytes=sent)
        ready = bench.heard(new, "ready", START_S + plan.fetch_s)
        if contender.ring:
            _close_ring(bench, contender.members, ready)
    return [run, *beside]


def _peer(bench: Bench, name: str, machine: str, rank: int, addresses: list[str]) -> Member:
    """A peer of the run that is measured; the seed is alone in another one, with a model of nothing."""
    seed, plan = name == SEED, bench.plan
    alone = {"sync_every": 1, "num_fragments": 1, "overlap_steps": 0}
    config = plan.config(peers=1).given | alone if seed else plan.config().given
    options = {
        "rank": rank,
        "parameters": 1 if seed else plan.parameters,
        "of": plan.parameters,
        "step_s": 0.0 if seed else plan.step_s,
        "run_id": SEED if seed else "bench",
        "initial_peers": addresses,
        "config": config,
        "local": {"host_maddrs": [bench.listens(machine)], "direct": plan.direct},
    }
    return bench.start(name, "ours", machine, options)


def _beside(bench: Bench) -> list[Contender]:
    """Those that the plan names; 0 bytes: as many as ours."""
    plan, found = bench.plan, []
    if RAW in plan.beside:
        members = [bench.start(f"raw-{rank}", "raw", f"m{rank}", {}) for rank in range(plan.peers)]
        found.append(Contender(bench, "raw libp2p", members, 0, ring=True))
    if GLOO in plan.beside:
        for wire in WIDTHS[GLOO]:
            members = _replicas(bench, GLOO, wire, {"meeting": str(bench.children.folder / f"meeting-{wire}")})
            found.append(Contender(bench, f"gloo {wire}", members, plan.reduced_bytes(GLOO, wire)))
    if AVERAGER in plan.beside:
        wire = "fp32" if plan.codec == "fp32" else "fp16"  # of bf16 it would make fp32
        members = _replicas(bench, AVERAGER, wire, {})
        found.append(Contender(bench, f"averager {wire}", members, plan.reduced_bytes(AVERAGER, wire)))
    return found


def _replicas(bench: Bench, module: str, wire: str, options: Mapping[str, Any]) -> list[Member]:
    """Processes that take the outer step themselves. Of averagers, the others find the first one's DHT."""
    plan, addresses = bench.plan, list[str]()
    members: list[Member] = []
    for rank in range(plan.peers):
        given = {
            "rank": rank,
            "peers": plan.peers,
            "parameters": plan.parameters,
            "fragments": plan.fragments,
            "wire": wire,
            "initial_peers": addresses,
        }
        members.append(bench.start(f"{module}-{wire}-{rank}", module, f"m{rank}", {**given, **options}))
        if module == AVERAGER and not addresses:
            addresses = bench.heard(members, "dht")[0]["addresses"]
    return members


def _close_ring(bench: Bench, members: Sequence[Member], ready: Sequence[Line]) -> None:
    """Each sends to the next, the last to the first."""
    for member, after in zip(members, [*ready[1:], ready[0]], strict=True):
        member.tell("meet", peer_id=after["peer_id"], addresses=after["addresses"])
    bench.heard(members, "met")
