"""How the number of inner steps between two exchanges, H, changes what is learnt at equal tokens."""

from lab import DATA_PARALLEL, Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "rounds",
    "H inner steps between two exchanges, two peers",
    {
        "data-parallel": DATA_PARALLEL,
        **{f"H = {steps}": Setting({"sync_every": steps}) for steps in (1, 10, 20, 50, 100)},
        "H = 1, 0.7/0": Setting({"sync_every": 1, "outer_momentum": 0.0}),
        "H = 100, 0.7/0.5": Setting({"sync_every": 100, "outer_momentum": 0.5}),
    },
    against="data-parallel",
)

if __name__ == "__main__":
    main(EXPERIMENT)
