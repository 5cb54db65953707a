"""Streaming DiLoCo (arXiv 2501.18512): fragments, overlap of τ steps, the share α of local values, and rebasing."""

from lab import Experiment, main
from setting import Setting

TWO = {"num_fragments": 2}

EXPERIMENT = Experiment(
    "streaming",
    "Fragments and overlap, two peers, H = 20",
    {
        "all at once": Setting(),
        "N=2": Setting(TWO),
        "N=2, strided": Setting({**TWO, "fragment_layout": "strided"}),
        "N=2, τ=1, mix 0.5, e3m0": Setting({**TWO, "overlap_steps": 1, "merge_alpha": 0.5, "codec": "e3m0"}),
        "N=2, τ=1, mix 0": Setting({**TWO, "overlap_steps": 1, "merge_alpha": 0.0}),
        "τ=5, mix 0.5": Setting({"overlap_steps": 5, "merge_alpha": 0.5}),
        "τ=5, mix 0": Setting({"overlap_steps": 5, "merge_alpha": 0.0}),
        "τ=5, rebase": Setting({"overlap_steps": 5, "merge": "rebase"}),
        "τ=20, rebase": Setting({"overlap_steps": 20, "merge": "rebase"}),
        "τ=20, rebase, 0.7/0.5": Setting({"overlap_steps": 20, "merge": "rebase", "outer_momentum": 0.5}),
    },
    against="all at once",
    bounds={"N=2": 1.01, "N=2, τ=1, mix 0.5, e3m0": 1.03},
)

if __name__ == "__main__":
    main(EXPERIMENT)
