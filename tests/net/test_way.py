"""Several direct connections to one peer: when, how many, and what they carry."""

from __future__ import annotations

import socket
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_diloco.net import direct as direct_module
from p2p_diloco.net.direct import READINGS, Way, connections_for
from p2p_diloco.net.tcp import TcpSocket, Took
from tests.net.direct_peers import Start, run
from tests.net.patience import plays, until

MIB = 1 << 20


class Line:
    """A connection with given counters."""

    def __init__(self, path_bytes: float = 0.0) -> None:
        self.now, self.path, self.rate = Took(0, 0.0), path_bytes, list[float | None]()

    def moves(self, count: int, held_up_s: float) -> None:
        self.now = Took(self.now.bytes + count, self.now.held_up_s + held_up_s)

    def took(self) -> Took:
        now, self.now = self.now, Took(0, 0.0)
        return now

    def path_bytes(self) -> float:
        return self.path

    def pace(self, rate: float | None) -> None:
        self.rate.append(rate)


def stream(line: Line | None = None) -> Any:
    """A stream without a socket."""
    frames = SimpleNamespace(pipe=SimpleNamespace(paced=line))
    made = SimpleNamespace(fit=True, retired=False, lent=False, carried_bytes=0, frames=frames)
    made.retire = lambda: setattr(made, "retired", True)
    return made


def read(way: Way, *lines: Line) -> int:
    """The number of connections after a reading of these."""
    way.connections = [stream(line) for line in lines]
    way.pace(None)
    return way.wanted


# -- how many


@pytest.mark.parametrize(
    ("mbit", "rtt_ms", "count"),
    [(100, 100, 1), (1000, 1, 1), (1000, 10, 1), (250, 20, 1), (500, 100, 4), (1000, 20, 2), (1000, 100, 8)],
)  # fmt: skip
def test_the_number_follows_bandwidth_times_delay(mbit: float, rtt_ms: float, count: int) -> None:
    """One on short or slow paths, `CONNECTIONS_MAX` at most."""
    assert connections_for(mbit * 1e6 / 8 * rtt_ms / 1e3) == count


def test_a_way_is_measured_as_one_and_has_what_it_needs() -> None:
    # All connections together fill the path. Readings of one moment are added; the largest of the kept readings
    # counts, and is forgotten after `READINGS`.
    together = Way()
    assert together.wanted == 1
    assert read(together, Line(1.0 * MIB), Line(1.0 * MIB)) == 2
    for _ in range(READINGS - 1):
        assert read(together, Line()) == 2
    assert read(together, Line()) == 1

    # Bytes that wait in queues are not the path's. Where queues make a round trip ten times as long, the path
    # holds a tenth of what is not acknowledged.
    info = bytearray(184)
    for at, value in ((16, 1000), (24, 4000), (68, 50_000), (148, 5_000)):
        struct.pack_into("I", info, at, value)
    sock = SimpleNamespace(getsockopt=lambda *_: bytes(info))
    assert TcpSocket(sock).path_bytes() == pytest.approx(400_000)  # type: ignore[arg-type]
    assert TcpSocket(SimpleNamespace(getsockopt=lambda *_: b"")).path_bytes() == 0.0  # type: ignore[arg-type]
    ended = socket.socket()
    ended.close()
    TcpSocket(ended).pace(1.0)
    assert (TcpSocket(ended).path_bytes(), TcpSocket(ended).took()) == (0.0, (0, 0.0))

    # Progress is the sum and the longest hold up. Of what has come since the last call, on the connections that
    # are in use.
    one, other = Line(), Line()
    way = Way([stream(one)])
    one.moves(10, 0.1)
    assert way.took() == (10, 0.1)
    way.add(stream(other))
    one.moves(10, 0.1)
    other.moves(20, 0.3)
    assert way.took() == (30, 0.3)
    other.moves(5, 0.2)
    way.drop(way.connections[0])
    assert way.took() == (0, 0.0)

    # What the path does not need is dropped when given back. One connection stays; also one that carried enough,
    # or is unfit, is dropped.
    way, streams = Way(), [stream() for _ in range(2)]
    for one in streams:
        way.add(one)
    first = way.lend()
    assert first is not None
    way.give_back(first, 1, 100)
    assert (len(way.connections), first.retired) == (1, True)
    last = way.lend()
    assert last is not None
    way.give_back(last, 1, 100)
    assert len(way.connections) == 1
    assert way.lend() is last
    way.give_back(last, 99, 100)
    assert way.connections == []


# -- measured as one


# -- which is free


# -- payloads


@plays(run)
async def test_further_connections_may_fail(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried again after `RETRY_S`, and no payload goes over libp2p meanwhile."""
    monkeypatch.setattr(direct_module, "RETRY_S", 1000.0)
    a, b = start("a"), start("b")
    await a.send("b", b"first")
    monkeypatch.setattr(Way, "wanted", 3)
    b.direct._closing = True  # offers no further connection
    for n in range(5):
        await a.send("b", b"%d" % n)
        await until(lambda: a.direct._way("b").attempt is None)
    b.direct._closing = False
    assert (len(a.direct._way("b").connections), a.libp2p_streams) == (1, 0)
    assert a.talks == 1 + 2 * 2  # two further ones, each asked for in both directions
    assert len(b.box.got) == 6
