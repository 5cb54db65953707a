"""Headers: what is written is read, short, and whatever else comes is refused with a reason."""

from __future__ import annotations

import tracemalloc
import zlib
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core import leases, plan, revision, state, version
from p2p_diloco.core import messages as m
from p2p_diloco.core.state import append, is_sound, key_of
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.fields import HEXADECIMAL, KINDS, LEAST, LONGEST, MOST, check_place, completed, encoded
from p2p_diloco.node.headers import NO_RUN, PROTOCOL, opened, pack, packed, unpack
from tests.node.headers_world import OF_LIFE, RULES, SEAL, SLICES, TOKEN, Run, hashed, names, ready


@cache
def run(count: int = 10) -> Run:
    return Run(count)


def kinds() -> list[m.Message]:
    return run().messages()


def named(message: m.Message) -> str:
    return type(message).__name__


# -- there and back


def test_no_kind_and_no_field_is_forgotten() -> None:
    # no kind is forgotten
    assert {*map(type, kinds())} == {*get_args(m.Message)} == {*KINDS} - {*get_args(wire.NodeMessage)}

    # Every field with a bound of its own is there. A field that has another name now would lose its bound.
    everything = [kind for place in (m, leases, plan, revision, state, version) for kind in vars(place).values()]
    written = [
        (kind.__name__, field.name)
        for kind in everything
        if isinstance(kind, type) and is_dataclass(kind)
        for field in fields(kind)
    ]
    names = {name for _, name in written} | {f"{kind}.{name}" for kind, name in written}
    assert {*HEXADECIMAL, *MOST, *LEAST, *LONGEST} <= names


@pytest.mark.parametrize("message", kinds(), ids=named)
def test_what_is_written_is_read(message: m.Message) -> None:
    found = run().read(message)
    assert found == message
    if isinstance(message, m.Head):
        assert isinstance(found, m.Head)
        assert is_sound(found.state) == (message.state.revision.number == 0)


def test_all_that_a_field_may_hold_is_read() -> None:
    # Signatures are read too. They are not compared above.
    close, commit = run().read(run().close), run().read(run().commit)
    assert isinstance(close, m.Close)
    assert isinstance(commit, m.Commit)
    assert close.choice is not None
    assert {close.seal, commit.seal} == {OF_LIFE}
    assert {close.choice.seal, commit.choice.seal, *(r.seal for _, r in close.choice.entries)} == {SEAL}
    assert all(not ready.seal for _, ready in commit.choice.entries)

    # A name may be any text. Tests name peers as they like; a name as long as a key stays a name.
    for name in ("a", "", "x" * 31, "x" * 30, "ä", names(1)[0], names(1)[0][:-1]):
        vote = m.Vote(0, run().state.version, 2, name)
        assert run().read(vote) == vote

    # a choice may count newcomers and members that changed
    base, choice = run().state.version, run().choice
    new = names(11)
    fresh = next(name for name in new if name not in run().names)
    first, second = choice.entries[0], choice.entries[1]
    entries = sorted(
        [
            (fresh, replace(ready(fresh, base), grant="grant")),
            (first[0], replace(first[1], link=5.0, reachable=False)),
            (second[0], replace(second[1], id=ContributionId(2**62, 1), oldest=ContributionId(3, 1), grant="g")),
        ]
    )
    changed = replace(choice, entries=tuple(entries), gone=(new[3],), late=(new[4],), successors=(fresh,))
    close = replace(run().close, choice=changed, key=key_of(0, base, changed))
    assert run().read(close) == close
    bare = replace(run().commit, choice=changed.bare(), key=close.key)
    assert run().read(bare) == bare

    # an asynchronous commit and state keep older bases and successors
    rules = replace(RULES, mode="async", max_staleness=4)
    made = Run(5, rules)
    older, line = Version(0, 4, 99, hashed("older")), (made.names[3], made.names[1])
    entry = made.names[2], ready(made.names[2], older, 301, weight=1.0)
    choice = m.Choice(made.me, 0, (entry,), successors=line)
    close = replace(made.close, choice=choice, key=key_of(0, made.state.version, choice))
    assert made.read(close) == close
    state = replace(made.state, plan=replace(made.state.plan, named=0))
    assert made.read(m.Head(0, state)) == m.Head(0, state)


