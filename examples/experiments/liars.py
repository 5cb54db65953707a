"""Robust means with a liar among four peers: what it contributes, and what it commits as an aggregator."""

from lab import Experiment, main
from setting import Setting

WAYS = {"mean": "mean", "clip": "clip", "centered clip": "centered_clip"}
HEAVY = 2.0**40


def four(aggregation: str = "clip", lie: str = "", weight: float = 1.0) -> Setting:
    """Three honest peers and a fourth one that lies all along."""
    return Setting({"aggregation": aggregation}, peers=4, steps=0.25, lie=lie, lie_weight=weight)


def wrong(times: float, limit: float) -> Setting:
    """Four peers that contribute honestly; one multiplies the means that it aggregates."""
    return Setting({"step_limit": limit}, peers=4, steps=0.25, wrong_mean=times)


EXPERIMENT = Experiment(
    "liars",
    "One of four peers lies in every round",
    {
        "four honest peers": four(),
        "three honest peers": Setting(peers=3, steps=0.25),
        **{
            f"{lie}; {name}": four(way, lie)
            for lie in ("sign flipped", "sign flipped, × 10", "× 1000", "zeros", "noise, × 10")
            for name, way in WAYS.items()
        },
        **{f"sign flipped, high weight; {name}": four(way, "sign flipped", HEAVY) for name, way in WAYS.items()},
        "commits × 1000; no limit": wrong(1000.0, 0.0),
        "commits × 1000; limit 1.25": wrong(1000.0, 1.25),
        "commits sign flipped; limit 1.25": wrong(-1.0, 1.25),
    },
    against="three honest peers",
)

if __name__ == "__main__":
    main(EXPERIMENT)
