"""Peers that share a data set are killed again and again; then θ is read: has each sample been used once an epoch?
`python tests/chaos/data_once.py --mode sync`.

Every few seconds all processes of one peer are killed at once, and another peer is started in its place; three more
join; one peer is frozen for longer than `heartbeat_timeout` and goes on. When all data is used, the element of each
sample in θ, and that of each inner step, must show that each sample is in as many counted steps as there were epochs.
The exit code is 1 if not. Give `--folder` to keep the logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from once import Once
from swarm import Member, Swarm, kept_in, until

JOINS_S = (15.0, 30.0, 45.0)
"""When further peers join, in seconds after the first step."""


def freeze(member: Member, seconds: float) -> None:
    """Stop all processes of a peer for a while, as a machine that swaps does."""
    for number, wait_s in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for process in member.family():
            with contextlib.suppress(Exception):
                process.send_signal(number)
        time.sleep(wait_s)


def disturb(run: Once, asked: argparse.Namespace, rng: random.Random) -> dict[str, int]:
    """Kill, join and freeze until the data is nearly used up. Returns how often."""
    began, done = time.monotonic(), {"kills": 0, "joins": 0, "freezes": 0}
    end, joins = 0.95 * asked.samples * asked.epochs, list(JOINS_S)
    next_kill = began + asked.every
    while run.used() < end and not any(m.lines("end") for m in run.living):
        time.sleep(0.2)
        now = time.monotonic()
        assert now - began < asked.within, f"only {run.used()} samples are used after {asked.within:g} s"
        if joins and now - began >= joins[0] and len(run.members) < run.lives:
            joins.pop(0)
            run.join()
            done["joins"] += 1
        working = [m for m in run.living if len(m.lines("step")) > 5]
        if now < next_kill or len(working) < 3 or len(run.members) >= run.lives:
            continue
        next_kill = now + asked.every * rng.uniform(0.8, 1.2)
        victim = rng.choice(working)
        if asked.freeze and done["kills"] == 3 and not done["freezes"]:
            freeze(victim, 2 * asked.heartbeat_timeout)
            done["freezes"] += 1
            continue
        run.kill(victim)
        run.join()
        done["kills"] += 1
    return done


def main() -> int:
    """Share data, kill, read θ."""
    parser = argparse.ArgumentParser(description="Kill peers that share a data set, and count the uses in θ.")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--peers", type=int, default=5)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--lives", type=int, default=40, help="the most peers that are ever started")
    parser.add_argument("--freeze", action="store_true", help="freeze a peer once, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within", type=float, default=900.0, help="seconds for all")
    parser.add_argument("--heartbeat-timeout", type=float, default=6.0, help="seconds")
    parser.add_argument("--folder", type=Path, help="where the logs stay")
    asked = parser.parse_args()
    config = {"mode": asked.mode, "sync_every": 20, "start_peers": asked.peers}
    config |= {"heartbeat_interval": 0.5, "heartbeat_timeout": asked.heartbeat_timeout}
    with kept_in(asked.folder) as folder, Swarm(folder) as swarm:
        run = Once(swarm, folder, asked.samples, asked.epochs, asked.lives, config=config, step_s=0.05)
        for _ in range(asked.peers):
            run.join()
        until(lambda: all(m.lines("step") for m in run.living), 180.0, "the first steps")
        began = time.monotonic()
        done = disturb(run, asked, random.Random(asked.seed))
        run.ended(300.0)
        wrong, took_s = run.verdict(), time.monotonic() - began
        drops = sum("the progress of this peer is dropped" in member.log() for member in run.members)
        figures = {**done, "lives": len(run.members), "lost_steps": run.lost(), "dropped": drops}
        print(json.dumps({"mode": asked.mode, "seed": asked.seed, **figures, "took_s": round(took_s)}), flush=True)
        print("\n".join(wrong) or "each sample was used as often as there were epochs", flush=True)
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
