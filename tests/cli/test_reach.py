"""Checks with plain sockets before libp2p is loaded."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from p2p_diloco.cli import reach
from p2p_diloco.cli.reach import check_free, check_initial_peers
from p2p_diloco.errors import ConfigError, NoBootstrapReached

ID = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
CLOSED = f"/ip4/127.0.0.1/tcp/9/p2p/{ID}"


@pytest.fixture
def port() -> Iterator[int]:
    """A port with a listener that says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


@contextlib.contextmanager
def saying(words: bytes) -> Iterator[int]:
    """A port whose listener says these words to the first guest."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def greet() -> None:
            with contextlib.suppress(OSError):
                guest, _ = listening.accept()
                with guest:
                    guest.sendall(words)
                    guest.recv(1)

        greeting = threading.Thread(target=greet, daemon=True)
        greeting.start()
        yield listening.getsockname()[1]
        greeting.join(5.0)


def test_what_is_no_swarm_is_told_apart(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that says nothing, or something else, is no initial peer."""
    monkeypatch.setattr(reach, "PROBE_S", 1.0)
    with saying(b"HTTP/1.1 400 Bad Request\r\n") as web:
        addresses = [f"/ip4/127.0.0.1/tcp/{number}/p2p/{ID}" for number in (port, web)]
        with pytest.raises(NoBootstrapReached) as caught:
            check_initial_peers(addresses)
    assert f"{addresses[0]} (something listens there but sends nothing" in str(caught.value)
    assert f"{addresses[1]} (something else answers there" in str(caught.value)
    assert "or any peer's from its log" in str(caught.value)  # a run goes on without a bootstrap


def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address from which nothing ever comes back is given up."""
    monkeypatch.setattr(reach, "PROBE_S", 0.3)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with contextlib.ExitStack() as queue:  # once it is full, further connections are never accepted
            for _ in range(4):
                waiting = queue.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            with pytest.raises(NoBootstrapReached, match="timed out"):
                check_initial_peers([f"/ip4/127.0.0.1/tcp/{full.getsockname()[1]}/p2p/{ID}"])


def test_what_cannot_be_judged_passes() -> None:
    """An address that is not plain TCP is left to libp2p; and no addresses are no error here."""
    check_initial_peers([CLOSED, f"/ip4/127.0.0.1/udp/9/quic-v1/p2p/{ID}"])
    check_initial_peers([CLOSED, f"/ip4/127.0.0.1/tcp/9/ws/p2p/{ID}"])
    check_initial_peers([CLOSED, f"/dnsaddr/example.invalid/p2p/{ID}"])
    check_initial_peers([])


@pytest.mark.parametrize("key", ["--host-maddrs", None])
def test_an_address_that_cannot_be_had_names_its_setting(port: int, key: str | None) -> None:
    """The error names --port if it was given, or else the address that was given."""
    taken, foreign = f"/ip4/127.0.0.1/tcp/{port}", "/ip4/203.0.113.7/tcp/0"
    with pytest.raises(ConfigError) as caught:
        check_free(taken, key=key)
    assert (caught.value.key, caught.value.value) == ((key, taken) if key else ("--port", str(port)))
    assert caught.value.wrong == "is in use"
    with pytest.raises(ConfigError) as caught:
        check_free(foreign, key=key)
    assert (caught.value.key, caught.value.value) == ((key, foreign) if key else ("--host", "203.0.113.7"))


def test_a_command_that_reaches_no_peer_ends_before_torch_is_loaded(port: int) -> None:
    """One sentence and exit code 4, in seconds, though a listener is at the address."""
    code = (
        "import sys; from p2p_diloco.cli import carry_out, reach; reach.PROBE_S = 1.0; "
        f"to = ['--initial-peers', '/ip4/127.0.0.1/tcp/{port}/p2p/{ID}']; "
        "codes = {carry_out([command, *to]) for command in ('join', 'status', 'bootstrap')}; "
        "sys.exit(99 if 'torch' in sys.modules or len(codes) > 1 else codes.pop())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 4, ended.stderr
    assert (ended.stderr.count("\n"), ended.stderr.count("sends nothing")) == (3, 3)
