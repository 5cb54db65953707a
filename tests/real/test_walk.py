"""README's walk, as it is printed there: a bootstrap, a founder and a second peer on three machines without anything on
them. Needs root and `ip`.

Law: every command is read from README.md. Only the addresses in them are replaced by the bootstrap's, and a trainer
pauses between its steps, so that other tests get processor time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from internet import Internet
from swarm import ROOT

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

WITHIN_S = 150.0
"""Deadline for each step. An export with a revoked invitation once took 315 s."""
ADDRESS = re.compile(r"/ip4/\S+/p2p/[A-Za-z0-9]+")
PAUSES = " --pause-s 0.03"


def walk() -> list[str]:
    """The commands of README's section on several machines, in their order."""
    _, _, rest = (ROOT / "README.md").read_text().partition("\n## A run on several machines\n")
    blocks = re.findall(r"^```\n(.*?)^```", rest.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.startswith("p2p-diloco ")]


def the(beginning: str) -> str:
    """The first command of the walk that begins so."""
    return next(line for line in walk() if line.startswith(f"p2p-diloco {beginning}"))


class Machine:
    """A machine with a folder and a home of its own. `address`: replaces the addresses in commands."""

    def __init__(self, internet: Internet, name: str, folder: Path, address: str = "") -> None:
        internet.public(name)
        self._at, self.folder, self._address = internet.at(name), folder / name, address
        self.folder.mkdir()
        self._logs = 0
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, command: str) -> tuple[subprocess.Popen[str], Path]:
        """Start a command of README's; returns its process, and the file with all that it says."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("P2P_DILOCO_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        here = {"PATH": path, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        self._logs += 1
        log = self.folder / f"log-{self._logs}"
        with log.open("w") as out:
            process = subprocess.Popen(
                [*self._at, *shlex.split(ADDRESS.sub(self._address, command.replace("...", "")))],
                cwd=self.folder, env={**clean, **here}, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self.processes.append(process)
        return process, log

    def run(self, command: str) -> tuple[int, str]:
        """The exit code of a command that ends, and all that it says."""
        process, log = self.start(command)
        return process.wait(WITHIN_S), log.read_text()

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20.0)
            process.kill()
            process.wait()


def until(come: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    """Wait until something is so, while this process runs."""
    give_up_at = time.monotonic() + WITHIN_S
    while not come():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < give_up_at, log.read_text()
        time.sleep(0.2)


def test_the_walk_in_the_readme(internet: Internet, tmp_path: Path) -> None:
    """Every command does what README says. With its invitation revoked an export ends with one sentence."""
    machines = [seed := Machine(internet, "seed", tmp_path)]
    try:
        bootstrap, said = seed.start(the("bootstrap"))
        until(lambda: "join" in said.read_text(), bootstrap, said)
        addresses = [found for found in ADDRESS.findall(said.read_text()) if "127.0.0.1" not in found]
        alice, bob = (Machine(internet, name, tmp_path, addresses[0]) for name in ("alice", "bob"))
        machines += [alice, bob]
        founder, founders_log = alice.start(the("join --initial-peers") + PAUSES)
        until((alice.folder / "main.invite").exists, founder, founders_log)
        (bob.folder / "main.invite").write_bytes((alice.folder / "main.invite").read_bytes())
        (bob.folder / "main.invite").chmod(0o600)
        second, seconds_log = bob.start(the("join --invite main.invite --name") + PAUSES)
        until(lambda: "round " in seconds_log.read_text(), second, seconds_log)

        for machine in (alice, bob):  # each finds the invitation in its folder
            looking, seen = machine.start(the("status"))
            until(lambda seen=seen: "bob" in seen.read_text(), looking, seen)  # type: ignore[misc]
            looking.terminate()
        page, link = alice.start(the("dashboard"))
        until(lambda: "?token=" in link.read_text(), page, link)
        page.terminate()

        for command, told in (("set", "outer_lr=0.5"), ("save", "being saved by")):
            code, out = alice.run(the(command))
            assert (code, told in out) == (0, True), out
        code, out = bob.run(the("stop"))
        assert code == 2, out
        assert "names no key to sign with" in out

        code, out = alice.run(the("export"))
        assert code == 0, out
        assert json.loads(out.splitlines()[-1])["files"] == ["model/model.safetensors"]

        code, out = alice.run(the("kick"))
        assert code == 0, out
        assert second.wait(WITHIN_S) == 5, seconds_log.read_text()
        assert "was revoked" in seconds_log.read_text()
        code, out = bob.run(the("export"))
        assert code == 5, out
        assert "was revoked; ask for a new invitation" in out

        code, out = alice.run(the("stop"))
        assert code == 0, out
        assert founder.wait(WITHIN_S) == 0, founders_log.read_text()
        assert any((alice.folder / "saved").glob("checkpoint-*"))
    finally:
        for machine in reversed(machines):
            machine.end()
