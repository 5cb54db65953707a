"""The negative control: without a warm start and with few rounds, 0.7/0.9 loses to data-parallel training.

A momentum of 0.9 averages over ten rounds: with 20 rounds, and the first ones far from the rest, it hurts. The defaults
(outer=auto) begin with averaging.
"""

from dataclasses import replace

from lab import AVERAGING, DATA_PARALLEL, Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "cold",
    "From random weights, 400 steps of two peers, 20 rounds",
    {
        "data-parallel": replace(DATA_PARALLEL, steps=0.5, warm=0.0),
        "0.7/0.9": Setting(steps=0.5, warm=0.0),
        "defaults": Setting({"outer": "auto"}, steps=0.5, warm=0.0),
        "0.7/0.5": Setting({"outer_momentum": 0.5}, steps=0.5, warm=0.0),
        "plain averaging": Setting(AVERAGING, steps=0.5, warm=0.0),
        "0.7/0.9, H = 100": Setting({"sync_every": 100}, steps=0.5, warm=0.0),
    },
    against="data-parallel",
)

if __name__ == "__main__":
    main(EXPERIMENT)