# -- lengths

TABLE = {
    m.Probe: lambda n: 400,
    m.Ready: lambda n: 260 + 40 * SLICES,
    m.Slice: lambda n: 145,
    m.Close: lambda n: 900 + n * (180 + 40 * SLICES),
    m.Mean: lambda n: 230,
    m.Lack: lambda n: 280,  # of two slices, three authors
    m.Commit: lambda n: 400 + 100 * n + 40 * SLICES,
    m.Want: lambda n: 120,
    m.Claim: lambda n: 80,
    m.Held: lambda n: 80,
    m.Stale: lambda n: 90,
    m.Ask: lambda n: 40,
    m.Part: lambda n: 80,
}
"""Bytes of headers, the token among them, by the number of contributions: as in docs/decisions/0091."""


@pytest.mark.parametrize("count", [10, 1000])
def test_headers_are_as_short_as_decided(count: int) -> None:
    made = run(count)
    for message in (made.close, made.commit, *(one for one in run().messages() if not getattr(one, "uses", ()))):
        if most := TABLE.get(type(message)):
            known = made if message in (made.close, made.commit) else run()
            listed = len(known.names) if getattr(message, "choice", None) is not None else 0
            assert len(known.sent(message)) <= most(listed), message


# -- what is refused


def body_of(message: m.Message) -> bytes:
    return encoded(message)


def outcome(body: bytes) -> wire.AnyMessage | str:
    """What the node makes of bytes: a message, or the reason for refusing it."""
    try:
        return unpack(body, RULES)
    except Refusal as refusal:
        return refusal.reason


OF_READY = [0, [0, 1, 1, "a" * 32], [1, 1], [1, 1]]


def test_a_header_of_another_protocol_or_run_is_refused() -> None:
    # a header of another protocol or run is refused
    header, _ = pack(m.Leave(1), TOKEN)
    old = msgpack.packb([8, TOKEN, "Leave", [1, False]])
    for raw, why in ((old, f"uses protocol {PROTOCOL}, but the message uses protocol 8"), (b"\x90", "can't be read"),
                     (b"", "can't be read"), (header[:-1], "can't be read"),
                     (msgpack.packb([PROTOCOL, TOKEN, "x"]), "can't be read"),
                     (msgpack.packb([PROTOCOL, TOKEN, 0]), "can't be read")):  # fmt: skip
        with pytest.raises(Refusal, match=why):
            opened(raw, TOKEN, RULES)
    with pytest.raises(Refusal, match="wrong run token"):
        opened(header, b"u" * 16, RULES)

    # The token of another run is refused. A data node knows no run's token, so messages to and from it have none.
    with pytest.raises(Refusal, match="wrong run token"):
        read(packed(wire.Nudge(3), b"x" * 16), TOKEN)
    with pytest.raises(Refusal, match="wrong run token"):
        read(packed(wire.Nudge(3), wire.ANY_RUN), TOKEN)
    assert read(packed(wire.ListSlices("a"), b"x" * 16), TOKEN) == wire.ListSlices("a")

    # a roll without members is refused
    body = body_of(m.Head(0, replace(run().state, roll={})))
    assert "its roll is empty" in str(outcome(body))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (["King", 1], "Invalid value 'King'"),
        (["Leave", -1, False], "Expected `int` >= 0"),
        (["Leave", 1.0, False], "Expected `int`, got `float`"),
        (["Leave", 1, False, 3], "at most length"),
        (["Claim", 0, [0, 1, 1, "short"], 0, 0], "matching regex"),
        (["Claim", 0, [0, 1, 1, "A" * 32], 0, 0], "matching regex"),
        (["Claim", 0, [0, 1, 1, "a" * 32 + "\n"], 0, 0], "matching regex"),
        (["Claim", 0, [-1, 1, 1, "a" * 32], 0, 0], "Expected `int` >= 0"),
        (["Claim", 0, [0, 1, 1, "a" * 32]], "Expected `array` of at least length 5"),
        (["Claim", 9, [0, 1, 1, "a" * 32], 0, 0], "the run has no fragment 9"),
        (["Vote", 0, [0, 1, 1, "a" * 32], 0, "x" * 1025, None, None, 0], "length <= 1024"),
        (["Vote", 0, [0, 1, 1, "a" * 32], 0, "a\x1b[2J", None, None, 0], "matching regex"),
        (["Vote", 0, [0, 1, 1, "a" * 32], 0, "a\u202eb", None, None, 0], "matching regex"),
        (["Ready", *OF_READY, float("nan"), 1, [], 0.0, True, "", [], "", b""], ">= 0.0"),
        (["Ready", *OF_READY, float("inf"), 1, [], 0.0, True, "", [], "", b""], "<= 1"),
        (["Ready", *OF_READY, 1, 1, ["a" * 32], 0.0, True, "", [], "", b""], "matching regex"),
        (["Ready", *OF_READY, 1, 1, [], 1, True, "", [], "", bytes(129)], "length <= 128"),
    ],
)
def test_a_field_that_is_not_valid_is_named(body: object, why: str) -> None:
    with pytest.raises(Refusal, match=why):
        unpack(msgpack.packb(body), RULES)


