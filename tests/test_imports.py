"""Every process loads little: help, settings and errors load neither torch nor hivemind, and a peer's processes load
only what they use.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import p2p_diloco

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"
HEAVY = (
    "torch", "torch._dynamo", "torch._refs", "hivemind", "hivemind.averaging", "numpy", "scipy", "sympy", "grpc",
    "matplotlib", "p2p_diloco.node.common", "p2p_diloco.net.hivemind",
)  # fmt: skip
FOR_INVITATIONS = "cryptography"
"""What reads an invitation: 8 MB."""


def loaded_after(code: str, *more: str) -> set[str]:
    """Which of the heavy libraries, and of `more`, a new interpreter has loaded after it ran `code`."""
    return loaded_and_told(code, *more)[0]


def loaded_and_told(code: str, *more: str) -> tuple[set[str], str]:
    """The same, and its stderr."""
    full = (
        "import atexit, json, sys\n"
        "@atexit.register\n"
        "def tell():\n"
        f"    print(json.dumps([name for name in {(*HEAVY, *more)!r} if name in sys.modules]), file=sys.stderr)\n"
        f"{code}"
    )
    result = subprocess.run([sys.executable, "-c", full], capture_output=True, text=True, timeout=60)
    *told, loaded = result.stderr.strip().splitlines()
    return set(json.loads(loaded)), "\n".join(told)


LIGHT = (
    "from p2p_diloco import RunConfig, PeerConfig, ConfigError; RunConfig(sync_every=10)",
    "main(['--help'])",
    "main(['join', '--help'])",
    "main(['status', '--help'])",
    "import p2p_diloco.cli.dashboard, p2p_diloco.observe.revise, p2p_diloco.node.privacy, p2p_diloco.cli.replay",
    "main(['bootstrap', '--port', '99999'])",
    "main(['join', '--initial-peers', 'x'])",
    "main(['plan', '--params', '1B', '--bandwidth', '1gbit,1gbit', '--step-time', '1'])",
)


def test_nothing_heavy_is_loaded() -> None:
    """Neither help nor a mistyped address waits for the import of torch."""
    code = (
        "from p2p_diloco.cli import main\n"
        f"for part in {LIGHT!r}:\n"
        "    try:\n        exec(part)\n    except SystemExit:\n        pass\n"
        f"    assert not sys.modules.keys() & {set(HEAVY)!r}, part\n"
    )
    loaded, told = loaded_and_told(code)
    assert loaded == set(), told
    assert "Traceback" not in told


def test_a_commands_start_loads_little_before_it_handles_signals() -> None:
    """Until then ^C would write a traceback."""
    assert loaded_after("import p2p_diloco.cli", "asyncio", "logging") == set()


def test_commands_work_without_the_packages_source() -> None:
    """Only the descriptions of the settings are missing then."""
    code = (
        "import inspect\n"
        "def none(_): raise OSError('could not get source code')\n"
        "inspect.getsource = none\n"
        "from p2p_diloco.cli import main; main(['status', '--help'])"
    )
    assert loaded_and_told(code) == (set(), "")


def test_a_folder_without_text_is_reported_without_loading_torch(tmp_path: Path) -> None:
    """A wrong folder is reported at once."""
    arguments = ["join", "--initial-peers", ADDRESS, "--data", str(tmp_path)]
    loaded, told = loaded_and_told(f"from p2p_diloco.cli import main; main({arguments})")
    assert f"--data={tmp_path} holds 0 bytes of text" in told
    assert loaded == set()


def test_a_bootstrap_needs_nothing_heavy() -> None:
    """A bootstrap serves the DHT and a relay without torch, which would take seconds and most of its memory."""
    code = (
        "import os, signal\n"
        "from p2p_diloco.cli import bootstrap, main\n"
        "bootstrap.announcement = lambda addresses, as_json: os.kill(os.getpid(), signal.SIGINT) or 'served'\n"
        "main(['bootstrap', '--host', '127.0.0.1', '--port', '0'])"
    )
    assert loaded_after(code) == {"hivemind"}


def test_a_wrapped_command_needs_nothing_heavy() -> None:
    """`join -- COMMAND` waits for its command without torch, which the command loads for itself."""
    code = (
        "from p2p_diloco.cli import join, main\n"
        "join.check_initial_peers = lambda *_: None\n"
        f"main(['join', '--initial-peers', {ADDRESS!r}, '--', 'true'])"
    )
    loaded, told = loaded_and_told(code, FOR_INVITATIONS)
    assert "the command ended with exit code 0" in told
    assert loaded == set()


NODE = (
    "import os, socket, sys, uvloop\n"
    "from p2p_diloco.node import __main__ as node\n"
    "uvloop.run = lambda coroutine: coroutine.close()\n"
    "ours, theirs = socket.socketpair()\n"
    "sys.argv = ['', f'--channel-fd={theirs.detach()}', '--memory-fd=0', f'--parent-pid={os.getppid()}']\n"
    "node.main()\n"
    "import p2p_diloco.node.participation\n"
)
"""The node's process, up to its first message."""


