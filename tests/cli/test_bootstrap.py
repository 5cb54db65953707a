"""The bootstrap: what it prints, where it listens, and that it ends at once and cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@contextlib.contextmanager
def running(*flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A bootstrap's process, and what it has printed. After the block it is gone."""
    command = [sys.executable, "-m", "p2p_diloco", "bootstrap", "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def check_a_clean_end(process: subprocess.Popen[str], printed: dict[str, Any], number: signal.Signals) -> None:
    """130 or 143, without a traceback, soon, and its daemon ends, too. It said where it listens."""
    daemons = psutil.Process(process.pid).children(recursive=True)
    assert daemons
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "this bootstrap listens on loopback alone" in err
    assert "ended with status" not in err
    _, alive = psutil.wait_procs(daemons, timeout=30)
    assert alive == []
    join = shlex.split(str(printed["join"]))
    assert join[:3] == ["p2p-diloco", "join", "--initial-peers"]
    assert all(check_peer_address(address).startswith("/ip4/127.0.0.1/") for address in join[3:])


@pytest.mark.real
def test_a_signal_ends_it_cleanly_and_its_identity_stays(tmp_path: Path) -> None:
    """With --identity-path, in a folder that is made if need be, the next start has the same peer id. `status` reaches
    it, and says that there is no run yet."""
    path = tmp_path / "new" / "identity.key"
    with running("--identity-path", str(path)) as (first, printed):
        check_a_clean_end(first, printed, signal.SIGTERM)
    with running("--identity-path", str(path)) as (second, again):
        assert again["peer_id"] == printed["peer_id"]
        command = [sys.executable, "-m", "p2p_diloco", "status", "--once", "--initial-peers", *again["maddrs"]]
        plain = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert plain.stdout == "run main: no peer of it is seen; check its name, and its peers\n", plain.stderr
        assert plain.returncode == 0
        check_a_clean_end(second, again, signal.SIGINT)


@pytest.mark.real
def test_a_bootstrap_with_run_keys_relays_for_these_runs_only() -> None:
    """A member's registration is taken; a stranger's, and one of a member of another run, is refused."""

    async def test(peer_id: str, addresses: list[str]) -> list[Frame]:
        async with attacker(SimpleNamespace(peer_id=peer_id, addresses=lambda: addresses)) as peer:
            me, answers = peer.daemon.peer_id, list[Frame]()
            shown = [membership(me).chain, membership(me, invitation(key=OTHER_KEY)).chain, None]
            for certificate in shown:
                pipe, frames = await peer.stream(RELAY, asking({"register": True}, certificate))
                answer = await frames.read(idle_s=20.0, frame_s=20.0)
                assert answer is not None
                answers.append(answer)
                pipe.abort()
            return answers

    with running("--run-key", KEY.public.hex()) as (process, printed):
        assert asyncio.run(test(printed["peer_id"], printed["maddrs"])) == [Message(b""), REFUSED, REFUSED]
        check_a_clean_end(process, printed, signal.SIGTERM)
