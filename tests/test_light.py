"""An install by bootstrap/requirements.txt: it has no torch, and all commands work that don't train."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import requires

from p2p_diloco.cli.app import app
from p2p_diloco.errors import OF_TRAINING
from tests.light import REQUIREMENTS, installed, name_of, named

ROOT = REQUIREMENTS.parents[1]
ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
MEND = "which isn't installed; run `pip install p2p-diloco`"
OF_HIVEMIND = {"configargparse", "grpcio-tools", "numpy", "packaging", "prefetch-generator", "pyyaml", "scipy", "torch"}
"""What only those parts of Hivemind need that this package doesn't use."""
COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands if command.callback)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)


def needs(package: str) -> dict[str, str]:
    """What a package needs: name -> the requirement, without the bounds, as bootstrap/requirements.txt writes it."""
    found = [line for line in requires(package) or () if "extra ==" not in line]
    return {name_of(line): "; ".join([name_of(line), *line.partition("; ")[2:]]).removesuffix("; ") for line in found}


def test_the_list_has_all_that_both_packages_need_but_for_training() -> None:
    """A new dependency of this package, or of Hivemind, is added to the list, or to what it leaves out."""
    ours, theirs = needs("p2p-diloco"), needs("hivemind")
    wanted = {name: ours.get(name, theirs.get(name)) for name in ours.keys() - set(OF_TRAINING) - {"hivemind"}}
    wanted |= {name: theirs[name] for name in theirs.keys() - OF_HIVEMIND - ours.keys()}
    assert {name_of(line): line.replace('"', "'") for line in named()} == {
        name: str(line).replace('"', "'") for name, line in wanted.items()
    }
    assert named() == sorted(named())


def test_the_small_install_has_neither_torch_nor_numpy() -> None:
    """Nor does a package of the list need them."""
    assert installed() & {"torch", "numpy", "scipy", "safetensors", "grpcio"} == set()


HELP = """
import sys
from tests.light import leave_out
leave_out()
from p2p_diloco.cli import main
for command in sys.argv[1:]:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert not end.code, command
"""


def test_every_command_has_help_without_torch() -> None:
    told = run("-c", HELP, *COMMANDS)
    assert (told.returncode, told.stdout.count("Usage")) == (0, len(COMMANDS)), told.stderr


TRIES = """
import json, sys
from tests.light import leave_out
leave_out()
from p2p_diloco.cli import join, main
join._check_network = lambda peer: None
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as end:
        print(end.code)
"""


def test_a_command_that_needs_torch_says_how_to_get_it() -> None:
    """In one sentence, with the exit code of a wrong use."""
    joins = ["join", "--initial-peers", ADDRESS]
    tries = [
        (["export", "--out", "x", "--checkpoint", "none"], "torch"),
        ([*joins, "--data", "docs"], "torch"),
        ([*joins, "--role", "aggregator"], "torch"),
        (["data", "docs", "--initial-peers", "x"], "safetensors"),
    ]
    told = run("-c", TRIES, json.dumps([command for command, _ in tries]))
    assert told.stdout.split() == ["2"] * len(tries)
    sentences = [line for line in told.stderr.splitlines() if line.startswith("p2p-diloco: ")]
    assert sentences == [f"p2p-diloco: this needs {library}, {MEND}" for _, library in tries]


def test_a_script_without_torch_is_told_how_to_get_it() -> None:
    """`Peer` is of no use without it."""
    told = run("-c", "from tests.light import leave_out; leave_out(); from p2p_diloco import Peer")
    assert told.stderr.splitlines()[-1] == f"p2p_diloco.errors.UsageError: this needs torch, {MEND}"


def test_another_missing_module_is_a_fault_as_before() -> None:
    """The sentence names only what the small install leaves out."""
    code = (
        "import sys, p2p_diloco; sys.modules['p2p_diloco.cli.doctor.machine'] = None\n"
        "from p2p_diloco.cli import main; main(['env'])"
    )
    told = run("-c", code)
    assert (told.returncode, "a fault in p2p-diloco itself" in told.stderr) == (1, True)