def test_a_node_loads_of_torch_and_hivemind_what_it_uses() -> None:
    """A node computes on the CPU and traces no graph, and it doesn't use Hivemind's averager. The classes of outer
    optimizers are found, though what they import needs parts of torch that a node puts off."""
    needed = {"torch", "numpy", "hivemind", "p2p_diloco.node.common", "p2p_diloco.net.hivemind"}
    code = (
        f"{NODE}assert {{name for name in {HEAVY!r} if name in sys.modules}} == {needed!r}\n"
        "from p2p_diloco.tensors.outer import OuterOptimizer\n"
        "for name in ('adam', 'adagrad'): OuterOptimizer(name, lr=0.1)"
    )
    assert loaded_and_told(code)[1] == ""


def test_a_node_that_needs_more_of_torch_gets_it() -> None:
    """The parts that a node leaves out are loaded at the first question for one of their names."""
    code = f"{NODE}assert torch._meta_registrations.register_meta\n".replace("node.main()", "node.main(); import torch")
    assert "torch._refs" in loaded_after(code)


def test_a_trainer_loads_neither_protocol_nor_network() -> None:
    """They are the node's; what reads an invitation is for those who have one. torch._dynamo, which takes a
    second, is loaded by torch's optimizers, not by this package: an aggregator has no optimizer."""
    assert loaded_after("from p2p_diloco import Peer", FOR_INVITATIONS) == {"torch", "numpy", "torch._refs"}


def test_public_names_are_there_and_no_others() -> None:
    """A lazy package still tells a misspelt name from a public one."""
    assert {name for name in p2p_diloco.__all__ if not hasattr(p2p_diloco, name)} == set()
    with pytest.raises(AttributeError, match="Pear"):
        _ = p2p_diloco.Pear  # type: ignore[attr-defined]


def test_hivemind_is_loaded_without_its_unused_parts() -> None:
    """Of Hivemind only the DHT and p2pd's client are loaded, which need no torch. Code that imports Hivemind later
    gets all of it."""
    code = (
        "import sys\n"
        "import p2p_diloco.net.dht\n"
        "assert not {'torch', 'numpy', 'scipy'} & sys.modules.keys()\n"
        "from hivemind import DHT, DecentralizedAverager\n"
        "from hivemind.dht import DHTNode\n"
        "from hivemind.utils import MPFuture\n"
        "assert DHTNode is p2p_diloco.net.dht.DHTNode and DHT.__module__ == 'hivemind.dht.dht'\n"
        "from hivemind.averaging.load_balancing import load_balance_peers\n"
        "assert load_balance_peers(100, [1.0, 1.0]) == (50, 50)\n"
        "assert MPFuture.__module__ == 'hivemind.utils.mpfuture' and MPFuture().cancel()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_programs_filters_of_warnings_are_not_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that makes warnings errors would end the node in a library that warns."""
    from p2p_diloco.peer.node_client import _environment

    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert "PYTHONWARNINGS" not in _environment()


def test_examples_import_what_there_is() -> None:
    """No other test imports all of them."""
    lacking = []
    for file in Path(__file__).parent.parent.glob("examples/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("p2p_diloco"):
                module = importlib.import_module(node.module or "")
                there = {*dir(module), *(path.stem for path in Path(module.__file__ or "").parent.glob("*"))}
                lacking += [f"{file.name}: {node.module}.{one.name}" for one in node.names if one.name not in there]
    assert lacking == []
