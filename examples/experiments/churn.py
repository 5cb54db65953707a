"""Kills all along, each followed by a newcomer, against a quiet run that counts as many tokens."""

from lab import Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "churn",
    "Four peers, H = 20: a kill and a newcomer again and again",
    {
        "quiet": Setting(peers=4, steps=0.5),
        "every 60 s": Setting(peers=4, steps=0.5, kill_every_s=60),
        "every 30 s": Setting(peers=4, steps=0.5, kill_every_s=30),
        "async, quiet": Setting({"mode": "async", "dn_buffer_size": 4}, peers=4, steps=0.5),
        "async, every 30 s": Setting({"mode": "async", "dn_buffer_size": 4}, peers=4, steps=0.5, kill_every_s=30),
    },
    against="quiet",
    bounds={"every 60 s": 1.02, "every 30 s": 1.02},
    tells=("time",),
)

if __name__ == "__main__":
    main(EXPERIMENT)
