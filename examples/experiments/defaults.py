"""What a run's defaults (outer=auto) are worth beside one peer alone, plain averaging and 0.7/0.9.

Each row's runs make as many inner steps a peer. From random weights the first outer steps must not hurt; from a warm
start, and with more rounds, momentum must pay.
"""

from typing import Any

from lab import AVERAGING, Experiment, main
from setting import Setting

OUTER: dict[str, dict[str, Any]] = {"plain averaging": AVERAGING, "0.7/0.9": {}, "defaults": {"outer": "auto"}}


def rows(told: str, *, every: int = 20, peers: int = 2, steps: float = 0.5, warm: float = 0.0) -> dict[str, Setting]:
    """One peer alone, and some peers with each kind of outer step."""
    alone = {f"{told}: alone": Setting(AVERAGING, peers=1, steps=steps, warm=warm)}
    return alone | {
        f"{told}: {name}": Setting({"sync_every": every, **outer}, peers=peers, steps=steps, warm=warm)
        for name, outer in OUTER.items()
    }


EXPERIMENT = Experiment(
    "defaults",
    "The outer step of a run's defaults",
    {
        **rows("cold, 6 rounds", steps=0.15),
        **rows("cold, 20 rounds"),
        **rows("cold, H = 5, 24 rounds", every=5, steps=0.15),
        **rows("cold, H = 100, 8 rounds", every=100, steps=1.0),
        **rows("cold, 3 peers, 20 rounds", peers=3),
        **rows("cold, 4 peers, 40 rounds", peers=4, steps=1.0),
        **rows("warm, 20 rounds", warm=1.0),
        **rows("warm, 3 peers, 20 rounds", peers=3, warm=1.0),
        **rows("warm, 100 rounds", warm=1.0, steps=2.5),
    },
    against="alone",
)

if __name__ == "__main__":
    main(EXPERIMENT)
