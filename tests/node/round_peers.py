"""Peers of a run of `p2p_diloco.core` within one loop: nodes over the in-memory swarm, real tensors, and trainers
that stand still while their contribution is out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from p2p_diloco.config import RunConfig
from p2p_diloco.core import events as e
from p2p_diloco.core.messages import Commit
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.version import ContributionId
from p2p_diloco.node.auditing import Audits
from p2p_diloco.node.common import EventQueue
from p2p_diloco.node.fetching import Questions
from p2p_diloco.node.history import History
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.ledger import OF_EXCHANGE, Ledger
from p2p_diloco.node.node import Node
from p2p_diloco.node.outbox import Outbox
from p2p_diloco.node.run import Run
from p2p_diloco.node.run_inbox import RunInbox
from p2p_diloco.node.signatures import Signatures
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.node.trainer import contribution
from p2p_diloco.tensors.layout import Layout, ParamSpec
from tests.net.memory import DeafInbox, MemoryNetwork
from tests.net.patience import until

NUMEL, UNIT = 24, 60.0
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0}
"""All sums of these divide UNIT, of which all values are multiples: so means and steps are exact, in any arithmetic."""
MOMENTUM = 0.5


def run_of(fragments: int = 1, **config: Any) -> Run:
    quick = {"heartbeat_interval": 0.1, "heartbeat_timeout": 10.0, "sync_every": fragments, "num_fragments": fragments}
    exact = {"codec": "fp32", "aggregation": "mean", "step_limit": 0.0, "audit_rate": 0.0}
    outer = {"outer": "fixed", "outer_lr": 1.0, "outer_momentum": MOMENTUM}
    settings = RunConfig(**{**quick, **exact, **outer, **config})
    return Run(
        "r",
        settings,
        Layout.build(tuple(ParamSpec(name, (NUMEL // 2,), "float32") for name in "pq"), fragments, "contiguous", 4),
    )


def common_of(run: Run, replica: Any, work: SliceWork, outbox: Outbox, signatures: Any, **more: Any) -> Any:
    """In the place of a node's `Common`: what its loop and its inbox use."""
    inbox, transport = Inbox(), outbox._transport
    of: dict[str, Any] = {
        "run": run,
        "replica": replica,
        "work": work,
        "outbox": outbox,
        "signatures": signatures,
        "transport": transport,
        "inbox": inbox,
        "refusals": inbox.refusals,
        "events": EventQueue(),
        "event_log": SimpleNamespace(named=lambda text: text, note=lambda kind, text: None),
        "history": History(),
        "ledger": Ledger(OF_EXCHANGE),
        "shared": SimpleNamespace(reconnections=0),
        "deaths": SimpleNamespace(notice=lambda death: None),
        "founding": SimpleNamespace(proven=lambda dht, revision: True),
        "fetching": SimpleNamespace(questions=Questions(transport)),
    }
    return SimpleNamespace(**{**of, **more})


class Work(SliceWork):
    """It remembers the commits that it applied, and counts the steps of fetched slices."""

    commits: list[Commit]
    rolls = 0

    def apply(self, effect: e.Apply, damaged: Sequence[int] = ()) -> e.Applied:
        self.commits.append(effect.commit)
        return super().apply(effect, damaged)

    def roll(self, effect: e.Roll) -> e.Rolled:
        self.rolls += 1
        return super().roll(effect)


