"""What a setting costs in held-out loss, beside data-parallel training: real runs of two peers, compared by seed.

Each run is two processes as a user would write them: a `Peer`, with a node and a libp2p daemon of its own, trains the
built-in model. All runs of a seed start from one model, which was trained for some data-parallel steps and saved, and
draw the same text. So two runs differ only in their setting, and the quotient of their losses is its cost.

The data-parallel run is one peer alone whose batch is that of two, and whose outer step takes over what it has
trained: each of its inner steps is a step of AdamW on both peers' share of samples.

python examples/parity.py --folder parity                        # every setting, seeds 0, 1 and 2: over an hour
python examples/parity.py --folder parity --against data-parallel --settings data-parallel bf16 averaging
python examples/parity.py --folder parity --settings bf16 e3m0   # only these; bf16 is the baseline
python examples/parity.py --folder parity --table                # only the table

A run leaves one line of JSON in parity/results.jsonl; a second call makes only the missing runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from p2p_diloco import Peer, PeerConfig, RunConfig
from p2p_diloco.trainer.blocks import load_text
from p2p_diloco.trainer.config import TrainerConfig
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.progress import Progress
from p2p_diloco.trainer.text import Batches, held_out_batches, training_part
from p2p_diloco.trainer.train import new_optimizer, train, warm_start

PEERS, SYNC_EVERY = 2, 20
DATA_PARALLEL = "data-parallel"
AVERAGING = {"outer_lr": 1.0, "outer_momentum": 0.0}
WINDOWS = {"count": 64, "batch_size": 16}  # held-out: 1024
BASELINE = "bf16"
OVERLAP = {"overlap_steps": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "e3m0": {"codec": "e3m0"},
    "int8": {"codec": "int8"},
    "N=2": {"num_fragments": 2},
    "N=2, τ=1, mix 0.5, e3m0": {"num_fragments": 2, "overlap_steps": 1, "merge_alpha": 0.5, "codec": "e3m0"},
    "int4": {"codec": "int4"},
    "e3m0 both ways": {"codec": "e3m0", "reply_codec": "e3m0"},
    "int4 both ways": {"codec": "int4", "reply_codec": "int4"},
    "τ=5, mix 0.5": {**OVERLAP, "merge_alpha": 0.5},
    "τ=5, mix 0": {**OVERLAP, "merge_alpha": 0.0},
    "τ=5, rebase": {**OVERLAP, "merge": "rebase"},
    "lr 0.4": {"outer_lr": 0.4},
    "τ=5, mix 0.5, lr 0.4": {**OVERLAP, "merge_alpha": 0.5, "outer_lr": 0.4},
    "τ=5, rebase, lr 0.4": {**OVERLAP, "merge": "rebase", "outer_lr": 0.4},
    "N=2, τ=1, mix 0.5": {"num_fragments": 2, "overlap_steps": 1, "merge_alpha": 0.5},
    "N=2, τ=1, mix 0": {"num_fragments": 2, "overlap_steps": 1, "merge_alpha": 0.0},
    DATA_PARALLEL: {**AVERAGING, "codec": "fp32"},
    "averaging": AVERAGING,
    "H=10": {"sync_every": 10},
    "H=50": {"sync_every": 50},
    "H=100": {"sync_every": 100},
}
"""What differs from a run of bf16, by name."""
FEW_BITS = dict.fromkeys(("e3m0", "int4", "e3m0 both ways", "int4 both ways", "N=2"), 1.01)
WANTED = {BASELINE: {**FEW_BITS, "int8": 1.005, "N=2, τ=1, mix 0.5, e3m0": 1.03}, DATA_PARALLEL: {BASELINE: 1.01}}
"""The largest loss that a setting may have, relative to that of another one."""
PATIENT = {"heartbeat_interval": 5.0, "heartbeat_timeout": 900.0, "round_timeout": 3600.0}
"""Long enough that a busy or stopped machine does not count as a dead peer: a run counts only if both peers took part
in each round."""
RUN_S = 7200.0


# -- one peer's process


def peer(told: Mapping[str, Any]) -> None:
    """Train in a run until it ends; print a line of JSON after joining, and one at the end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    config = TrainerConfig(batch_size=told["batch_size"], seed=told["seed"], eval_every_epochs=10**6)
    text, key = load_text(), f"peer{told['index']}"
    model = GPT(GPTConfig(seed=config.seed))
    model.load_state_dict(torch.load(told["start"], weights_only=True))
    batches = draw(training_part(text), config, key)
    judged = list(held_out_batches(text, context=config.context, **WINDOWS)) if told["index"] == 0 else []
    optimizer = new_optimizer(model, config)
    local = PeerConfig(run_id=told["run_id"], initial_peers=tuple(told["initial_peers"]), name=key, wait_timeout=3600.0)
    with Progress() as progress:
        with Peer(model, optimizer, config=RunConfig(**told["config"]), local=local) as joined:
            say({"addresses": joined.addresses})
            train(model, optimizer, joined, batches, judged, config, progress)
            progress.digest = joined.digest
        say(progress.summary("finished"))


