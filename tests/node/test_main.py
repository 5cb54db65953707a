"""The node's process, as it is started."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_the_node_starts_without_docstrings_and_assertions(flag: str) -> None:
    """Some images set PYTHONOPTIMIZE, which drops them; the node inherits it."""
    command = [sys.executable, flag, "-m", "p2p_diloco.node", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
