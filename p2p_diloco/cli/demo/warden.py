"""`python -m p2p_diloco.cli.demo.warden`: kills a command's processes if the command itself is killed.

Law: reads process ids from stdin, one a line. If that ends without a last line "done", nobody is left to end them,
and so they are killed, each with its process group; a peer's node and daemon follow it by themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

if __name__ == "__main__":
    lines = sys.stdin.read().split()
    if "done" not in lines:
        for pid in lines:
            with contextlib.suppress(OSError):
                os.killpg(int(pid), signal.SIGKILL)
