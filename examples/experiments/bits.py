"""What fewer bits on the wire cost. Contributions in 4 bits are said to cost nothing (arXiv 2501.18512)."""

from lab import Experiment, main
from setting import Setting

EXPERIMENT = Experiment(
    "bits",
    "Contributions and means in fewer bits, two peers, H = 20",
    {
        "bf16": Setting(),
        "fp32": Setting({"codec": "fp32"}),
        "int8": Setting({"codec": "int8"}),
        "int4": Setting({"codec": "int4"}),
        "e3m0": Setting({"codec": "e3m0"}),
        "int4 both ways": Setting({"codec": "int4", "reply_codec": "int4"}),
        "e3m0 both ways": Setting({"codec": "e3m0", "reply_codec": "e3m0"}),
    },
    against="bf16",
    bounds={"int8": 1.005, "int4": 1.01, "e3m0": 1.01, "int4 both ways": 1.01, "e3m0 both ways": 1.01},
    tells=("bytes",),
)

if __name__ == "__main__":
    main(EXPERIMENT)
