"""What it costs to start: `join -- python examples/minimal.py` to its first step, through a bootstrap on loopback.

`python -m tests.cli.startup_cost 5 [FOLDER ...]` prints medians of five starts (least to most) of this checkout, or of
checkouts, which take turns. CPU seconds are those of all processes until the first step. The model has 4,417
parameters, so the memory is that of processes without one. Compile the checkouts first, as pip does
(`python -m compileall -q p2p_diloco`).
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil

ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")


def start(folder: Path) -> dict[str, float]:
    """Start once; returns seconds, CPU seconds and MB, by name."""
    ours = ("P2P_DILOCO_", "OMP_", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment["PYTHONPATH"] = str(folder)
    program = [sys.executable, "-m", "p2p_diloco"]
    serve = [*program, "bootstrap", "--host", "127.0.0.1", "--port", "0"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(serve, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=quiet, text=True) as boot:
        try:
            assert boot.stdout is not None
            address = next(found[0] for line in boot.stdout if (found := ADDRESS.search(line)))
            flags = ["--initial-peers", address, "--sync-every", "50", "--run-id", str(time.time_ns())]
            script = [sys.executable, "examples/minimal.py"]
            return joined([*program, "join", *flags, "--", *script], folder, environment)
        finally:
            boot.send_signal(signal.SIGTERM)


def joined(command: list[str], folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Run `join` until the script tells of its first step."""
    began, quiet = time.monotonic(), subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=quiet, stderr=subprocess.PIPE, text=True
    ) as wrapper:
        everything = psutil.Process(wrapper.pid)
        try:
            assert wrapper.stderr is not None
            told = []
            for line in wrapper.stderr:
                told.append(line)
                if line.startswith("step "):
                    break
            else:
                raise SystemExit("the script made no step:\n" + "".join(told))
            found = {"seconds": time.monotonic() - began}
            processes = [everything, *everything.children(recursive=True)]
            for process in processes:
                process.suspend()
            found |= {f"CPU seconds: {role(one)}": sum(one.cpu_times()[:4]) for one in processes}
            found["CPU seconds: all"] = sum(value for name, value in found.items() if name.startswith("CPU"))
            for one in processes:
                memory = one.memory_full_info()
                found[f"MB resident: {role(one)}"] = memory.rss / 2**20
                found[f"MB of its own: {role(one)}"] = memory.uss / 2**20
            return found
        finally:
            for process in [everything, *everything.children(recursive=True)]:
                process.kill()


def role(process: psutil.Process) -> str:
    """Which process of a peer this is."""
    command = process.cmdline()
    if "p2pd" in command[0]:
        return "p2pd"
    return "node" if "p2p_diloco.node" in command else "wrapper" if "join" in command else "trainer"


def main() -> None:
    """Print the table."""
    repeats, folders = int(sys.argv[1]), [Path(name).resolve() for name in sys.argv[2:] or ["."]]
    found: defaultdict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in folders])
    for _ in range(repeats):
        for place, folder in enumerate(folders):
            for name, value in start(folder).items():
                found[name][place].append(value)
    for name in sorted(found):
        told = (f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in found[name])
        sys.stdout.write(" | ".join([f"{name:24}", *told]) + "\n")


if __name__ == "__main__":
    main()
