"""One replica on a table: a clock that is turned by hand, and short ways to say what others send it."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.core.events import (
    Average,
    Averaged,
    Contribute,
    Effect,
    Event,
    Merge,
    Progress,
    Received,
    Restore,
    Send,
    SendFailed,
    Wakeup,
)
from p2p_diloco.core.messages import Contribution, Message, Plan, Probe, ProbeAck, State, Summary
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ContributionId, ModelVersion, Version

LIFE = 1 << 40
"""The incarnation of a replica under test; the others' is 1."""


class Peer:
    """A replica under test. Peers have names of one letter, so that "abc" stands for three of them."""

    def __init__(
        self,
        me: str,
        *,
        epoch: int | None = 1,
        group: str = "abc",
        succession: str | None = None,
        live: str | None = None,
        fragments: tuple[tuple[int, ...], ...] = ((0,),),
        counted: tuple[tuple[str, ContributionId], ...] = (),
        role: str = "worker",
        eligible: bool = True,
        **rules: Any,
    ) -> None:
        self.me, self.now = me, 100.0
        self.rules = Rules(run="run", fragments=fragments, **{"round_timeout": 5.0, **rules})
        self.replica = Replica(me, self.rules, role=role, eligible=eligible, incarnation=LIFE, now=self.now)
        self.silent: set[str] = set()
        self.feed(Wakeup())  # the first tick, of its beginning
        if epoch is not None:
            plan = self.plan(group, succession)
            self.feed(
                Restore(tuple(self.state(s, epoch, plan=plan, counted=counted) for s in range(self.rules.shards)))
            )
        for name in group if live is None else live:
            if name != me:
                self.meet(name)

    # -- data

    @staticmethod
    def plan(group: str, succession: str | None = None) -> Plan:
        return Plan(tuple(group), tuple(group if succession is None else succession))

    @staticmethod
    def version(epoch: int, digest: str = "", generation: int = 0, samples: int | None = None) -> Version:
        return Version(generation, 10 * epoch if samples is None else samples, epoch, digest or f"d{epoch}")

    @classmethod
    def state(
        cls,
        shard: int,
        epoch: int,
        *,
        plan: Plan | None = None,
        counted: tuple[tuple[str, ContributionId], ...] = (),
        version: Version | None = None,
        history: tuple[tuple[int, str], ...] | None = None,
        term: int = 0,
    ) -> State:
        """A shard's state whose ancestors are d0, d1, d2 … unless another history is given."""
        version = version or cls.version(epoch)
        ancestors = (*((e, f"d{e}") for e in range(version.epoch)), (version.epoch, version.digest))
        return State(shard, version, term, plan or cls.plan("abc"), dict(counted), dict(history or ancestors))

    @staticmethod
    def contribution(
        base: Version, sequence: int = 1, *, shard: int = 0, samples: int = 5, life: int = 1
    ) -> Contribution:
        id = ContributionId(life, sequence)
        return Contribution(shard, base, id, id, weight=2.0, samples=samples, payload=f"Δ{sequence}")

    # -- what is held

    @property
    def held(self) -> Version:
        version = self.replica.versions[0]
        assert version is not None
        return version

    # -- events

    def feed(self, event: Event, after: float = 0.0) -> list[Effect]:
        """One event, ``after`` seconds later; as the node does, the next wakeup is asked for at once."""
        self.now += after
        effects = self.replica.handle(event, self.now)
        self.replica.next_wakeup()
        return effects

    def hear(self, sender: str, message: Message, after: float = 0.0) -> list[Effect]:
        return self.feed(Received(sender, message), after)

    def about(self, **says: Any) -> Summary:
        """What a peer says that stands where this one does, but for ``says``."""
        mine = self.replica.roster.mine
        plain = {
            "incarnation": 1,
            "role": "worker",
            "eligible": True,
            "model": mine.model,
            "epochs": mine.epochs or (0,) * len(self.rules.fragments),
            "idle": False,
        }
        return Summary(**{**plain, **says})

    def meet(self, name: str, **says: Any) -> list[Effect]:
        return self.hear(name, ProbeAck(self.about(**says)))

    def blank(self) -> dict[str, Any]:
        """What one says that holds no state."""
        return {"model": ModelVersion(), "epochs": ()}

    def refuse(self, name: str) -> list[Effect]:
        """A dial to the peer is refused."""
        return self.feed(SendFailed(name, Probe(self.replica.roster.mine), gone=True))

    def lose(self, name: str) -> list[Effect]:
        """The peer's process is gone; the effects of noticing it."""
        assert self.refuse(name) == [Send(name, Probe(self.replica.roster.mine))]
        return self.refuse(name)

    def pass_time(self, seconds: float) -> list[Effect]:
        """Let time pass; probes of peers that are not ``silent`` are answered at once. Effects but for probes."""
        until, effects = self.now + seconds, list[Effect]()
        while (wakeup := self.replica.next_wakeup()) <= until:
            self.now = max(self.now, wakeup)
            queue = self.feed(Wakeup())
            while queue:
                effect = queue.pop(0)
                match effect:
                    case Send(to, Probe()):
                        summary = self.replica.roster.summary(to)
                        if to not in self.silent and summary is not None:
                            queue += self.hear(to, ProbeAck(summary))
                    case _:
                        effects.append(effect)
        self.now = until
        return effects

    def feed_tick(self) -> list[Effect]:
        """The effects of the next wakeup, probes and all, which nobody answers."""
        self.now = max(self.now, self.replica.next_wakeup())
        return self.feed(Wakeup())

    def contribute(self, *shards: int, samples: int = 5) -> list[Effect]:
        """The trainer makes a step, merges and sends a pseudo-gradient; its Merge's answer is passed over."""
        self.feed(Progress(0.5))
        self.feed(Merge())
        shards = shards or (0,)
        return self.feed(Contribute(shards, weight=2.0, samples=samples, payloads=tuple("Δ" for _ in shards)))

    def averaged(self, effects: list[Effect], digest: str = "new") -> list[Effect]:
        """The node's answer to the Average at the end of the effects."""
        average = effects[-1]
        assert isinstance(average, Average)
        return self.feed(Averaged(average.shard, average.base, digest, "mean"))

    @staticmethod
    def averages(effects: list[Effect]) -> list[list[str]]:
        """Whose contributions are averaged."""
        return [[who for who, _ in e.contributions] for e in effects if isinstance(e, Average)]

    @staticmethod
    def said(effects: list[Effect]) -> list[Any]:
        """The messages sent, without probes."""
        return [e.message for e in effects if isinstance(e, Send) and not isinstance(e.message, Probe | ProbeAck)]


@pytest.fixture
def peer() -> type[Peer]:
    """The class above: ``peer("a", group="abc")`` is a replica that has aged one epoch among two others."""
    return Peer


@pytest.fixture
def life() -> int:
    """The incarnation of a replica under test."""
    return LIFE
