"""The node's process, as it is started, and how it uses memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_the_node_starts_without_docstrings_and_assertions(flag: str) -> None:
    """Some images set PYTHONOPTIMIZE, which drops them; the node inherits it."""
    command = [sys.executable, flag, "-m", "p2p_diloco.node", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")


PROGRAM = """
import resource
from p2p_diloco.node.__main__ import _keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        [bytearray(24 << 20) for _ in range(5)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

_keep_freed_memory()
faults()
print(faults())
"""
PAGES = 20 * (24 << 20) // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's setting")
def test_freed_memory_is_used_again() -> None:
    """A node uses the memory of one slice's work for the next one's. Buffers of 24 MiB, five at a time, take hardly any
    new pages from the kernel once there were as many."""
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert int(told.stdout) < PAGES / 100
