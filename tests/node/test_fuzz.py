"""Strangers against the replica: whatever the inbox lets through, it survives."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2p_diloco.core import messages
from p2p_diloco.core.events import (
    Applied,
    Apply,
    Average,
    Averaged,
    Contribute,
    Delivered,
    Effect,
    Event,
    Expelled,
    Fill,
    Filled,
    Found,
    Granted,
    Load,
    Merge,
    Received,
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
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.node import wire
from p2p_diloco.node.misfit import misfit

SHARDS, FRAGMENTS, STEPS = 3, 2, 12
TOKEN = b"t" * wire.TOKEN_BYTES

# Few values, so that messages meet what the replica holds, and the extremes of each.
names = st.sampled_from(["me", "b", "c", "", "x" * 60])
digests = st.sampled_from(["d0", "d1", "d2", "new", ""])
shards = st.integers(-1, SHARDS)
counts = st.sampled_from([0, 1, 2, 3, 2**40, 2**48, 2**62])
generations, totals = st.sampled_from([0, 0, 1, 2**40]), st.sampled_from([0, 0, 5, 2**48])
versions = st.builds(Version, generations, totals, st.sampled_from([0, 0, 1, 2, 2**40 - 1]), digests)
weights = st.sampled_from([1.0, 2.0**-40, 2.0**40])
ids = st.builds(ContributionId, st.sampled_from([0, 1, 1 << 30, 2**62]), st.sampled_from([0, 1, 2, 2**40]))
plans = st.builds(Plan, st.lists(names, max_size=3).map(tuple), st.lists(names, min_size=1, max_size=3).map(tuple))
epochs = st.just(()) | st.tuples(counts, counts)
models = st.builds(ModelVersion, st.sampled_from([-1, 0, 1]), counts, counts, digests)
summaries = st.builds(
    Summary, counts, st.sampled_from(["worker", "aggregator", "?"]), st.booleans(), models, epochs, st.booleans(),
    weights,
)  # fmt: skip


def leading_to(version: Version) -> st.SearchStrategy[dict[int, str]]:
    """Histories of a version, true ones and others."""
    older = [epoch for epoch in range(3) if epoch < version.epoch]
    ancestors = st.lists(st.sampled_from(older), unique=True).map(sorted) if older else st.just([])
    true = ancestors.map(lambda before: {**{e: f"d{e}" for e in before}, version.epoch: version.digest})
    return true | st.dictionaries(st.integers(-1, 3), digests, max_size=2)


def states() -> st.SearchStrategy[State]:
    counted = st.dictionaries(names, ids, max_size=3)
    return versions.flatmap(lambda v: st.builds(State, shards, st.just(v), counts, plans, counted, leading_to(v)))


def commits() -> st.SearchStrategy[Commit]:
    """Commits whose numbers follow from their base and their contributions, as the wire demands."""
    lists = st.lists(st.builds(Counted, names, ids, weights, counts), max_size=3).map(tuple)

    def on(base: Version, counted: tuple[Counted, ...]) -> st.SearchStrategy[Commit]:
        samples = base.samples + sum(c.samples for c in counted)
        version = st.builds(Version, st.just(base.generation), st.just(samples), st.just(base.epoch + 1), digests)
        return st.builds(Commit, shards, st.just(base), version, counts, names, st.just(counted), plans)

    return st.tuples(versions, lists).flatmap(lambda drawn: on(*drawn))


def any_message() -> st.SearchStrategy[Message]:
    three = st.tuples(*[versions] * SHARDS)
    made: dict[type, st.SearchStrategy[Any]] = {
        Probe: st.builds(Probe, summaries),
        ProbeAck: st.builds(ProbeAck, summaries),
        Leave: st.builds(Leave),
        Contribution: st.builds(Contribution, shards, versions, ids, ids, weights, counts),
        Commit: commits(),
        Want: st.builds(Want, shards, versions),
        Held: st.builds(Held, shards, versions),
        Stale: st.builds(Stale, shards, ids, versions),
        TakeOver: st.builds(TakeOver, shards, versions, counts),
        Promise: st.builds(Promise, shards, versions, counts),
        Outdated: st.builds(Outdated, shards, versions, counts, names),
        Fetch: st.builds(Fetch, st.tuples(*[st.none() | versions] * SHARDS), st.booleans()),
        Versions: st.builds(Versions, three, st.booleans()),
        State: states(),
    }
    assert made.keys() == {*get_args(messages.Message)}, "no kind is forgotten"
    return st.one_of(*made.values()).filter(lambda message: misfit(message, SHARDS, FRAGMENTS) == "")


# made once: making a strategy takes longer than drawing from it
yes_or_no, pauses = st.booleans(), st.sampled_from([0.0, 0.3, 20.0])
fates = st.sampled_from([None, True, False])
"""What becomes of a message: delivered, or not, because its receiver is gone or for another reason."""
happenings = st.one_of(
    st.builds(Received, names.filter(lambda name: name != "me"), any_message()),
    st.sampled_from([Wakeup(), Merge(), Stepped(0.1)]),
    st.builds(Expelled, names, st.just("a lie")),
    st.builds(Granted, names, st.sampled_from(["one", "two"])),
)


def world_answers(data: st.DataObject, effects: list[Effect]) -> list[Event]:
    """What the node, the network and the trainer make of effects."""
    events: list[Event] = []
    for effect in effects:
        match effect:
            case Average(shard, base, number=number):
                events.append(Averaged(shard, base, number, data.draw(digests), None))
            case Apply(commit):
                events.append(
                    Applied(commit.shard, commit.base, "?" if data.draw(yes_or_no) else commit.version.digest)
                )
            case Fill(state):
                reached = "?" if data.draw(yes_or_no) else state.version.digest
                events.append(Filled(state.shard, state.version, reached))
            case Send(to, message):
                assert wire.unpack(wire.pack(message, TOKEN), TOKEN) == message, "what a replica says can be sent"
                gone = data.draw(fates)
                events.append(Delivered(to, message) if gone is None else SendFailed(to, message, gone))
            case Load(_, due) if due:
                events.append(Contribute(due, 1.0, 1, (None,) * len(due)))
    return events


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_message_harms_a_replica(data: st.DataObject) -> None:
    """Any messages that pass the inbox, from anyone and in any order, raise nothing, and what the replica then says
    can still be written down.
    """
    rules = Rules(run="r", fragments=((0, 1), (2,)), round_timeout=5.0)
    replica, now = Replica("me", rules, incarnation=1 << 30, now=0.0), 0.0
    queue: list[Event] = []
    if data.draw(yes_or_no):
        queue.append(Found(0, ("d0",) * SHARDS))
    for _ in range(STEPS):
        queue.append(data.draw(happenings))
        handled = 0
        while queue:
            handled += 1
            assume(handled < 200)
            now += data.draw(pauses) if isinstance(queue[0], Wakeup) else 0.0
            queue += world_answers(data, replica.handle(queue.pop(0), now))
            assert replica.next_wakeup() >= 0.0
            replica.waiting(), replica.round(), replica.aggregates()
            if replica.has_state:
                [replica.state(shard) for shard in range(SHARDS)]
