"""DiLoCo beside data-parallel training at equal tokens, and the plain average of parameters.

The papers: DiLoCo does as well as data-parallel training or better (arXiv 2311.08105), and the outer Nesterov momentum
is what makes rare exchanges pay.
"""

from lab import AVERAGING, DATA_PARALLEL, Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "parity",
    "Two peers beside data-parallel training, from a warm start",
    {
        "data-parallel": DATA_PARALLEL,
        "DiLoCo, 0.7/0.9": Setting(),
        "DiLoCo, 0.7/0.5": Setting({"outer_momentum": 0.5}),
        "plain averaging": Setting(AVERAGING),
    },
    against="data-parallel",
    bounds={"DiLoCo, 0.7/0.9": 1.01},
)

if __name__ == "__main__":
    main(EXPERIMENT)