def test_what_cannot_belong_to_the_run_is_refused_with_a_reason() -> None:
    made, base = run(), run().state.version
    close, choice = made.close, made.choice
    twice = replace(choice, entries=(choice.entries[0], *choice.entries))
    lacking = replace(choice, entries=((made.me, replace(ready(made.me, base), hashes=())),))
    head = m.Head(0, made.state)
    summary = kinds()[0].summary  # type: ignore[union-attr]
    cases: list[tuple[m.Message, str]] = [
        (m.Held(2, base), "no fragment 2"),
        (replace(close, fragment=1), "contributions to another fragment"),
        (replace(made.commit, fragment=1), "contributions to another fragment"),
        (replace(head, fragment=1), "state is of another fragment"),
        (m.Slice(0, base, "a", ContributionId(1, 1), SLICES, ""), f"no slice {SLICES}"),
        (m.Want(0, base, m.What.MEANS, (0, 24)), "no slice 24"),
        (m.Ask(None, (1,)), "slices of no fragment"),
        (m.Lack(0, base, made.key, ((24, ()),)), "no slice 24"),
        (replace(ready(made.me, base), hashes=ready(made.me, base).hashes[:3]), "the hashes of 3 slices"),
        (replace(ready(made.me, base), hashes=()), "the hashes of 0 slices"),
        (ready(made.me, base, weight=2.0**-41), "weight is out of range"),
        (replace(close, owners=close.owners[:2]), "owners of 2 slices"),
        (replace(close, choice=twice), "one peer has two"),
        (replace(close, choice=lacking), "the hashes of 0 slices"),
        (replace(close, choice=replace(choice, late=(made.me,))), "its key is not that of its choice"),
        (m.Vote(1, base, 0, "a", close), "another round than its own"),
        (m.Vote(0, base, 0, "a", replace(close, choice=None)), "a Close without a choice"),
        (m.Vote(0, base, 0, "a", replace(close, key=hashed("x"))), "its key is not"),
        (m.Told((base,), (made.state.links,)), "lists 1 fragments"),
        (m.Told((base, base), (made.state.links, made.state.links[:-1])), "links don't lead"),
        (m.Told((base, base), (made.state.links, ())), "links don't lead"),
        (replace(head, digests=(hashed(1),)), "lists 1 slices"),
        (replace(head, state=replace(made.state, hashes=made.hashes[:1])), "1 means"),
        (replace(head, state=replace(made.state, links=())), "links don't lead"),
        (replace(head, state=replace(made.state, paced=(102, 1))), "count of inner steps"),
        (m.Probe(replace(summary, heads=summary.heads[:1])), "lists 1 fragments"),
        (m.Probe(replace(summary, role="king")), "unknown"),
        (m.Probe(replace(summary, awaits=((2, ()),))), "doesn't have"),
    ]
    for message, why in cases:
        with pytest.raises(Refusal, match=why):
            check_place(completed(message, RULES), RULES)


