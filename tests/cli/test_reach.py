"""What plain sockets can tell before anything heavy is loaded."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from p2p_diloco.cli.reach import check_free, check_initial_peers
from p2p_diloco.errors import ConfigError, NoBootstrapReached

ID = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
CLOSED = f"/ip4/127.0.0.1/tcp/9/p2p/{ID}"
NO_NAME = f"/dns4/no-such-host.invalid/tcp/1/p2p/{ID}"


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_nobody_there_is_told_with_each_reason() -> None:
    """Every address stands in the sentence, with what it may be."""
    with pytest.raises(NoBootstrapReached) as caught:
        check_initial_peers([CLOSED, NO_NAME])
    assert f"{CLOSED} (connection refused: nothing listens there)" in str(caught.value)
    assert f"{NO_NAME} (no machine of that name)" in str(caught.value)


def test_one_that_answers_is_enough(port: int) -> None:
    """Of several initial peers most may be gone."""
    check_initial_peers([CLOSED, f"/ip4/127.0.0.1/tcp/{port}/p2p/{ID}", NO_NAME])


def test_what_cannot_be_judged_passes() -> None:
    """An address that isn't plain TCP is left to libp2p; and no address is nobody's fault here."""
    check_initial_peers([CLOSED, f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{ID}"])
    check_initial_peers([])


def test_a_free_port_passes_and_stays_free(port: int) -> None:
    """The probe lets go of what it tried."""
    for _ in range(2):
        check_free("/ip4/127.0.0.1/tcp/0")
    check_free(f"/ip4/127.0.0.1/udp/{port}/quic-v1")


@pytest.mark.parametrize("key", ["--host-maddrs", None])
def test_an_address_that_cannot_be_had_names_its_setting(port: int, key: str | None) -> None:
    """Who gave --port reads of --port, who gave an address of the address."""
    taken, foreign = f"/ip4/127.0.0.1/tcp/{port}", "/ip4/203.0.113.7/tcp/0"
    with pytest.raises(ConfigError) as caught:
        check_free(taken, key=key)
    assert (caught.value.key, caught.value.value) == ((key, taken) if key else ("--port", str(port)))
    assert caught.value.wrong == "is in use"
    with pytest.raises(ConfigError) as caught:
        check_free(foreign, key=key)
    assert (caught.value.key, caught.value.value) == ((key, foreign) if key else ("--host", "203.0.113.7"))
