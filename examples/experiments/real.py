"""The comparison with data-parallel training once more, with real peers: a check of the runs in virtual time."""

from dataclasses import replace

from lab import AVERAGING, DATA_PARALLEL, Experiment, main
from processes import real
from setting import Setting

EXPERIMENT = Experiment(
    "real",
    "Real processes: two peers beside data-parallel training",
    {
        "data-parallel": replace(DATA_PARALLEL, step_s=(0.0,)),
        "DiLoCo, 0.7/0.9": Setting(step_s=(0.0,)),
        "plain averaging": Setting(AVERAGING, step_s=(0.0,)),
        "e3m0": Setting({"codec": "e3m0"}, step_s=(0.0,)),
    },
    against="data-parallel",
    bounds={"DiLoCo, 0.7/0.9": 1.01},
    make=real,
)

if __name__ == "__main__":
    main(EXPERIMENT)
