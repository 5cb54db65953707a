"""Newcomers in the middle of a run: the loss at the end, at equal counted tokens."""

from lab import Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "joining",
    "Newcomers in a run of two peers, H = 20, at equal tokens",
    {
        "nobody joins": Setting(steps=0.5),
        "one at a third": Setting(steps=0.5, joins=(0.33,)),
        "two at a third": Setting(steps=0.5, joins=(0.33, 0.33)),
        "one at two thirds": Setting(steps=0.5, joins=(0.67,)),
    },
    against="nobody joins",
)

if __name__ == "__main__":
    main(EXPERIMENT)
