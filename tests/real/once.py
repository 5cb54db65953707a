"""A run in which each sample must be used once an epoch, while peers die and come; and the judge, who reads θ alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from swarm import Member, Swarm, until

BATCH, TICKS = 25, 2000


class Once:
    """Peers that share one data set. `lives`: the most that ever start."""

    def __init__(self, swarm: Swarm, folder: Path, samples: int, epochs: int, lives: int, **options: Any) -> None:
        self.swarm, self.folder, self.samples, self.epochs, self.lives = swarm, folder, samples, epochs, lives
        self.options, self.members, self.living = options, list[Member](), list[Member]()
        swarm.bootstrap()

    def join(self) -> Member:
        """Start one more peer."""
        life = len(self.members)
        assert life < self.lives
        of = {"samples": self.samples, "epochs": self.epochs, "lives": self.lives, "ticks": TICKS, "batch": BATCH}
        out = str(self.folder / f"theta-{life}.npy")
        member = self.swarm.start(f"life{life}", "samples.py", life=life, out=out, **of, **self.options)
        self.members.append(member)
        self.living.append(member)
        return member

    def used(self) -> int:
        """How many samples the swarm has used, as far as a live peer knows."""
        return max((m.last("step")["used"] for m in self.living if m.lines("step")), default=0)

    def reaches(self, used: int, within_s: float) -> None:
        """Wait until so many samples are used, or a peer has seen the end."""
        ended = lambda: any(m.lines("end") for m in self.living)  # noqa: E731
        until(lambda: self.used() >= used or ended(), within_s, lambda: f"{used} samples used, not {self.used()}")

    def kill(self, member: Member) -> None:
        """Kill all processes of a peer."""
        member.die()
        self.living.remove(member)

    def ended(self, within_s: float) -> None:
        """Wait until all live peers that have come in have seen the end of the data. Then the others are too late."""
        inside = lambda: [m for m in self.living if m.lines("in")]  # noqa: E731
        done = lambda: [m for m in inside() if m.lines("theta")]  # noqa: E731
        until(lambda: bool(inside()) and done() == inside(), within_s, lambda: f"the end on all of {len(inside())}")
        for member in [m for m in self.living if not m.lines("theta")]:
            self.kill(member)

    # -- the judge

    def verdict(self) -> list[str]:
        """What is wrong, by θ as the live peers hold it: a line each."""
        thetas = [np.load(self.folder / f"theta-{self.members.index(m)}.npy") for m in self.living]
        theta = min(thetas, key=lambda values: float(values.sum()))  # the newest has the most in it
        if len(theta) != self.samples + self.lives * TICKS:
            return ["θ has another length"]
        uses, sums, wrong = np.zeros(self.samples, int), np.zeros(self.samples), list[str]()
        made = np.zeros(self.lives * TICKS, bool)
        for life, member in enumerate(self.members):
            for line in member.lines("step"):
                at = life * TICKS + line["tick"]
                made[at] = True
                value = float(theta[self.samples + at])
                uses[line["batch"]] += value < -1e-3
                sums[line["batch"]] += value
        marks = theta[self.samples :]
        if strange := np.flatnonzero(~made & (marks != 0)).tolist():
            wrong.append(f"steps are counted that no peer made: {strange}")
        counted = marks[marks < -1e-3]
        shares = 1 / counted
        if self.options["config"].get("mode") == "async":
            shares = np.where(counted == -1, -1, 0.5)  # a commit counts one submission: anything else is wrong
        if not np.allclose(shares, np.round(shares), atol=1e-2):
            wrong.append(f"steps are counted in part, or more than once: {sorted(set(counted.tolist()))[:9]}")
        if not np.allclose(sums, theta[: self.samples], atol=1e-3):
            wrong.append("the elements of some samples are not those of the steps that used them")
        if (uses != self.epochs).any():
            wrong.append(f"of {self.samples} samples, by number of counted uses: {dict(Counter(uses.tolist()))}")
        return wrong

    def lost(self) -> int:
        """How many steps were made and not counted: those of the dead, and dropped ones."""
        theta = np.load(self.folder / f"theta-{self.members.index(self.living[0])}.npy")
        ids = [life * TICKS + line["tick"] for life, m in enumerate(self.members) for line in m.lines("step")]
        return int((np.abs(theta[self.samples + np.array(ids)]) < 1e-3).sum())
