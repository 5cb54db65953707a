"""Sparse contributions with error feedback, as SparseLoCo sends them, and Muon as the inner optimizer."""

from lab import Experiment, main
from setting import Setting

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}

EXPERIMENT = Experiment(
    "sparse",
    "A 64th of the elements with error feedback, and Muon inside; two peers, H = 20",
    {
        "bf16": Setting(),
        "topk": Setting({"codec": "topk"}),
        "topk, 1/0": Setting({**PLAIN, "codec": "topk"}),
        "1/0": Setting(PLAIN),
        "Muon": Setting(inner="muon"),
        "Muon, 1/0": Setting(PLAIN, inner="muon"),
        "Muon, topk, 1/0": Setting({**PLAIN, "codec": "topk"}, inner="muon"),
    },
    against="bf16",
    tells=("bytes",),
)

if __name__ == "__main__":
    main(EXPERIMENT)
