"""How the number of inner steps between two exchanges, H, changes what is learnt at equal tokens."""

from lab import DATA_PARALLEL, Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "rounds",
    "H inner steps between two exchanges, two peers",
    {
        "data-parallel": DATA_PARALLEL,
        "H = 1": Setting({"sync_every": 1}),
        "H = 10": Setting({"sync_every": 10}),
        "H = 20": Setting(),
        "H = 50": Setting({"sync_every": 50}),
        "H = 100": Setting({"sync_every": 100}),
        "H = 1, 0.7/0": Setting({"sync_every": 1, "outer_momentum": 0.0}),
        "H = 100, 0.7/0.5": Setting({"sync_every": 100, "outer_momentum": 0.5}),
    },
    against="data-parallel",
)

if __name__ == "__main__":
    main(EXPERIMENT)
