"""Headers: what is sent comes back, and whatever else comes in is a refusal."""

from __future__ import annotations

import dataclasses
from typing import get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.core.leases import DataSet, Lease, Table, Use
from p2p_diloco.core.version import ContributionId, Version
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


def any_message() -> st.SearchStrategy[wire.NodeMessage]:
    """Each kind that there is, with whatever its fields may hold, and no payload."""
    return st.one_of(
        *(
            st.builds(k, **({"payload": st.none()} if "payload" in k.__slots__ else {}))
            for k in get_args(wire.NodeMessage)
        )
    )


@settings(deadline=None)  # the machine may be busy
@given(any_message())
def test_a_message_survives_its_header(message: wire.NodeMessage) -> None:
    """Every kind of message, with any values, is equal after the trip."""
    assert wire.unpack(wire.pack(message, TOKEN), TOKEN) == message


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
@given(st.sampled_from([k.__name__ for k in get_args(wire.NodeMessage)]), st.lists(plain, max_size=10))
def test_fields_of_strangers_are_refused_or_well_formed(kind: str, fields: list[object]) -> None:
    """A known kind with any fields is refused, or is a message that could have been sent."""
    try:
        message = wire.unpack(msgpack.packb([wire.PROTOCOL, TOKEN, kind, fields]), TOKEN)
    except Refusal:
        return
    assert wire.unpack(wire.pack(message, TOKEN), TOKEN) == message


MEAN = wire.OfMean(0, "k" * 32, 3, "b", "h" * 64)
ACCUSATION = wire.Accusation(MEAN, Version(0, 0, 0, "d"), b"s", 30)


def forged(message: wire.NodeMessage, change: dict[int, object]) -> bytes:
    protocol, token, kind, fields = msgpack.unpackb(wire.pack(message, TOKEN))
    for index, value in change.items():
        fields[index] = value
    return bytes(msgpack.packb([protocol, token, kind, fields]))


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (wire.pack(wire.Nudge(3), b"x" * 16), "wrong run token"),
        (msgpack.packb([wire.PROTOCOL + 1, TOKEN, "Nudge", []]), "protocol"),
        (msgpack.packb([wire.PROTOCOL, TOKEN, "Eval", ["1"]]), "unknown kind"),
        (msgpack.packb([wire.PROTOCOL, TOKEN, "Nudge", [1, True, 2]]), "no list of 1"),
        (msgpack.packb({"kind": "Nudge"}), "no message"),
        (forged(wire.Nudge(3), {0: True}), "no whole number"),
        (forged(wire.Nudge(3), {0: 2**63}), "out of range"),
        (forged(wire.Nudge(3), {0: 1.0}), "no whole number"),
        (forged(ACCUSATION, {1: [0, 0, 0]}), "no list of 4"),
        (forged(ACCUSATION, {1: [0, 0, 0, "d" * 5000]}), "too long"),
        (forged(wire.Audit(MEAN), {0: None}), "no list of"),
    ],
)
def test_what_is_wrong_is_named(header: bytes, reason: str) -> None:
    with pytest.raises(Refusal, match=reason):
        wire.unpack(header, TOKEN)


def test_payloads_are_left_out_of_headers() -> None:
    """A payload travels beside the header, never in it."""
    big = dataclasses.replace(ACCUSATION, payload=b"x" * 10_000)
    assert len(wire.pack(big, TOKEN)) < 200
    assert wire.unpack(wire.pack(big, TOKEN), TOKEN).payload is None  # type: ignore[union-attr]


def test_plain_forms_come_back_and_misfits_are_value_errors() -> None:
    """What is written on disk or told to a trainer is read back; anything else is a ValueError."""
    data = DataSet("train", 100, 2, "f")
    table = Table(data, 12, (Lease("a", 3, 5, 7, 1),), (Lease("b", 4, 9, 12, 2),))
    for kind, value in ((Table, table), (Use, Use(data, ((0, 5), (7, 9)), 30))):
        assert from_plain(kind, to_plain(value)) == value
        with pytest.raises(ValueError, match="no list of"):
            from_plain(kind, [*to_plain(value), 1])
    with pytest.raises(ValueError, match="no Table"):
        from_plain(Table, [1, 2])
