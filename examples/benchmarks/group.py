"""Starts groups of processes that are measured together, and lets them play rounds.

Law: every wait has a deadline, after which it raises `Failed` with the last log line of the process that didn't answer.
Figures are computed in `measure`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from examples.benchmarks import measure
from examples.benchmarks.measure import Memory, Result, Round
from examples.benchmarks.member import Line
from examples.benchmarks.network import Network
from examples.benchmarks.plan import RAW, Plan
from p2p_diloco.cli.processes import Child, Children, module

START_S = 180.0
"""Deadline for processes that import torch, all at once on few cores."""
LOOK_EVERY_S = 0.01
SEED = "seed"
"""The name of the seed and of its machine. The seed is a peer with almost no model, in a run of its own. The measured
peers join through it, and its memory shows what a peer needs without a model."""


class Failed(Exception):
    """A process ended, didn't answer in time, or gave a wrong answer. The error's sentence names the process and the
    reason."""


class Member(Child):
    """A process that reads lines from its stdin, and ends when its stdin is closed."""

    @classmethod
    def start(cls, children: Children, name: str, command: Sequence[str]) -> Member:
        """Start such a process as one of these children."""
        made = cls(name, command, children.folder, subprocess.PIPE)
        children.all.append(made)
        return made

    def tell(self, line: str) -> None:
        """Write a line to the process's stdin. If the process has ended, the line is lost."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def ask_to_end(self) -> None:
        """Close the process's stdin."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


@dataclass(frozen=True)
class Bench:
    """The plan, the processes and the network that all groups share. `network`: None if the processes use loopback."""

    plan: Plan
    children: Children
    network: Network | None = None

    def start(self, name: str, kind: str, rank: int | None, **options: Any) -> Member:
        """Start a measured process of this rank or, if `rank` is None, the seed, where the others find each other. In a
        simulated network the process runs on the simulated machine of its rank; the seed's link is not throttled."""
        host, on, device = "127.0.0.1", list[str](), "lo0" if sys.platform == "darwin" else "lo"
        if self.network is not None:
            machine = SEED if rank is None else f"m{rank}"
            on, device = self.network.machine(machine), "eth0"
            host = self.network.machines[machine]
            if rank is not None:
                self.network.throttle(machine, self.plan.links_mbit[rank])
        asked = {"name": name, "rank": rank, "host_maddrs": [f"/ip4/{host}/tcp/0"], **options}
        serve = module("examples.benchmarks.serve", kind, json.dumps(asdict(self.plan)), json.dumps(asked))
        # torch has its own number of threads, as in a user's script
        return Member.start(self.children, name, [*on, "env", f"GLOO_SOCKET_IFNAME={device}", *serve])

    def start_group(self, name: str, kind: str, **options: Any) -> list[Member]:
        return [self.start(f"{name}-{rank}", kind, rank, **options) for rank in range(self.plan.peers)]


def ask(members: Sequence[Member], do: str, within_s: float = START_S, **values: Any) -> list[Line]:
    """Send the command `do` with its `values` to all members, and return their answers, in the members' order.

    Raises:
        Failed: a member ended, or didn't answer in time.
    """
    for member in members:
        member.tell(json.dumps({"do": do, **values}))
    answers: dict[str, Line] = {}
    give_up_at = time.monotonic() + within_s
    while late := [member for member in members if member.name not in answers]:
        for member in late:
            status = member.status  # before reading, so that the answer of a process that ends is not missed
            if lines := member.printed.new():
                answers[member.name] = lines[0]
            elif status is not None:
                raise Failed(f"{member.name} ended with status {status}: {member.last_words()}")
            elif time.monotonic() >= give_up_at:
                raise Failed(f"{member.name} did not answer {do!r} within {within_s:.0f} s: {member.last_words()}")
        time.sleep(LOOK_EVERY_S)
    return [answers[member.name] for member in members]


