"""Four real peers of unlike speed: the speeds of `unlike`, an eighth of its time for a step."""

from lab import Experiment, main
from processes import real
from setting import Setting

STEP_S = (0.0725, 0.09375, 0.18875, 0.41625)
DELAYED = {"mode": "async", "dn_buffer_size": 4}


def four(**run: object) -> Setting:
    """Four peers of these speeds, a quarter of an experiment's steps in the mean."""
    return Setting(run, peers=4, step_s=STEP_S, steps=0.25)


EXPERIMENT = Experiment(
    "unlike_real",
    "Four real peers of unlike speed",
    {
        "sync": four(),
        "sync, by time": four(pace="time", sync_every=100),
        "async, DN, DyLU": four(**DELAYED, dylu=True),
        "async, DN, DyLU, 0.7/0.5": four(**DELAYED, dylu=True, outer_momentum=0.5),
    },
    against="sync",
    tells=("time",),
    make=real,
)

if __name__ == "__main__":
    main(EXPERIMENT)
