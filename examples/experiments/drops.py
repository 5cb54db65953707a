"""Contributions that miss their round: a peer's links are cut for 4 s when it sends, by chance."""

from lab import Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "drops",
    "Four peers, some contributions miss their round",
    {
        "none": Setting(peers=4, steps=0.5),
        "10 %": Setting(peers=4, steps=0.5, drop=0.1),
        "30 %": Setting(peers=4, steps=0.5, drop=0.3),
        "30 %, not carried": Setting({"carry_rounds": 0}, peers=4, steps=0.5, drop=0.3),
    },
    against="none",
    bounds={"30 %": 1.04},
)

if __name__ == "__main__":
    main(EXPERIMENT)
