"""A run of real peers: each a process with a `Peer`, a node and a libp2p daemon of its own, on loopback.

What `swarm` imitates is real here, so a busy machine is slower: `step_s` is the least time of an inner step, and the
times of a run are those of the clock. A run counts only if all peers end with one digest.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from setting import Result, Setting
from task import Learner, Task

from p2p_diloco import Peer, PeerConfig, RunConfig

PATIENT = {"heartbeat_interval": 5.0, "heartbeat_timeout": 300.0}
"""Long enough that a busy machine's peer does not count as dead."""
ROUND_S = 900.0
"""`round_timeout`, which only the synchronous mode has."""
RUN_S = 3600.0


def real(setting: Setting, seed: int, task: Task) -> Result:
    """Make one run. Raises RuntimeError if a peer fails, or their digests differ."""
    with tempfile.TemporaryDirectory() as folder:
        start, log_path = Path(folder, "start.pt"), Path(folder, "log.txt")
        torch.save(task.started(seed, round(setting.warm * task.warm)), start)
        told = {"setting": asdict(setting), "task": asdict(task), "seed": seed, "start": str(start)}
        told["run_id"] = f"experiment-{os.getpid()}-{time.time_ns()}"
        environment = {**os.environ, "XDG_STATE_HOME": folder, "OMP_NUM_THREADS": "1"}
        processes: list[subprocess.Popen[str]] = []
        watch = threading.Timer(RUN_S, lambda: _end(processes))
        watch.start()
        try:
            with log_path.open("w") as log:
                addresses: list[str] = []
                for number in range(setting.peers):
                    values = json.dumps({**told, "number": number, "initial_peers": addresses})
                    command = [sys.executable, __file__, values]
                    pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True, "env": environment}
                    processes.append(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
                    addresses = addresses or next(_said(processes[0]), {}).get("addresses", [])
                    if not addresses:
                        raise RuntimeError(f"the first peer failed:\n{log_path.read_text()[-4000:]}")
                with ThreadPoolExecutor(len(processes)) as pool:
                    said = list(pool.map(lambda process: _heard(process, processes), processes))
            if any(exits := [process.wait() for process in processes]):
                raise RuntimeError(f"the peers' exit codes are {exits}:\n{log_path.read_text()[-4000:]}")
            ends = [lines[-1] for lines in said]
            if len({end["digest"] for end in ends}) != 1:
                raise RuntimeError(f"digests differ: {ends}\n{log_path.read_text()[-4000:]}")
        finally:
            watch.cancel()
            _end(processes)
    sent = sum(end["bytes_sent"] for end in ends)
    return Result(ends[0]["loss"], max(end["time_s"] for end in ends), sent, ())


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _heard(process: subprocess.Popen[str], all_of_them: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """All further lines of a peer, until it ends. If it fails, the others end, too: they would wait for it."""
    lines = list(_said(process))
    if process.wait():
        _end(all_of_them)
    return lines


def _said(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def configured(setting: Setting, samples: int) -> RunConfig:
    """The settings of a real run that ends after so many samples."""
    patient = PATIENT if setting.config.mode == "async" else {**PATIENT, "round_timeout": ROUND_S}
    return RunConfig(**{**setting.config.model_dump(exclude_unset=True), **patient, "stop_after_samples": samples})


def peer(told: dict[str, Any]) -> None:
    """Train in a run until it ends; print a line of JSON after joining, and one at the end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    setting, task, number = Setting(**told["setting"]), Task(**told["task"]), told["number"]
    learner = Learner(task, setting, told["seed"], f"peer{number}")
    learner.model.load_state_dict(torch.load(told["start"], weights_only=True))
    total = round(setting.steps * task.steps) * setting.peers * setting.batch
    config = configured(setting, total)
    local = PeerConfig(run_id=told["run_id"], initial_peers=tuple(told["initial_peers"]), wait_timeout=RUN_S)
    (optimizer, _), *others = learner.optimizers
    if others:
        raise ValueError("a real peer has one inner optimizer")
    period_s = setting.step_s[number % len(setting.step_s)]
    with Peer(learner.model, optimizer, config=config, local=local) as joined:
        _say({"addresses": joined.addresses})
        began = time.monotonic()
        while not joined.finished:
            at = time.monotonic()
            joined.report(samples=setting.batch)
            learner.step(joined.global_step)
            time.sleep(max(0.0, at + period_s - time.monotonic()))
        took_s, digest = time.monotonic() - began, joined.digest
        judge = task.model(told["seed"])
        judge.load_state_dict(joined.global_state_dict())
        loss = task.loss(judge, task.windows)
        end = {"loss": loss if math.isfinite(loss) else math.inf, "time_s": took_s, "digest": digest}
        _say({**end, "bytes_sent": joined.metrics.bytes_sent})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    peer(json.loads(sys.argv[1]))
