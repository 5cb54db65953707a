"""Four peers of unlike speed: .58, .75, 1.51 and 3.33 s for an inner step, as in arXiv 2401.09135, in virtual time."""

from lab import Experiment, main
from setting import Setting

STEP_S = (0.58, 0.75, 1.51, 3.33)
DELAYED = {"mode": "async", "dn_buffer_size": 4}
PATIENT = {"heartbeat_interval": 1.0, "heartbeat_timeout": 10.0}
"""The defaults of a run: a peer whose step takes 3.33 s must not count as idle."""


def four(**run: object) -> Setting:
    """Four peers of these speeds; all runs end at the same number of counted tokens."""
    return Setting({**PATIENT, **run}, peers=4, step_s=STEP_S, steps=0.5)


EXPERIMENT = Experiment(
    "unlike",
    "Four peers of unlike speed, in virtual time",
    {
        "sync": four(),
        "sync, by time": four(pace="time", sync_every=100),
        "async, 0.7/0.9": four(mode="async"),
        "async, 0.5/0": four(mode="async", outer_lr=0.5, outer_momentum=0.0),
        "async, DyLU, 0.5/0": four(mode="async", outer_lr=0.5, outer_momentum=0.0, dylu=True),
        "async, DN": four(**DELAYED),
        "async, DN, DyLU": four(**DELAYED, dylu=True),
        "async, DN, DyLU, H = 50": four(**DELAYED, dylu=True, sync_every=50),
        "async, DN, DyLU, 0.7/0.5": four(**DELAYED, dylu=True, outer_momentum=0.5),
        "async, DN, DyLU, no step_limit": four(**DELAYED, dylu=True, step_limit=0.0),
    },
    against="sync",
    bounds={"async, DN, DyLU": 1.05, "async, DN, DyLU, 0.7/0.5": 1.05},
    tells=("time",),
)

if __name__ == "__main__":
    main(EXPERIMENT)
