"""What is asked for lightly comes lightly: help, settings and errors load neither torch nor hivemind."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import p2p_diloco

HEAVY = ("torch", "hivemind", "numpy", "grpc", "matplotlib")


def loaded_after(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after running `code`."""
    full = (
        "import atexit, json, sys\n"
        "@atexit.register\n"
        "def tell():\n"
        f"    print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr)\n"
        f"{code}"
    )
    result = subprocess.run([sys.executable, "-c", full], capture_output=True, text=True, timeout=60)
    return set(json.loads(result.stderr.strip().splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import p2p_diloco",
        "from p2p_diloco import RunConfig, PeerConfig, ConfigError; RunConfig(sync_every=10)",
        "from p2p_diloco.cli import main; main(['--help'])",
        "from p2p_diloco.cli import main; main(['join', '--help'])",
        "from p2p_diloco.cli import main; main(['status', '--help'])",
        "from p2p_diloco.cli import main; main(['bootstrap', '--port', '99999'])",
        "from p2p_diloco.cli import main; main(['join', '--initial-peers', 'x'])",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    """Neither help nor a mistyped address waits for a deep learning library."""
    assert loaded_after(code) == set()


def test_the_probe_sees_a_heavy_library() -> None:
    """The test above could fail: a library that is loaded is reported."""
    assert "numpy" in loaded_after("import numpy")


def test_unknown_names_are_attribute_errors() -> None:
    """A lazy package still tells a misspelt name from a public one."""
    with pytest.raises(AttributeError, match="Pear"):
        _ = p2p_diloco.Pear  # type: ignore[attr-defined]


def test_every_public_name_can_be_fetched() -> None:
    """No name is promised that its home doesn't have."""
    assert {name for name in p2p_diloco.__all__ if not hasattr(p2p_diloco, name)} == set()
