"""Headers: what is sent comes back, and whatever else comes in is a refusal."""

from __future__ import annotations

import dataclasses
from typing import get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core import messages
from p2p_diloco.core.leases import DataSet, Lease, Table, Use
from p2p_diloco.core.messages import Contribution, Fetch, Leave, Probe, State, Summary
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node import wire
from p2p_diloco.node.plain import from_plain, to_plain

TOKEN = b"t" * wire.TOKEN_BYTES

names = st.text(max_size=60)
counts = st.integers(0, 2**63 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
versions = st.builds(Version, counts, counts, counts, names)
ids = st.builds(ContributionId, counts, counts)
st.register_type_strategy(str, names)
st.register_type_strategy(int, counts)
st.register_type_strategy(float, numbers)
st.register_type_strategy(Version, versions)
st.register_type_strategy(ContributionId, ids)


def any_message() -> st.SearchStrategy[wire.AnyMessage]:
    """Each kind that there is, with whatever its fields may hold, and no payload."""
    kinds = get_args(wire.AnyMessage)
    return st.one_of(*(st.builds(k, **({"payload": st.none()} if "payload" in k.__slots__ else {})) for k in kinds))


@settings(deadline=None)  # the machine may be busy
@given(any_message())
def test_a_message_survives_its_header(message: wire.AnyMessage) -> None:
    """Every kind of message, with any values, is equal after the trip."""
    assert wire.unpack(wire.pack(message, TOKEN), TOKEN) == message


def test_every_message_of_the_core_can_be_sent() -> None:
    """A kind that the core gets later can't be forgotten here."""
    assert set(get_args(messages.Message)) <= set(get_args(wire.AnyMessage))


@settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=300))
def test_bytes_of_strangers_are_refused(header: bytes) -> None:
    """Whatever bytes come, nothing but a refusal comes out."""
    with pytest.raises(Refusal):
        wire.unpack(header, TOKEN)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | names | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(names, inner, max_size=3),
    max_leaves=20,
)


@settings(deadline=None)  # the machine may be busy
@given(st.sampled_from([k.__name__ for k in get_args(wire.AnyMessage)]), st.lists(plain, max_size=10))
def test_fields_of_strangers_are_refused_or_well_formed(kind: str, fields: list[object]) -> None:
    """A known kind with any fields is refused, or is a message that could have been sent."""
    try:
        message = wire.unpack(msgpack.packb([wire.PROTOCOL, TOKEN, kind, fields]), TOKEN)
    except Refusal:
        return
    assert wire.unpack(wire.pack(message, TOKEN), TOKEN) == message


PROBE = Probe(Summary(5, "worker", True, ModelVersion(), (), False))
CONTRIBUTION = Contribution(0, Version(0, 0, 0, "d"), ContributionId(1, 1), ContributionId(1, 1), 2.0, 3)


def forged(message: wire.AnyMessage, change: dict[int, object]) -> bytes:
    protocol, token, kind, fields = msgpack.unpackb(wire.pack(message, TOKEN))
    for index, value in change.items():
        fields[index] = value
    return bytes(msgpack.packb([protocol, token, kind, fields]))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (wire.pack(PROBE, b"x" * 16), "wrong run token"),
        (msgpack.packb([wire.PROTOCOL + 1, TOKEN, "Probe", []]), "protocol"),
        (msgpack.packb([wire.PROTOCOL, TOKEN, "Eval", ["1"]]), "unknown kind"),
        (msgpack.packb([wire.PROTOCOL, TOKEN, "Leave", [1, True, 2]]), "no list of 1"),
        (msgpack.packb({"kind": "Leave"}), "no message"),
        (forged(CONTRIBUTION, {0: True}), "no whole number"),
        (forged(CONTRIBUTION, {0: 2**63}), "out of range"),
        (forged(CONTRIBUTION, {0: 1.0}), "no whole number"),
        (forged(CONTRIBUTION, {4: float("nan")}), "no finite number"),
        (forged(CONTRIBUTION, {4: "2"}), "no finite number"),
        (forged(CONTRIBUTION, {1: [0, 0, 0]}), "no list of 4"),
        (forged(CONTRIBUTION, {1: [0, 0, 0, "d" * 5000]}), "too long"),
        (forged(PROBE, {0: None}), "no list of"),
        (msgpack.packb([wire.PROTOCOL, TOKEN, "Fetch", [[None, 7], False, None]]), "no list of 4"),
        (msgpack.packb([wire.PROTOCOL, TOKEN, "Fetch", [[None], 0, None]]), "neither true nor false"),
    ],
)
def test_what_is_wrong_is_named(header: bytes, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        wire.unpack(header, TOKEN)


def test_an_absent_version_is_none() -> None:
    fetch = Fetch((None, Version(0, 1, 2, "d")))
    assert wire.unpack(wire.pack(fetch, TOKEN), TOKEN) == fetch


def test_payloads_are_left_out_of_headers() -> None:
    """A payload travels beside the header, never in it."""
    big = dataclasses.replace(CONTRIBUTION, payload=b"x" * 10_000)
    assert len(wire.pack(big, TOKEN)) < 200
    assert wire.unpack(wire.pack(big, TOKEN), TOKEN).payload is None  # type: ignore[union-attr]


def test_plain_forms_come_back_and_misfits_are_value_errors() -> None:
    """What a checkpoint holds of a state is read back; anything else is a ValueError."""
    plan = messages.Plan(("a", "b"), ("a",))
    state = State(1, Version(0, 5, 2, "d"), 1, plan, {"a": ContributionId(3, 4)}, {1: "c", 2: "d"})
    assert from_plain(State, to_plain(state)) == state
    with pytest.raises(ValueError, match="no State"):
        from_plain(State, [1, 2])
    assert from_plain(Leave, [7]) == Leave(7)
    assert from_plain(Leave, to_plain(Leave(7, died=True))) == Leave(7, died=True)


def test_a_state_tells_how_full_the_buffer_is() -> None:
    """One that doesn't is none."""
    state = State(1, Version(0, 5, 2, "d"), 1, messages.Plan(("a",), ("a",)), {}, {2: "d"}, buffered=3)
    assert from_plain(State, to_plain(state)) == state
    with pytest.raises(ValueError, match="no list of 9"):
        from_plain(State, to_plain(state)[:-1])


USES = (Use(DataSet("train", 100, 2, "f"), ((0, 5), (7, 9)), 30),)


@pytest.mark.parametrize(
    ("kind", "empty", "full"),
    [
        (Contribution, CONTRIBUTION, dataclasses.replace(CONTRIBUTION, uses=USES)),
        (
            State,
            State(1, Version(0, 5, 2, "d"), 1, messages.Plan(("a",), ("a",)), {}, {2: "d"}),
            State(
                *(1, Version(0, 5, 2, "d"), 1, messages.Plan(("a",), ("a",)), {}, {2: "d"}),
                tables=(Table(USES[0].data, 12, (Lease("a", 3, 5, 7, 1),), (Lease("b", 4, 9, 12, 2),)),),
            ),
        ),
    ],
)
def test_what_belongs_to_shared_data_is_written_only_where_it_is(kind: type, empty: object, full: object) -> None:
    """Messages of runs without data have the fields that they had; with data they come back whole."""
    assert from_plain(kind, to_plain(full)) == full
    assert from_plain(kind, to_plain(empty)) == empty
    assert len(to_plain(full)) == len(to_plain(empty)) + 1
    with pytest.raises(ValueError, match="no list of"):
        from_plain(kind, [*to_plain(full), 1])
