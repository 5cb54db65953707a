"""How much peers gain in a real run: `python tests/chaos/learning.py`.

For each seed three peers (`p2p-diloco join` with the built-in trainer and its defaults, the first one with a warm
start) train through a bootstrap on loopback, and then one peer alone, with the same warm start and as many inner steps
as each of them. Prints one line of JSON for each seed, then means and spreads of the held-out losses. The exit code is
1 if the gain is not larger than the spread over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from swarm import Member, Swarm, kept_in, until

from p2p_diloco.cli.demo import WHOLE_STEPS

SYNC_EVERY, WARM_START, SEEDS = 20, 100, 3
TRAINER = {"eval_batches": 64, "eval_every_epochs": 1000, "threads": 1}


def joined(swarm: Swarm, name: str, flags: dict[str, object]) -> Member:
    """Start one more peer of the run as a user does."""
    words = [part for key, value in flags.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    joining = ["-m", "p2p_diloco", "join", "--initial-peers", swarm.addresses[0], "--name", name, "--summary-json"]
    return swarm.launch(name, [*joining, *words])


def ended(member: Member) -> dict[str, float]:
    """The summary of a peer that ended without error."""
    assert member.status(3600.0) == 0, member.log()
    return dict(member.said[-1])


def measure(seed: int, epochs: int) -> dict[str, object]:
    """Both losses of one seed."""
    run = {"sync_every": SYNC_EVERY, "stop_after_epochs": epochs}
    trainer = {**TRAINER, "seed": seed}
    with kept_in(None) as folder, Swarm(folder) as swarm:
        swarm.bootstrap()
        first = joined(swarm, "first", {**run, "start_peers": 3, **trainer, "warm_start": WARM_START})
        ready = lambda: "founded the run" in first.log() or first.process.poll() is not None  # noqa: E731
        until(ready, 300.0, "the first peer to found the run")
        others = [joined(swarm, name, trainer) for name in ("second", "third")]
        together = [ended(member) for member in (first, *others)]
        apart = {**run, **WHOLE_STEPS, **trainer, "run_id": "alone", "warm_start": WARM_START}
        alone = ended(joined(swarm, "alone", apart))
    assert len({end["digest"] for end in together}) == 1
    assert {end["steps"] for end in (*together, alone)} == {epochs * SYNC_EVERY}
    losses = {"together": together[0]["val_loss"], "alone": alone["val_loss"]}
    return {"seed": seed, "inner_steps": alone["steps"], **losses}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Compare three real peers with one alone.")
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    told = []
    for seed in range(SEEDS):
        told.append(measure(seed, epochs))
        print(json.dumps(told[-1]), flush=True)
    means, spreads = {}, {}
    for who in ("alone", "together"):
        losses = [float(str(one[who])) for one in told]
        means[who], spreads[who] = statistics.mean(losses), statistics.stdev(losses)
        print(f"{who:8}: {means[who]:.3f} ± {spreads[who]:.3f} nats a byte on held-out text")
    return int(means["alone"] - means["together"] <= max(spreads.values()))


if __name__ == "__main__":
    sys.exit(main())
