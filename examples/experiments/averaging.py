"""What the outer momentum gains over the plain average of parameters."""

from lab import AVERAGING, Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "averaging",
    "The mean of the peers' parameters in place of an outer optimizer",
    {
        "0.7/0.9": Setting(),
        "0.7/0.5": Setting({"outer_momentum": 0.5}),
        "plain averaging": Setting(AVERAGING),
        "plain averaging, H = 50": Setting({**AVERAGING, "sync_every": 50}),
    },
    against="0.7/0.9",
    least={"plain averaging": 1.02},
)

if __name__ == "__main__":
    main(EXPERIMENT)
