"""One replica whose clock the test sets, short ways to feed it messages, and helpers for several test files."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_diloco.core.election import assign
from p2p_diloco.core.events import (
    Applied,
    Average,
    Averaged,
    Contribute,
    Effect,
    Event,
    Fill,
    Filled,
    Merge,
    Note,
    Received,
    Restore,
    Send,
    SendFailed,
    Stepped,
    Wakeup,
)
from p2p_diloco.core.messages import (
    Commit,
    Contribution,
    Counted,
    Fetch,
    Held,
    Message,
    Plan,
    Probe,
    ProbeAck,
    Promise,
    State,
    Summary,
    Versions,
)
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import meta_of
from p2p_diloco.core.version import ContributionId, ModelVersion, Version, model_version

LIFE = 1 << 40
"""The incarnation of a replica under test; the others' is 1."""


class Peer:
    """A replica under test. Peers have names of one letter: "abc" stands for three peers."""

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
        self.feed(Wakeup())  # the first tick after its start
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
        return Contribution(shard, base, id, id, weight=1.0, samples=samples, payload=f"Δ{sequence}")

    def commit(
        self,
        shard: int = 0,
        *,
        by: str = "a",
        term: int = 0,
        counted: tuple[Counted, ...] = (),
        plan: Plan | None = None,
    ) -> Commit:
        """The next commit of a shard. Without a plan it keeps the present one."""
        state = self.replica.state(shard)
        base, then = state.version, self.version(state.version.epoch + 1)
        return Commit(shard, base, then, term, by, counted, plan or state.plan, "mean")

    # -- what is held

    @property
    def held(self) -> Version:
        version = self.replica.versions[0]
        assert version is not None
        return version

    # -- events

    def feed(self, event: Event, after: float = 0.0) -> list[Effect]:
        """Feed an event, ``after`` seconds later, and ask for the next wakeup, as a node does."""
        self.now += after
        effects = self.replica.handle(event, self.now)
        self.replica.next_wakeup()
        return effects

    def hear(self, sender: str, message: Message, after: float = 0.0, *, asked: bool = True) -> list[Effect]:
        """A message arrives. With ``asked`` this peer has asked the sender something before."""
        if asked:
            self.replica.roster.asked.sent([Send(sender, Fetch(()))], self.now + after)
        return self.feed(Received(sender, message), after)

    def take(self, commit: Commit, sender: str = "") -> list[Effect]:
        """A commit arrives, from its author unless a sender is named, and is applied; returns the effects of the
        application."""
        self.hear(sender or commit.aggregator, commit)
        return self.feed(Applied(commit.shard, commit.base, commit.version.digest))

    def about(self, **says: Any) -> Summary:
        """The Summary of a peer that holds the same as this one, except the fields in ``says``."""
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
        return self.hear(name, ProbeAck(self.about(**says)), asked=False)

    def blank(self) -> dict[str, Any]:
        """The Summary of a peer without a state."""
        return {"model": ModelVersion(), "epochs": ()}

    def refuse(self, name: str) -> list[Effect]:
        """A dial to the peer is refused."""
        return self.feed(SendFailed(name, Probe(self.replica.roster.mine), gone=True))

    def lose(self, name: str) -> list[Effect]:
        """The peer's process dies; returns the effects of noticing that."""
        assert self.refuse(name) == [Send(name, Probe(self.replica.roster.mine))]
        return self.refuse(name)

    def pass_time(self, seconds: float) -> list[Effect]:
        """Let time pass; probes are answered at once, except by ``silent`` peers. Returns the effects without
        probes."""
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
                            queue += self.hear(to, ProbeAck(summary), asked=False)
                    case _:
                        effects.append(effect)
        self.now = until
        return effects

    def feed_tick(self) -> list[Effect]:
        """The effects of the next wakeup; its probes stay unanswered."""
        self.now = max(self.now, self.replica.next_wakeup())
        return self.feed(Wakeup())

    def contribute(self, *shards: int, samples: int = 5) -> list[Effect]:
        """The trainer makes a step, merges and sends a pseudo-gradient; the Load is ignored."""
        self.feed(Stepped(0.5))
        self.feed(Merge())
        shards = shards or (0,)
        return self.feed(Contribute(shards, weight=2.0, samples=samples, payloads=tuple("Δ" for _ in shards)))

    def averaged(self, effects: list[Effect], digest: str = "new") -> list[Effect]:
        """The node's answer to the Average at the end of the effects."""
        average = effects[-1]
        assert isinstance(average, Average)
        return self.feed(Averaged(average.shard, average.base, average.number, digest, "mean"))

    @staticmethod
    def averages(effects: list[Effect]) -> list[list[str]]:
        """The contributors of each Average."""
        return [[name for name, _ in e.contributions] for e in effects if isinstance(e, Average)]

    @staticmethod
    def said(effects: list[Effect]) -> list[Any]:
        """The messages that the effects send, without probes."""
        return [e.message for e in effects if isinstance(e, Send) and not isinstance(e.message, Probe | ProbeAck)]


