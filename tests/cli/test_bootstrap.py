"""The bootstrap: what it prints, where it listens, and that it ends at once and cleanly."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from p2p_diloco.addresses import check_peer_address
from p2p_diloco.cli.bootstrap import _public_key, announcement
from p2p_diloco.errors import UsageError
from p2p_diloco.net.framing import Frame, Message, Refused
from p2p_diloco.net.relay import RELAY, asking
from tests.net.attacker import attacker
from tests.net.members import KEY, OTHER_KEY, invitation, membership

ID = "12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
REFUSED = Refused("not a member of this run")
LOOPBACK, PRIVATE, PUBLIC = (f"/ip4/{ip}/tcp/1/p2p/{ID}" for ip in ("127.0.0.1", "192.168.1.2", "8.8.8.8"))

FOUNDER = "# the first peer founds the run: there, add --found, or settings of the run such as --sync-every 100"


def test_the_join_line_has_the_public_address_first_and_loopback_apart() -> None:
    """The printed line can be pasted as it is; the line for other machines has no loopback address. A last line says
    what the first peer needs. A script gets the identity, the addresses in the same order, and the line."""
    here = ["# from this machine alone (loopback):", f"p2p-diloco join --initial-peers {LOOPBACK}", FOUNDER]
    assert announcement([LOOPBACK], as_json=False).splitlines() == here
    assert announcement([LOOPBACK, PRIVATE, PUBLIC], as_json=False).splitlines() == [
        "# from other machines:",
        f"p2p-diloco join --initial-peers {PUBLIC} {PRIVATE}",
        *here,
    ]
    assert json.loads(announcement([LOOPBACK, PUBLIC], as_json=True)) == {
        "peer_id": ID,
        "maddrs": [PUBLIC, LOOPBACK],
        "join": f"p2p-diloco join --initial-peers {PUBLIC}",
    }


@pytest.mark.parametrize("text", ["", "ab", "x" * 64, "00" * 33, "00" * 31 + "é"])
def test_a_run_key_that_cannot_be_read_is_a_usage_error(text: str) -> None:
    """Before anything is started."""
    with pytest.raises(UsageError, match="is no public key of a run") as error:
        _public_key(text)
    assert (error.value.key, error.value.value) == ("--run-key", text)


Start = Callable[..., tuple["subprocess.Popen[str]", dict[str, object]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a bootstrap and give its process and what it printed; all are gone in the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*flags: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "p2p_diloco", "bootstrap", "--json", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        return process, json.loads(line)

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Its exit code after the signal, and what it said on stderr."""
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def check_a_clean_end(process: subprocess.Popen[str], printed: dict[str, object], number: signal.Signals) -> None:
    """130 or 143, without a traceback, soon, and its daemon ends, too. It said where it listens."""
    daemons = psutil.Process(process.pid).children(recursive=True)
    assert daemons
    code, err = ended(process, number)
    assert code == 128 + number
    assert "Traceback" not in err
    assert "this bootstrap listens on loopback alone" in err
    assert "ended with status" not in err
    _, alive = psutil.wait_procs(daemons, timeout=30)
    assert alive == []
    join = shlex.split(str(printed["join"]))
    assert join[:3] == ["p2p-diloco", "join", "--initial-peers"]
    assert all(check_peer_address(address).startswith("/ip4/127.0.0.1/") for address in join[3:])


@pytest.mark.real
def test_a_signal_ends_it_cleanly_and_its_identity_stays(start: Start, tmp_path: Path) -> None:
    """With --identity-path, in a folder that is made if need be, the next start has the same peer id. `status` reaches
    it, and says that there is no run yet."""
    path = tmp_path / "new" / "identity.key"
    first, printed = start("--identity-path", str(path))
    check_a_clean_end(first, printed, signal.SIGTERM)
    second, again = start("--identity-path", str(path))
    assert again["peer_id"] == printed["peer_id"]
    addresses = again["maddrs"]
    assert isinstance(addresses, list)
    command = [sys.executable, "-m", "p2p_diloco", "status", "--once", "--initial-peers", *addresses]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (plain.returncode, plain.stdout) == (0, "run main: no peer of it is seen (--run-id names another run)\n"), (
        plain.stderr
    )
    check_a_clean_end(second, again, signal.SIGINT)


@pytest.mark.real
def test_a_bootstrap_with_run_keys_relays_for_these_runs_only(start: Start) -> None:
    """A member's registration is taken; a stranger's, and one of a member of another run, is refused."""
    process, printed = start("--run-key", KEY.public.hex())
    addresses = printed["maddrs"]
    assert isinstance(addresses, list)

    async def test() -> list[Frame]:
        async with attacker(SimpleNamespace(peer_id=printed["peer_id"], addresses=lambda: addresses)) as peer:
            me, answers = peer.daemon.peer_id, list[Frame]()
            shown = [membership(me).chain, membership(me, invitation(key=OTHER_KEY)).chain, None]
            for certificate in shown:
                pipe, frames = await peer.stream(RELAY, asking({"register": True}, certificate))
                answer = await frames.read(idle_s=20.0, frame_s=20.0)
                assert answer is not None
                answers.append(answer)
                pipe.abort()
            return answers

    assert asyncio.run(test()) == [Message(b""), REFUSED, REFUSED]
    check_a_clean_end(process, printed, signal.SIGTERM)