def draw(content: torch.Tensor, config: TrainerConfig, key: str) -> Batches:
    """Random batches that depend only on seed and key."""
    return Batches(content, batch_size=config.batch_size, context=config.context, seed=config.seed, key=key)


def say(line: object) -> None:
    """Print to stdout at once."""
    sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
    sys.stdout.flush()


# -- one run


def starting_point(asked: argparse.Namespace, seed: int) -> Path:
    """The file with the model from which a seed's runs start; trained now if it is missing.

    A step with as many samples as all peers together is one of their data-parallel steps.
    """
    path: Path = asked.folder / f"start-{seed}-{asked.warm_start}x{PEERS * asked.batch_size}.pt"
    if not path.exists():
        config = TrainerConfig(batch_size=PEERS * asked.batch_size, seed=seed)
        model = GPT(GPTConfig(seed=seed))
        warm_start(model, draw(training_part(load_text()), config, "warm start"), asked.warm_start, config)
        part = path.with_suffix(".part")
        torch.save(model.state_dict(), part)
        part.replace(path)
    return path


def measured(asked: argparse.Namespace, setting: str, seed: int) -> dict[str, Any]:
    """One run; raises RuntimeError unless all peers took part in all of its rounds and hold the same state."""
    began, peers = time.time(), 1 if setting == DATA_PARALLEL else PEERS
    config = {"sync_every": SYNC_EVERY, "start_peers": peers, **PATIENT, **SETTINGS[setting]}
    config["stop_after_epochs"] = epochs = asked.steps // config["sync_every"]
    told = {"seed": seed, "batch_size": asked.batch_size * PEERS // peers, "start": str(starting_point(asked, seed))}
    told |= {"config": config, "run_id": f"parity-{os.getpid()}-{time.time_ns()}"}
    ends: list[dict[str, Any]] = []
    with (asked.folder / "log.txt").open("ab") as log:
        processes: list[subprocess.Popen[str]] = []
        lines: list[Iterator[Any]] = []
        watch = threading.Timer(RUN_S, lambda: end(processes))
        watch.start()
        try:
            addresses: list[str] = []
            for index in range(peers):
                values = json.dumps({**told, "index": index, "initial_peers": addresses})
                command = [sys.executable, __file__, "--peer", values]
                environment = {**os.environ, "XDG_STATE_HOME": str(asked.folder.resolve() / "state")}
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
                processes.append(process)
                lines.append(said(process))
                addresses = addresses or next(lines[index])["addresses"]
            for line in lines[1:]:
                next(line)
            ends = [next(line) for line in lines]
            if any(process.wait() for process in processes):
                raise RuntimeError("a peer failed at its end")
        finally:
            watch.cancel()
            end(processes)
    rounds = epochs * SETTINGS[setting].get("num_fragments", 1)
    if {end["rounds"] for end in ends} != {rounds} or len({end["digest"] for end in ends}) != 1:
        raise RuntimeError(f"not every round had all peers: {ends}")
    result = {"val_loss": ends[0]["val_loss"], "inner_steps": [end["steps"] for end in ends], "rounds": rounds}
    result |= {"bytes_sent": sum(end["bytes_sent"] for end in ends), "digest": ends[0]["digest"]}
    return {**identity(asked, setting, seed), **result, "seconds": round(time.time() - began, 1)}


def end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kill the processes that have not ended; their nodes end with them."""
    for process in processes:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[str]) -> Iterator[Any]:
    """The lines of JSON that a peer printed; RuntimeError if one is missing."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)
    raise RuntimeError(f"a peer ended with status {process.wait()}: see log.txt")


# -- the series


def identity(asked: argparse.Namespace, setting: str, seed: int) -> dict[str, Any]:
    """The settings that identify a run."""
    sizes = {"steps": asked.steps, "warm_start": asked.warm_start, "batch_size": asked.batch_size}
    return {"setting": setting, "seed": seed, **sizes}


def found(asked: argparse.Namespace, setting: str) -> dict[int, dict[str, Any]]:
    """The finished runs of a setting, by seed."""
    path, runs = asked.folder / "results.jsonl", {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        line = json.loads(text) if text.endswith("}") else {}  # an incomplete line has no end
        if line and line == line | identity(asked, setting, line["seed"]):
            runs[line["seed"]] = line
    return runs


def series(asked: argparse.Namespace) -> int:
    """Make the missing runs; return how many failed."""
    failed = 0
    for setting in asked.settings:
        for seed in range(asked.seeds):
            if seed in found(asked, setting):
                continue
            try:
                line = measured(asked, setting, seed)
            except (RuntimeError, StopIteration) as error:
                failed += 1
                sys.stderr.write(f"{setting}, seed {seed}: {error}\n")
                continue
            with (asked.folder / "results.jsonl").open("a", encoding="utf-8") as results:
                results.write("\n" + json.dumps(line, ensure_ascii=False))  # ends an incomplete line, too
            if asked.json:
                say(line)
    return failed


def table(asked: argparse.Namespace) -> Iterator[str]:
    """Rows of docs/results.md: losses by seed, and how much higher they are than those of another setting."""
    base, seeds = found(asked, asked.against), " | ".join(f"seed {seed}" for seed in range(asked.seeds))
    yield f"| setting | {seeds} | mean | against {asked.against} | bound |"
    yield "|---" * (asked.seeds + 4) + "|"
    for setting in asked.settings:
        runs = found(asked, setting)
        losses = {seed: runs[seed]["val_loss"] for seed in range(asked.seeds) if seed in runs}
        if not losses:
            continue
        quotients = [loss / base[seed]["val_loss"] for seed, loss in losses.items() if seed in base]
        cells = [f"{losses[seed]:.4f}" if seed in losses else "" for seed in range(asked.seeds)]
        cells += [told_with_spread(list(losses.values()), "{:.3f}", 1.0)]
        cells += [
            "" if setting == asked.against else told_with_spread([q - 1 for q in quotients], "{:+.2f}", 100.0) + " %"
        ]
        bound = WANTED[asked.against].get(setting)
        missed = bound is not None and bool(quotients) and statistics.mean(quotients) > bound
        cells += ["" if bound is None else f"{100 * (bound - 1):+.1f} %" + (", **missed**" if missed else "")]
        yield f"| {setting} | {' | '.join(cells)} |"


def told_with_spread(values: Sequence[float], form: str, unit: float) -> str:
    """Mean ± standard deviation."""
    if not values:
        return ""
    spread = " ± " + form.format(unit * statistics.stdev(values)).lstrip("+") if len(values) > 1 else ""
    return form.format(unit * statistics.mean(values)) + spread


def main() -> int:
    """The runs, then the table."""
    parser = argparse.ArgumentParser(description="What a setting costs in held-out loss.")
    parser.add_argument("--folder", type=Path, default=Path("parity"), help="for results, starting points and logs")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--against", default=BASELINE, choices=WANTED, help="the setting that others are compared with")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    parser.add_argument("--steps", type=int, default=1200, help="inner steps of each peer")
    parser.add_argument("--warm-start", type=int, default=400, help="data-parallel steps before the run")
    parser.add_argument("--batch-size", type=int, default=16, help="batch size of each peer")
    parser.add_argument("--table", action="store_true", help="make no run")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each run instead of the table")
    parser.add_argument("--peer", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.peer is not None:
        peer(asked.peer)
        return 0
    torch.set_num_threads(1)
    asked.folder.mkdir(parents=True, exist_ok=True)
    failed = 0 if asked.table else series(asked)
    if not asked.json:
        sys.stdout.writelines(row + "\n" for row in table(asked))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
