"""Where ranks meet rank 0: near ones at its Unix socket, others at its TCP port, strangers not at all."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from p2p_diloco.peer import meeting
from p2p_diloco.peer.extents import Rank
from p2p_diloco.peer.meeting import Place
from p2p_diloco.peer.ranks import Group

HERE = "127.0.0.1"


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket, Place]]:
    """Rank 0's two listeners, and their place."""
    with socket.socket(socket.AF_UNIX) as near, socket.create_server((HERE, 0)) as far:
        near.bind(str(tmp_path / "ranks"))
        near.listen(4)
        yield near, far, Place(near.getsockname(), (HERE,), far.getsockname()[1], "ab" * 16 + "cd" * 16)


def met(listeners: tuple[socket.socket, socket.socket, Place], *places: Place) -> list[socket.AddressFamily]:
    """Let rank 1, 2, ... look for rank 0 at these places. Returns how rank 0 is connected to each of them."""
    near, far, place = listeners
    with ThreadPoolExecutor() as pool:
        reached = [pool.submit(meeting._reached, each, rank) for rank, each in enumerate(places, start=1)]
        found = meeting._accepted((near, far), len(places) + 1, place, Event())
        for rank, theirs in enumerate(reached, start=1):
            ours, other = found[rank], theirs.result()
            assert other is not None
            with ours, other:
                other.sendall(bytes([rank]))
                assert ours.recv(1) == bytes([rank])
        return [found[rank].family for rank in sorted(found)]


def test_a_rank_takes_the_unix_socket_if_it_can(listeners: tuple[socket.socket, socket.socket, Place]) -> None:
    """Over it memory is shared. A rank that doesn't find it takes TCP."""
    place = listeners[2]
    assert met(listeners, replace(place, path="/no such/path"), place) == [socket.AF_INET, socket.AF_UNIX]


def test_an_address_of_another_program_is_passed_over(listeners: tuple[socket.socket, socket.socket, Place]) -> None:
    """Hosts may have the same private addresses, so a rank may get to a wrong listener, or to none."""
    place = replace(listeners[2], path="/no such/path")
    with socket.create_server(("127.0.0.2", place.port)) as other, ThreadPoolExecutor(1) as pool:
        closed = pool.submit(lambda: other.accept()[0].close())
        assert met(listeners, replace(place, addresses=("127.0.0.3", "127.0.0.2", HERE))) == [socket.AF_INET]
        closed.result()


def test_strangers_are_no_ranks(
    listeners: tuple[socket.socket, socket.socket, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without the secret, a silent one, and one with a rank that doesn't exist take nobody's place."""
    monkeypatch.setattr(meeting, "DIAL_S", 0.2)
    place = listeners[2]
    with socket.create_connection((HERE, place.port)) as rude, socket.create_connection((HERE, place.port)), \
            socket.create_connection((HERE, place.port)) as unknown:  # fmt: skip
        rude.sendall(bytes(20))
        unknown.sendall(place.halves[0] + (7).to_bytes(4, "big"))
        assert met(listeners, replace(place, path="/no such/path")) == [socket.AF_INET]  # accepted after these
        rude.settimeout(5.0)
        assert rude.recv(100) == b""


def test_rank_0_does_not_wait_for_a_rank_that_gives_up(
    listeners: tuple[socket.socket, socket.socket, Place],
) -> None:
    """A rank without a way gives up; then rank 0 is told, and stops."""
    near, far, place = listeners
    given_up = Event()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(meeting._accepted, (near, far), 3, place, given_up)
        assert meeting._reached(replace(place, path="/no such/path", addresses=()), 1) is None
        given_up.set()
        assert accepted.result(30.0) == {}


def test_the_place_fits_into_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a host with many addresses, and in a folder with a long path."""
    addresses = tuple(f"200.200.200.{n}" for n in range(100, 100 + meeting.ADDRESSES_MAX))
    place = Place("/" + 107 * "p", addresses, 65535, 2 * meeting._SECRET_BYTES * "ff")
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: None)
    group = Group(Rank(0, 2), torch.device("cpu"))
    assert meeting._broadcast(group, place) == replace(place, addresses=list(addresses))
    assert meeting._broadcast(group, None) is None