def test_a_plan_follows_from_the_roll_of_any_commit() -> None:
    """Of one that counts half of the members, names others gone and late, and follows another such commit."""
    made = run()
    state = made.state
    for sequence, half in ((300, made.names[::2]), (301, made.names[1::2])):
        entries = tuple((peer, ready(peer, state.version, sequence)) for peer in half)
        gone = tuple(peer for peer in made.names if peer not in half and state.roll[peer].epoch < state.version.epoch)
        choice = m.Choice(made.names[sequence % 10], 0, entries, gone[:2], late=gone[2:3] or half[:1])
        state = append(state, choice, key_of(0, state.version, choice), made.hashes, RULES)
        assert is_sound(state)
        assert made.read(m.Head(0, state)) == m.Head(0, state)
    for epoch in range(20):  # two members are left, and of the others some have missed too many commits
        entries = tuple((peer, ready(peer, state.version, 302 + epoch)) for peer in made.names[:2])
        choice = m.Choice(made.names[epoch % 2], 0, entries)
        state = append(state, choice, key_of(0, state.version, choice), made.hashes, RULES)
        assert made.read(m.Head(0, state)) == m.Head(0, state)
    assert len(state.plan.succession) < 10
    lie = replace(state, plan=replace(state.plan, succession=state.plan.succession[::-1]))
    assert made.read(m.Head(0, lie)) == m.Head(0, state) != m.Head(0, lie)  # a told plan is not believed


# -- strangers


@pytest.mark.parametrize("raw", [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 65536])
def test_a_claimed_length_takes_no_memory(raw: bytes) -> None:
    """Alone, and as the list of entries of a commit."""
    commit = body_of(run().commit)
    for sent in (raw, commit[:60] + raw, commit[:140] + raw):
        tracemalloc.start()
        outcome(sent)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20


# -- the messages of nodes

texts = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=20)  # no control characters
hashes = st.binary(min_size=16, max_size=16).map(bytes.hex)
counts = st.integers(0, 2**40)
st.register_type_strategy(str, texts)
st.register_type_strategy(int, counts)
st.register_type_strategy(bytes, st.binary(max_size=64).map(lambda seal: seal if len(seal) == 64 else b""))
st.register_type_strategy(Version, st.builds(Version, counts, counts, counts, hashes))
means = st.builds(wire.OfMean, counts, hashes, counts, texts, st.binary(min_size=32, max_size=32).map(bytes.hex))
st.register_type_strategy(wire.OfMean, means)


def any_message() -> st.SearchStrategy[wire.NodeMessage]:
    """Each kind that there is, with whatever its fields may hold, and no payload."""
    return st.one_of(
        *(
            st.builds(k, **({"payload": st.none()} if "payload" in k.__slots__ else {}))
            for k in get_args(wire.NodeMessage)
        )
    )


def read(header: bytes, token: bytes) -> wire.AnyMessage:
    found = opened(header, token, NO_RUN)
    assert not isinstance(found, int)
    return found


@settings(deadline=None)  # the machine may be busy
@given(any_message())
def test_a_message_survives_its_header(message: wire.NodeMessage) -> None:
    """Every kind of message, with any values, is equal after the trip."""
    assert read(packed(message, TOKEN), TOKEN) == message


def test_a_long_message_is_compressed_and_bounded() -> None:
    """A commit of many peers takes less than its bytes. What is damaged, cut off or expands far beyond is refused."""
    many = run(1000)
    header, payload = pack(many.commit, TOKEN)
    assert payload is not None
    assert opened(header, TOKEN, many.rules) == len(payload) < 0.5 * len(encoded(many.commit))
    assert unpack(payload, many.rules) == many.read(many.commit)
    bomb = zlib.compress(bytes(10**8), 9)
    for bad in (payload[1:], payload[:-1], bomb, b""):
        with pytest.raises(Refusal, match=r"can't be read|cut off, or far longer"):
            unpack(bad, many.rules)