@dataclass(slots=True)
class Group:
    """Processes that play their rounds together. `sent_bytes`: the bytes that one process sends in a round; `idle`: the
    memory of one process without a model; `failed`: why the group is no longer measured, or empty."""

    plan: Plan
    name: str
    members: Sequence[Member]
    sent_bytes: int
    idle: Memory
    rounds: list[Round] = field(default_factory=list)
    failed: str = ""

    def agree_on_work(self) -> None:
        """Give all processes the same work as an inner step: the least that any of them does in its time, while all
        compute at once.

        Raises:
            Failed: a process didn't answer in time.
        """
        passes = min(answer["passes"] for answer in ask(self.members, "calibrate", self.plan.round_s_max))
        ask(self.members, "work", passes=max(1, round(passes)))

    def play(self) -> Round:
        """Play one round. If it has training, its inner steps are made without exchanges first, by all processes at
        once, because they share this machine.

        Raises:
            Failed: a process didn't finish the round, made another number of exchanges, or peers differ after it.
        """
        ask(self.members, "train", self.plan.round_s_max)
        alone_s = 0.0
        if self.plan.step_s:
            alone_s = max(answer["took_s"] for answer in ask(self.members, "alone", self.plan.round_s_max))
        before = measure.cpu_s(self.members)
        answers = ask(self.members, "round", self.plan.round_s_max)
        used = {role: spent - before.get(role, 0.0) for role, spent in measure.cpu_s(self.members).items()}
        self._check(answers)
        self.rounds.append(measure.round_of(answers, used, alone_s))
        return self.rounds[-1]

    def result(self, warm_up: int) -> Result:
        """The group's result: its memory, and its rounds except the first `warm_up` rounds."""
        peaks = [measure.memory(member, peak=True) for member in self.members if member.status is None]
        highest = max(peaks, key=lambda memory: memory.total, default=Memory({}))
        counted = tuple(self.rounds[warm_up:])
        failed = self.failed or ("" if counted else "it made no round after the warm-up")
        return Result(self.name, counted, self.sent_bytes, len(self.members), self.idle, highest, failed)

    def _check(self, answers: Sequence[Line]) -> None:
        exchanges = {answer["exchanges"] for answer in answers if "exchanges" in answer}
        expected = self.plan.fragments
        first = not self.rounds and bool(self.plan.overlap)  # the last exchange of a round is merged in the next round
        if exchanges - ({expected, expected - 1} if first else {expected}):
            raise Failed(f"{self.name}: a peer made {max(exchanges):.0f} exchanges in a round")
        if len({answer["digest"] for answer in answers if "digest" in answer}) > 1:
            raise Failed(f"{self.name}: peers differ after a round")


def groups_of(bench: Bench) -> list[Group]:
    """Start the processes of all groups, and prepare them for their first round. The run comes first, then the methods
    that are measured beside it.

    Raises:
        Failed: a process didn't start.
    """
    plan = bench.plan
    seed, run = bench.start(SEED, "ours", None), bench.start_group("peer", "ours")
    beside = {
        (kind, wire): bench.start_group(
            f"{kind}-{wire}", kind, wire=wire, meeting=str(bench.children.folder / f"meeting-{wire}")
        )
        for kind in plan.beside
        for wire in plan.wires(kind)
    }
    ask([seed], "open", first={})
    (found,) = ask([seed], "build", everyone=[], sent_bytes=0)
    sent = round(plan.share * found["wire_bytes"])
    ask(run, "open", first=found)
    groups = [Group(plan, f"p2p_diloco {plan.codec}", run, sent, measure.memory(seed))]
    ask(run[:1], "build", everyone=[], sent_bytes=sent)  # it founds the run; the others fetch its state
    ask(run[1:], "build", START_S + plan.fetch_s, everyone=[], sent_bytes=sent)
    if plan.step_s:
        groups[0].agree_on_work()
    for (kind, wire), members in beside.items():
        first = ask(members[:1], "open", first={})
        opened = [*first, *ask(members[1:], "open", first=first[0])]
        own = sent if kind == RAW else plan.reduced_bytes(kind, wire)
        groups.append(Group(plan, f"{kind} {wire}", members, own, measure.memory(members[0])))
        ask(members, "build", everyone=opened, sent_bytes=sent)
    return groups