@pytest.fixture
def peer() -> type[Peer]:
    """Make a `Peer`: ``peer("a", group="abc")`` is a replica at epoch 1 that has met b and c."""
    return Peer


@pytest.fixture
def life() -> int:
    """The incarnation of a replica under test."""
    return LIFE


TWO = ((0,), (1,))
"""Two fragments of one shard each."""
FIVE = tuple((shard,) for shard in range(5))
"""Five fragments of one shard each."""
PLAIN = Rules(run="run", fragments=((0,),))
"""The rules of a run of one shard, all else by default."""


# -- states


def meta(version: Version, term: int, plan: Plan, counted: dict[str, ContributionId]) -> bytes:
    """What a digest covers besides the tensors."""
    return meta_of(State(0, version, term, plan, counted, {}))


def commit_on(state: State, counted: str = "", *, by: str = "a", sequence: int = 1, digest: str = "") -> Commit:
    """The commit that follows a state and counts contributions of 5 samples each."""
    base = state.version
    listed = tuple(Counted(peer, ContributionId(1, sequence), 1.0, 5) for peer in counted)
    version = Version(base.generation, base.samples + 5 * len(counted), base.epoch + 1, digest or f"d{base.epoch + 1}")
    return Commit(state.shard, base, version, state.term, by, listed, state.plan, "mean")


def ahead(p: Peer, epoch: int) -> ModelVersion:
    """The model of a peer whose shards are all at this epoch of the same lineage."""
    return model_version([p.version(epoch)] * p.rules.shards)


def fill(p: Peer, state: State) -> Fill:
    """The effect that fills in a fetched state."""
    return Fill(state, meta_of(state))


def filled(p: Peer, state: State, digest: str = "") -> list[Effect]:
    """The node has filled in a fetched state."""
    return p.feed(Filled(state.shard, state.version, digest or state.version.digest))


def fetches(effects: list[Effect]) -> list[tuple[str, Fetch]]:
    """The Fetch messages that are sent, each with its receiver."""
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, Fetch)]


def gathering(peer: type[Peer], donors: str = "ac", **rules: Any) -> tuple[Any, list[Any]]:
    """A newcomer that knows a's versions of five shards, and the shards that it asks of each donor."""
    n = peer("n", epoch=None, live="", fragments=FIVE, **rules)
    n.meet("a", model=ahead(n, 7), epochs=(7,) * 5)
    for name in donors[1:]:
        n.meet(name, model=ahead(n, 7), epochs=(7,) * 5)
    effects = n.hear("a", Versions((n.version(7),) * 5, forked=False))
    return n, [(to, message.shards) for to, message in fetches(effects)]


# -- rounds


def roster_of(me: str, others: str = "", *, rules: Rules = PLAIN) -> Roster:
    """The roster of a peer at epoch 1 that has met other peers at the same epoch."""
    summary = Summary(1, "worker", True, ModelVersion(0, 10, 1, ""), (1,), idle=False)
    made = Roster(me, rules, summary)
    for name in others:
        made.heard(name)
        made.summarized(name, summary)
    return made


def dies(roster: Roster, peer: str) -> None:
    """The peer's process is gone."""
    roster.suspected(peer)
    assert roster.failed(peer)


def solo(peer: type[Peer], **more: Any) -> Any:
    """A peer that trains alone."""
    return peer("a", group="a", live="", **more)


