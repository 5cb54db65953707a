"""What more peers gain, each with as many inner steps as one alone."""

from lab import Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "replicas",
    "1, 2, 4 and 8 peers, 400 inner steps each",
    {
        f"{peers} peer{'s' * (peers > 1)}": Setting(
            {"outer_lr": 1.0, "outer_momentum": 0.0} if peers == 1 else {}, peers=peers, steps=0.5
        )
        for peers in (1, 2, 4, 8)
    },
    against="1 peer",
)

if __name__ == "__main__":
    main(EXPERIMENT)
