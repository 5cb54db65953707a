"""A private run from its founding to a revocation, as its users see it: commands, files and sentences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

P2P_DILOCO = [sys.executable, "-m", "p2p_diloco"]
QUICK = ("--pause-s", "0.3", "--eval-batches", "0", "--sync-every", "5")
EVERYWHERE = ("--host-maddrs", "/ip4/0.0.0.0/tcp/0")
"""With this address to listen on, other machines can reach the run, so it is private unless told otherwise."""
RUN = "secret-run"


class Place:
    """A folder of a user's, and the commands that run in it."""

    def __init__(self, folder: Path, addresses: list[str]) -> None:
        self.folder, self.addresses = folder, addresses
        folder.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str, dials: bool = True, **environment: str) -> subprocess.Popen[str]:
        through = ("--initial-peers", *self.addresses, "--run-id", RUN) if dials else ()
        clean = {name: value for name, value in os.environ.items() if not name.startswith("P2P_DILOCO_")}
        log = (self.folder / f"log-{len(self.processes)}").open("w")
        process = subprocess.Popen(
            [*P2P_DILOCO, *command, *through], cwd=self.folder, env={**clean, **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def run(self, *command: str, dials: bool = True, **environment: str) -> tuple[int, str, str]:
        """Exit status, stdout and log of a command that ends."""
        process = self.start(*command, dials=dials, **environment)
        out, _ = process.communicate(timeout=100)
        return process.returncode, out, (self.folder / f"log-{len(self.processes) - 1}").read_text()

    def log(self, number: int = 0) -> str:
        return (self.folder / f"log-{number}").read_text()


class Users:
    """A bootstrap, and the users' folders."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.places = folder, dict[str, Place]()
        self.seed = self.at("bootstrap").start("bootstrap", "--json", dials=False)
        assert self.seed.stdout is not None
        self.addresses = json.loads(self.seed.stdout.readline())["maddrs"]

    def at(self, name: str) -> Place:
        if name not in self.places:
            self.places[name] = Place(self.folder / name, getattr(self, "addresses", []))
        return self.places[name]

    def end(self) -> None:
        for place in reversed(self.places.values()):
            for process in place.processes:
                process.kill()
                process.communicate()


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Users]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Users(tmp_path)
    yield made
    made.end()


def names(place: Place, *flags: str, dials: bool = True) -> set[str]:
    """The live peers that `status` shows there."""
    code, out, err = place.run("status", "--once", "--json", *flags, dials=dials)
    assert code == 0, err
    told: dict[str, Any] = json.loads(out)
    return {peer["name"] for peer in told["peers"] if peer["epoch"] is not None and peer["state"] != "leaving"}


def until_logged(place: Place, text: str, number: int = 0) -> None:
    """Wait until a command of this place has logged a text."""
    give_up_at = time.monotonic() + 100
    while text not in place.log(number):
        assert place.processes[number].poll() is None, place.log(number)
        assert time.monotonic() < give_up_at, f"{text!r} is not in {place.log(number)}"
        time.sleep(0.2)


def test_a_private_run_from_its_founding_to_a_revocation(users: Users) -> None:
    """The founder writes key and invitation, and uses them again after a restart; a stranger is told to ask for one; a
    member joins with one flag, and is put out when it is kicked, while the founder goes on and another joins by a line
    in its environment. An observer's invitation is enough to export."""
    founder, stranger, alice = users.at("founder"), users.at("stranger"), users.at("alice")
    first = founder.start("join", "--name", "founder", *QUICK, *EVERYWHERE)
    until_logged(founder, f"founded the run {RUN}")
    for end in ("key", "invite", "issued"):
        assert (founder.folder / f"{RUN}.{end}").stat().st_mode & 0o777 == 0o600
    assert f"p2p-diloco join --invite {RUN}.invite" in founder.log()
    assert founder.log().count("other peers dial this peer at") <= 1  # the transport that only looked says nothing
    first.terminate()
    first.communicate(timeout=60)
    before = {file: file.read_bytes() for file in founder.folder.glob(f"{RUN}.*")}
    training = founder.start("join", "--name", "founder", *QUICK, *EVERYWHERE)
    until_logged(founder, "round 1 took", 1)
    assert {file: file.read_bytes() for file in founder.folder.glob(f"{RUN}.*")} == before

    code, _, log = stranger.run("join", "--name", "stranger", *QUICK)
    assert code == 5, log
    assert f"--run-id={RUN} is the name of a private run; ask for an invitation" in log
    assert not list(stranger.folder.glob("*.key"))

    made = alice.folder / "alice.invite"
    code, out, log = founder.run("invite", "--name", "alice", "--expires", "1h", "--out", str(made), dials=False)
    assert code == 0, log
    assert "p2p-diloco join --invite alice.invite" in out
    member = alice.start("join", "--invite", "alice.invite", "--name", "alice", *QUICK[:4], dials=False)
    until_logged(alice, "round 1 took")
    assert names(stranger) == set()
    assert f"the run {RUN} is private: look at it with --invite" in stranger.log(1)
    assert names(alice, "--invite", "alice.invite", dials=False) == {"founder", "alice"}

    eye = users.at("eye")
    invitation = ("--name", "eye", "--role", "observer", "--out", str(eye.folder / "eye.invite"))
    code, _, log = founder.run("invite", *invitation, dials=False)
    assert code == 0, log
    code, out, log = eye.run("export", "--invite", "eye.invite", "--out", "model", dials=False)
    assert (code, json.loads(out)["run_id"]) == (0, RUN), log
    code, _, log = stranger.run("export", "--out", "model")
    assert code == 5, log
    assert f"--run-id={RUN} is the name of a private run; ask for an invitation" in log

    code, out, log = founder.run("kick", "alice", "--key", f"{RUN}.key", dials=False)
    assert code == 0, log
    assert "can come back with it: eye, shared; revoke that one" in log
    member.communicate(timeout=60)
    assert member.returncode == 5, alice.log()
    assert "--invite=alice was revoked; ask for a new invitation" in alice.log()
    assert training.poll() is None
    code, _, log = alice.run("join", "--invite", "alice.invite", "--name", "alice", *QUICK[:4], dials=False)
    assert code == 5, log
    code, line, log = founder.run("invite", "--name", "bob", "--line", dials=False)
    assert code == 0, log
    bob = users.at("bob")
    bob.start("join", "--name", "bob", *QUICK[:4], dials=False, P2P_DILOCO_INVITE=line.strip())
    until_logged(bob, "round 1 took")


def test_an_open_run_says_so_loudly(users: Users) -> None:
    """With `--open` no files are written, and a peer without an invitation takes part."""
    founder, other = users.at("founder"), users.at("other")
    founder.start("join", "--open", "--name", "founder", *QUICK, *EVERYWHERE)
    until_logged(founder, f"founded the run {RUN}")
    until_logged(founder, f"the run {RUN} is OPEN")
    other.start("join", "--open", "--name", "other", *QUICK[:4])
    until_logged(other, "round 1 took")
    assert not list(founder.folder.glob(f"{RUN}.*"))