def round_alone(a: Peer, *shards: int) -> list[Effect]:
    """A whole round of a peer that trains alone; the effects of its commit."""
    effects = []
    for average in a.contribute(*shards):
        effects += a.feed(Averaged(average.shard, average.base, average.number, f"n{average.base.epoch + 1}", "mean"))
    return effects


def moves_on(p: Peer, shard: int = 0, **commit: Any) -> list[Effect]:
    """A shard moves on by another peer's commit."""
    return p.take(p.commit(shard, **commit))


def commits(p: Peer, first: int, last: int) -> list[Commit]:
    """The commits of shard 0 that lead from epoch ``first`` to ``last``."""
    plan = p.plan("abc")
    return [Commit(0, p.version(e), p.version(e + 1), 0, "a", (), plan) for e in range(first, last)]


def mismatches(effects: list[Effect]) -> list[str]:
    """The texts of the notes on digests that do not match."""
    return [effect.text for effect in effects if isinstance(effect, Note) and effect.kind == "mismatch"]


# -- asynchronous runs


def running(peer: type[Peer], me: str = "c", succession: str = "cb", **rules: Any) -> Any:
    """A replica of an asynchronous run of a, b and c; c aggregates, b succeeds, and an election gives the same."""
    assert assign("run", 0, (0,), dict.fromkeys("abc", 1.0))[0][:2] == ("c", "b")
    one = peer(me, group="abc", succession=succession, **{"mode": "async", "heartbeat_timeout": 10.0, **rules})
    if succession[0] == me:
        for other in sorted({*"abc"} - {me}):
            one.hear(other, Promise(0, one.held, 0))
    return one


def to(effects: list[Effect], peer: str, kind: type = object) -> list[Any]:
    """The messages of a kind that go to a peer."""
    return [e.message for e in effects if isinstance(e, Send) and e.to == peer and isinstance(e.message, kind)]


def commits_to(effects: list[Effect], peer: str) -> list[Commit]:
    """The commits that go to a peer."""
    return to(effects, peer, Commit)


def joined_by(one: Peer, peer: str) -> list[Effect]:
    """Another peer joins, and promises this one its term."""
    return [*one.meet(peer), *one.hear(peer, Promise(0, one.held, 0))]


def average_in(effects: list[Effect]) -> Average:
    """The one Average among the effects."""
    [average] = [e for e in effects if isinstance(e, Average)]
    return average


def computed(one: Peer, effects: list[Effect], digest: str = "new") -> list[Effect]:
    """The node's answer to the one Average among the effects."""
    average = average_in(effects)
    return one.feed(Averaged(average.shard, average.base, average.number, digest, "mean"))


def held_by(one: Peer, peer: str, effects: list[Effect]) -> list[Effect]:
    """The peer confirms that it holds the commit that the effects propose."""
    return one.hear(peer, Held(0, commits_to(effects, peer)[-1].version))


def next_commit(one: Peer, *, epoch: int = 1, term: int = 0, by: str = "c", plan: Plan | None = None) -> Commit:
    """The commit of an asynchronous run that follows an epoch: it counts a."""
    base, then = one.version(epoch), plan or Plan(tuple("abc"), tuple("cb"))
    counted = Counted("a", ContributionId(1, epoch), 1.0, 10)
    return Commit(0, base, one.version(epoch + 1), term, by, (counted,), then, "mean")


def submitted(one: Peer, sender: str, sequence: int = 1, base: Version | None = None, digest: str = "") -> list[Effect]:
    """A submission arrives, is computed, and held by b."""
    effects = one.hear(sender, one.contribution(base or one.held, sequence))
    return held_by(one, "b", computed(one, effects, digest or f"d{one.held.epoch + 1}"))


def fetched(one: Peer, epoch: int, counted: tuple[tuple[str, ContributionId], ...] = ()) -> list[Effect]:
    """A state of the same lineage, which c aggregates, comes from b and is taken."""
    one.hear("b", one.state(0, epoch, plan=Plan(tuple("abc"), tuple("cb")), counted=counted))
    return one.feed(Filled(0, one.version(epoch), f"d{epoch}"))
