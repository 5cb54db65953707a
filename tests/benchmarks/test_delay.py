"""The switch of `bench` that delays and loses packets."""

from __future__ import annotations

import itertools
import random
import struct
import subprocess
import sys
from functools import partial

import pytest

from examples.benchmarks.delay import gap_between_losses
from examples.benchmarks.frames import packets, survivors
from examples.benchmarks.network import Network, NoNetwork

EACH, HEADERS = 1000, 10 + 14 + 20 + 32
"""Payload bytes of a packet; bytes before a frame's payload."""


def long_frame(payload: bytes, sequence: int = 7) -> bytes:
    """A frame as the kernel gives it: TCP over IPv4 with 12 bytes of options, in packets of `EACH` bytes."""
    offloads = struct.pack("=BBHHHH", 1, 1, 66, EACH, 34, 16)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 52 + len(payload), 500, 0, 64, 6, 0, bytes([10, 0, 0, 1]), bytes(4))
    tcp = struct.pack("!HHIIBBHHH", 1, 2, sequence, 0, 0x80, 0x98, 99, 0, 0) + bytes(12)
    return offloads + b"receivsender" + b"\x08\x00" + ip + tcp + payload


def sequence_of(frame: bytes) -> int:
    return int(struct.unpack_from("!I", frame, 10 + 14 + 20 + 4)[0])


def test_a_long_frame_counts_as_its_packets() -> None:
    """A frame of one packet, and one that is not TCP, count as one."""
    assert packets(long_frame(bytes(2500))) == 3
    assert packets(long_frame(bytes(2000))) == 2
    assert packets(bytes(10) + b"any other frame") == 1


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2), ()])
def test_exactly_the_lost_packets_are_missing(lost: tuple[int, ...]) -> None:
    """The others arrive in order, at their places in TCP's sequence."""
    payload = random.Random(1).randbytes(2500)
    gaps = [after - before - 1 for before, after in itertools.pairwise((-1, *lost, 99))]
    kept, left = survivors(long_frame(payload, 2**32 - 900), partial(next, iter(gaps[1:])), gaps[0])
    arrived = {(sequence_of(frame) + 900) % 2**32: frame[HEADERS:] for frame in kept}
    expected = {1000 * at: payload[1000 * at :][:1000] for at in range(3) if at not in lost}
    assert list(arrived) == sorted(arrived)
    assert b"".join(arrived.values()) == b"".join(expected.values())
    assert arrived.keys() <= expected.keys()
    assert left == 99 - 3


def test_losses_are_as_frequent_as_asked_for() -> None:
    """Of the packets of 200,000 short frames about 1 % are lost; without loss none."""
    random.seed(1)
    frame, until_loss, lost = bytes(10) + b"any other frame", gap_between_losses(0.01), 0
    for _ in range(200_000):
        kept, until_loss = survivors(frame, partial(gap_between_losses, 0.01), until_loss)
        lost += not kept
    assert 1800 < lost < 2200
    assert gap_between_losses(0.0) == sys.maxsize


ECHO = """
import socket, threading
place = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
while True:
    connection, _ = place.accept()
    while data := connection.recv(1 << 16):
        connection.sendall(data)
"""
ASK = """
import hashlib, random, socket, sys, threading, time
def exchange(payload):
    began, back = time.monotonic(), b""
    sending = threading.Thread(target=connection.sendall, args=(payload,))
    sending.start()
    while len(back) < len(payload):
        back += connection.recv(1 << 20)
    sending.join()
    assert back == payload
    return time.monotonic() - began
connection = socket.create_connection((sys.argv[1], 7000), timeout=30)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
print(min(exchange(b"!") for _ in range(5)), exchange(random.randbytes(2_000_000)))
"""


@pytest.mark.real
@pytest.mark.timeout(120)
def test_bytes_arrive_whole_and_no_sooner_than_the_delay() -> None:
    """A round trip takes at least the time asked for, and lost packets are sent again by TCP."""
    try:
        network = Network(0.03, 0.01)
    except NoNetwork as error:
        pytest.skip(str(error))
    try:
        try:
            there, here = network.machine("there"), network.machine("here")
        except NoNetwork as error:
            pytest.skip(str(error))
        network.throttle("here", 200)
        with subprocess.Popen([*there, sys.executable, "-c", ECHO], stdout=subprocess.PIPE) as echo:
            assert echo.stdout is not None
            assert echo.stdout.readline() == b"ready\n"
            asked = [*here, sys.executable, "-c", ASK, network.machines["there"]]
            told = subprocess.run(asked, capture_output=True, text=True, timeout=90)
            echo.kill()
        assert told.returncode == 0, told.stderr
        shortest_s, bulk_s = map(float, told.stdout.split())
        assert shortest_s >= 0.03
        assert bulk_s >= (2_000_000 - 2 * 128 * 1024) * 8 / 200e6
    finally:
        network.close()
    assert network.switch not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
