"""Strangers against the replica: whatever the inbox lets through, it survives."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2p_diloco.core import events as e
from p2p_diloco.core import messages as m
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import founding, key_of, rooted
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.forms import About
from p2p_diloco.node.headers import pack
from p2p_diloco.node.run_inbox import check_place

RULES = Rules(run="r", fragments=((0, 1), (2,)), round_timeout=5.0)
STEPS = 12
TOKEN = b"t" * 16


def hexed(number: int, size: int = 16) -> str:
    return number.to_bytes(size, "big").hex()


# Few values, so that messages meet what the replica holds, and the extremes of each.
names = st.sampled_from(["me", "b", "c", "x" * 60])
fragments = st.integers(-1, 2)
numbers = st.integers(0, 2)
chains, keys = st.integers(0, 3).map(hexed), st.integers(0, 3).map(hexed)
hashes = st.integers(0, 2).map(lambda number: hexed(number, 32))
counts = st.sampled_from([0, 1, 2, 3, 2**40])
FOUNDED = founding(0, Version(0, 0, 0, hexed(0)), "me", 2).version
versions = st.just(FOUNDED) | st.builds(
    Version, st.sampled_from([0, 0, 1]), st.sampled_from([0, 5, 2**48]), st.sampled_from([0, 1, 2, 2**40 - 1]), chains
)
ids = st.builds(ContributionId, st.sampled_from([0, 1, 1 << 30, 2**61]), st.sampled_from([0, 1, 2, 2**40]))
weights = st.sampled_from([0.0, 2.0**-30, 1.0, 2.0**40])
yes_or_no = st.booleans()


def listed(of: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=most, unique=True).map(tuple)


def linked(version: Version) -> tuple[tuple[int, str], ...]:
    older = tuple((epoch, hexed(epoch)) for epoch in range(2) if epoch < version.epoch)
    return (*older, (version.epoch, version.digest))


readys = st.builds(
    m.Ready, fragments, versions, ids, ids, weights, counts, st.tuples(hashes, hashes) | st.just(()), weights,
    yes_or_no, st.sampled_from(["", "one"]),
).map(rooted)  # fmt: skip
entries = st.dictionaries(names, readys, max_size=3).map(lambda found: tuple(sorted(found.items())))
choices = st.builds(m.Choice, names, counts, entries, listed(names), listed(names), successors=listed(names, 2))


@st.composite
def closes(draw: Any) -> m.Close:
    """Closes whose key is that of their choice, as the wire demands."""
    fragment, base, choice = draw(fragments), draw(versions), draw(st.none() | choices)
    key = draw(keys) if choice is None else key_of(fragment, base, choice)
    owners = draw(st.tuples(names, names) | st.tuples(names))
    return m.Close(fragment, base, draw(counts), draw(names), draw(counts), key, choice, owners)


commits = st.builds(
    m.Commit, fragments, versions, versions, counts, names, keys, choices, st.tuples(hashes, hashes) | st.just(()),
    st.tuples(names, names),
)  # fmt: skip
models = st.builds(ModelVersion, st.sampled_from([-1, 0, 1]), counts, counts, chains)
heads = st.just(()) | st.tuples(*[st.tuples(counts, chains)] * 2)
summaries = st.builds(
    m.Summary, counts, st.sampled_from(["worker", "aggregator"]), yes_or_no, models, heads, yes_or_no, weights,
    speed=weights, sent=st.just(()) | st.tuples(st.integers(-1, 3), st.integers(-1, 3)),
    awaits=listed(st.tuples(st.integers(0, 1), listed(names, 2)), 2),
    digests=st.just(()) | st.tuples(heads, heads),
)  # fmt: skip
told = st.tuples(versions, versions).flatmap(
    lambda both: st.builds(m.Told, st.just(both), st.just(tuple(map(linked, both))), yes_or_no)
)
states = versions.flatmap(lambda v: st.builds(lambda f, by: founding(max(f, 0), v, by, 2), fragments, names))
MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    m.Probe: st.builds(m.Probe, summaries),
    m.ProbeAck: st.builds(m.ProbeAck, summaries),
    m.Leave: st.builds(m.Leave, counts, yes_or_no),
    m.Ready: readys,
    m.Slice: st.builds(m.Slice, fragments, versions, names, ids, numbers, hashes),
    m.Close: closes(),
    m.Mean: st.builds(m.Mean, fragments, versions, keys, numbers, hashes, names),
    m.Lack: st.builds(m.Lack, fragments, versions, keys, listed(st.tuples(numbers, listed(names)))),
    m.Commit: commits,
    m.Want: st.builds(m.Want, fragments, versions, st.sampled_from(m.What), listed(numbers), keys),
    m.Claim: st.builds(m.Claim, fragments, versions, counts),
    m.Vote: st.builds(m.Vote, fragments, versions, counts, names, st.none() | closes(), st.none() | commits),
    m.Held: st.builds(m.Held, fragments, versions),
    m.Stale: st.builds(m.Stale, fragments, ids, versions),
    m.Ask: st.builds(m.Ask, st.none() | fragments, listed(numbers)),
    m.Told: told,
    m.Head: st.builds(m.Head, fragments, states, st.just(()) | st.tuples(hashes, hashes)),
    m.Part: st.builds(m.Part, fragments, versions, numbers),
}


def belongs(message: m.Message) -> bool:
    """Whether a message can belong to the run."""
    try:
        check_place(message, RULES)
    except Refusal:
        return False
    return True


arriving = st.one_of(*MESSAGES.values()).filter(belongs)

# made once: making a strategy takes longer than drawing from it
pauses = st.sampled_from([0.0, 0.3, 20.0])
fates = st.sampled_from([None, True, False])
"""What becomes of a message: delivered, or not, because its receiver is gone or for another reason."""
happenings = st.one_of(
    st.builds(e.Received, names.filter(lambda name: name != "me"), arriving),
    st.sampled_from([e.Wakeup(), e.Merge(), e.Stepped(0.1)]),
    st.builds(e.Expelled, names, st.just("a lie")),
    st.builds(e.Granted, names, st.sampled_from(["one", "two"])),
    st.builds(e.Discovered, names),
)


def test_no_kind_is_forgotten() -> None:
    assert MESSAGES.keys() == {kind for one in get_args(m.Message) for kind in (get_args(one) or (one,))}


def world_answers(data: st.DataObject, effects: list[e.Effect]) -> list[e.Event]:
    """What the node, the network and the trainer make of effects."""
    events: list[e.Event] = []
    for effect in effects:
        match effect:
            case e.Average(fragment, base, key, number):
                events.append(e.Averaged(fragment, base, key, number, hexed(7, 32), b"", b"s" * 64))
            case e.Apply(commit):
                events.append(e.Applied(commit.fragment, commit.base, commit.version))
            case e.Fill(fragment, version, number):
                events.append(e.Filled(fragment, version, number, data.draw(hashes)))
            case e.Roll(commit, mean):
                events.append(e.Rolled(commit.fragment, commit.version, mean.number))
            case e.Send(to, message):
                pack(message, About("me", RULES), TOKEN)  # what a replica says can be sent
                gone = data.draw(fates)
                events.append(e.Delivered(to, message) if gone is None else e.SendFailed(to, message, gone))
            case e.Load(_, due) if due is not None:
                slices = len(RULES.fragments[due])
                events.append(e.Contribute(due, 1.0, 1, (hexed(1, 32),) * slices, (b"",) * slices))
    return events


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_message_harms_a_replica(data: st.DataObject) -> None:
    """Any messages that pass the inbox, from anyone and in any order, raise nothing, and what the replica then says
    can still be written down.
    """
    replica, now = Replica("me", RULES, incarnation=1 << 30, now=0.0), 0.0
    queue: list[e.Event] = []
    if data.draw(yes_or_no):
        queue.append(e.Found(0, (hexed(0),) * 2))
    for _ in range(STEPS):
        queue.append(data.draw(happenings))
        handled = 0
        while queue:
            handled += 1
            assume(handled < 200)
            now += data.draw(pauses) if isinstance(queue[0], e.Wakeup) else 0.0
            queue += world_answers(data, replica.handle(queue.pop(0), now))
            assert replica.next_wakeup() >= 0.0
            replica.waiting(), replica.round(), replica.aggregates()
