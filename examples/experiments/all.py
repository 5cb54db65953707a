"""Makes the missing runs of every experiment, one experiment after the other, and prints the tables."""

import sys
from importlib import import_module
from pathlib import Path

from lab import main

NAMES = (
    "defaults", "parity", "averaging", "cold", "rounds", "replicas", "unlike", "streaming", "bits", "sparse", "drops",
    "churn", "joining", "liars", "real", "unlike_real",
)  # fmt: skip

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for name in NAMES:
        main(import_module(name).EXPERIMENT, sys.argv[1:])