class Peer:
    """A node and its trainer."""

    def __init__(self, network: MemoryNetwork, name: str, run: Run, life: int = 1) -> None:
        self.name, self.run, self.theta = name, run, torch.zeros(NUMEL)
        transport = self.transport = network.join(name, DeafInbox())
        self.network, self.notes = network, list[tuple[str, str]]()
        self.replica = Replica(name, run.rules, incarnation=life, now=asyncio.get_running_loop().time())
        signatures = Signatures(name, transport, run.token)
        self.work = Work(run, self.theta, signatures.of_mean)
        self.work.commits = []
        self.outbox = Outbox(transport)
        log = SimpleNamespace(named=lambda text: text, note=lambda *note: self.notes.append(note))
        common = common_of(run, self.replica, self.work, self.outbox, signatures, event_log=log)
        audits = Audits(common)
        self.node = Node(common, self, audits, lambda: None)
        inbox = transport._inbox = common.inbox
        self.refusals = inbox.refusals
        inbox.handler = RunInbox(common, self.node, self, audits)
        # -- the trainer
        self.limit = 0  # it contributes to no round that leads to a later epoch
        self.given: dict[tuple[int, ContributionId], Tensor] = {}
        self.progress = torch.zeros(NUMEL)  # base - local: all that no commit counts
        self.out: dict[int, Tensor] = {}  # by fragment: what was sent last
        self.dropped, self.ended = 0, False
        self._ready, self._loads, self._released = asyncio.Event(), asyncio.Queue[e.Load](), asyncio.Queue[bool]()
        self.tasks = [asyncio.create_task(self.node.consume()), asyncio.create_task(self._train())]

    def founds(self) -> None:
        hashes = tuple(f"{fragment:032x}" for fragment in range(len(self.replica.logs)))
        self.node.events.post(e.Found(0, hashes))

    def meets(self, *others: Peer) -> None:
        for other in others:
            self.node.events.post(e.Discovered(other.name))

    async def end(self, *, killed: bool = False) -> None:
        """End this peer: at once, as SIGKILL does, or in order."""
        if killed:
            self.network.kill(self.name)
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        self.outbox.close()
        await self.transport.close()

    def fails(self) -> None:
        """Raise what a task of this peer raised."""
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()

    @property
    def epochs(self) -> list[int]:
        return [log.epoch for log in self.replica.logs]

    def part(self, fragment: int) -> slice:
        places = self.run.layout.slices_of(fragment)
        return slice(places[0].start, places[-1].stop)

    # -- the trainer: what it hears

    async def not_reading(self) -> None:
        """It reads θ nowhere but here, and never across a wait."""

    def load(self, effect: e.Load) -> None:
        self._loads.put_nowait(effect)

    def release(self, effect: e.Release) -> None:
        self._released.put_nowait(effect.sent)

    def ready(self) -> None:
        self._ready.set()

    def changed(self) -> None: ...

    def finished(self) -> None:
        self.ended = True

    # -- and what it does

    async def _train(self) -> None:
        await self._ready.wait()
        step = 0
        while (due := await self._merge()) is not None:
            await until(lambda due=due: self.replica.logs[due].epoch < self.limit, 100.0)
            step += 1
            self.node.events.post(e.Stepped(0.01))
            self.progress[self.part(due)] += UNIT * ((ord(self.name) + step) % 7 - 3)
            await self.contribute(due)
            await self._released.get()

    async def contribute(self, fragment: int) -> None:
        progress = self.progress.clone()
        of = self.run, self.replica, self.work, fragment, lambda index: progress, WEIGHTS[self.name], 1
        await self.node.events.feed(await contribution(*of))
        if (ready := self.replica.own.ready) is not None:
            parts = (part.payload for _, part in sorted(self.replica.own.parts.items()))
            sent = torch.cat([torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts])
            self.given[ready.fragment, ready.id] = self.out[ready.fragment] = sent

    async def _merge(self) -> int | None:
        await self.node.events.feed(e.Merge())
        load = await self._loads.get()
        for loaded in load.fragments:
            part = self.part(loaded.fragment)
            if loaded.outcome.dropped:
                self.dropped += 1
                self.progress[part] = 0.0
            elif loaded.outcome.counted:
                self.progress[part] -= self.out[loaded.fragment]
        return load.due


def reference(peers: Sequence[Peer], fragment: int = 0, momentum: float = MOMENTUM) -> Iterator[Tensor]:
    """θ of a fragment after each of its commits, by the books: the weighted mean of what the commit counts, then the
    step of SGD with Nesterov momentum, both in fp64."""
    given = {(peer.name, *key): delta.double() for peer in peers for key, delta in peer.given.items()}
    commits = {
        commit.base.epoch: commit for peer in peers for commit in peer.work.commits if commit.fragment == fragment
    }
    theta = moment = torch.zeros(peers[0].part(fragment).stop - peers[0].part(fragment).start, dtype=torch.float64)
    for epoch in range(len(commits)):
        entries = [(given[peer, fragment, ready.id], ready.weight) for peer, ready in commits[epoch].choice.entries]
        if not entries:  # asynchronous: the leader hands over, and tensors stay
            yield theta
            continue
        mean = sum((delta * weight for delta, weight in entries), torch.zeros(())) / sum(
            weight for _, weight in entries
        )
        moment = momentum * moment + mean
        theta = theta - (mean + momentum * moment)
        yield theta
