"""Frames survive any split of their bytes, and nothing but a FrameError comes of bytes that are none; counters."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_diloco.net.framing import (
    MAGIC,
    PREFIX,
    REASON_BYTES_MAX,
    VERSION,
    Accepted,
    Bulk,
    Frame,
    FrameDecoder,
    FrameError,
    Message,
    Progress,
    Refused,
    encode,
)
from p2p_diloco.net.interface import Refusal, Traffic

HEADER_BYTES_MAX = 200
counts = st.integers(0, 2**64 - 1)
headers = st.binary(max_size=HEADER_BYTES_MAX)
frames = st.one_of(
    st.builds(Message, headers),
    st.builds(Bulk, headers, counts),
    st.builds(Accepted),
    st.builds(Refused, st.sampled_from(["", "not today", "é\n" * 50])),
    st.builds(Progress, counts),
)


def decoder(buffer: bytes | bytearray = b"") -> FrameDecoder:
    return FrameDecoder(bytearray(buffer) if isinstance(buffer, bytes) else buffer, header_bytes_max=HEADER_BYTES_MAX)


@settings(max_examples=30)
@given(st.lists(frames, max_size=5), st.binary(max_size=20), st.data())
def test_any_split_gives_the_same_frames(sent: list[Frame], tail: bytes, data: st.DataObject) -> None:
    """However the stream is cut, the same frames come out in order, and what follows a payload's head is
    left alone."""
    wire = b"".join(map(encode, sent)) + encode(Bulk(b"last", len(tail))) + tail
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    buffer, got = bytearray(), list[Frame]()
    reader = decoder(buffer)
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        buffer += wire[start:end]
        while Bulk(b"last", len(tail)) not in got and (frame := reader.next_frame()) is not None:
            got.append(frame)
    assert got == [*sent, Bulk(b"last", len(tail))]
    assert buffer == tail


@pytest.mark.parametrize(
    "body", [[99], [1], [1, 7], [2, b"h", -1], [2, b"h", 2**64 - 1, 0], [3, 0], [4, b"no"], [5, 1.0], {"1": b"h"}, 1]
)
def test_a_body_of_another_form_is_refused(body: object) -> None:
    """An unknown kind, or fields that are missing, surplus or of another type."""
    packed = msgspec.msgpack.encode(body)
    reader = decoder(PREFIX.pack(MAGIC, VERSION, len(packed)) + packed)
    with pytest.raises(FrameError, match="can't be read"):
        reader.next_frame()


def test_the_longest_header_fits_and_a_long_reason_is_cut() -> None:
    """To what may be sent, also within a letter of several bytes."""
    for size in (2_000, 2**16):
        for longest in (Message(bytes(size)), Bulk(bytes(size), 2**64 - 1)):
            assert FrameDecoder(bytearray(encode(longest)), header_bytes_max=size).next_frame() == longest
    frame = decoder(encode(Refused("é" * REASON_BYTES_MAX))).next_frame()
    assert isinstance(frame, Refused)
    assert frame.reason.startswith("é" * (REASON_BYTES_MAX // 2))


# -- counters and refusals


def test_the_number_of_peers_counted_apart_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The totals count all peers."""
    monkeypatch.setattr("p2p_diloco.net.interface.PEERS_COUNTED_MAX", 2)
    traffic = Traffic()
    for peer in "abcb":
        traffic.sent(peer, 1)
        traffic.received(peer, 10)
        traffic.refuse(peer)
        traffic.went(peer, "direct")
    assert (traffic.bytes_sent, traffic.bytes_received, traffic.refused) == (4, 40, 4)
    assert {name: one.bytes_received for name, one in traffic.peers.items()} == {"a": 10, "b": 20}
    assert traffic.ways() == {"a": "direct", "b": "direct"}


def test_a_refusals_reason_gives_no_commands_to_a_terminal() -> None:
    """It may be another peer's text, and comes into logs."""
    refusal = Refusal("no\x1b[2J\x1b[31m, and\nWARNING forged")
    assert refusal.reason == str(refusal) == "no [2J [31m, and WARNING forged"
