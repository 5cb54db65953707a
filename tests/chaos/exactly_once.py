"""The aggregator of an asynchronous run is killed again and again under load; then peers' records are compared with θ:
`python tests/chaos/exactly_once.py --minutes 5`.

Every few seconds all processes of the peer that aggregates slice 0 are killed at once, and another peer is started.
Each submission changes elements that belong to its author alone, so θ shows how often it is counted. Every submission
that its author's record has as answered must be counted once. The last submission of a killed peer may be counted, too.
The exit code is 1 if one is missing or counted twice.

Events that the guarantee does not cover are reported, too: a live peer counted as dead, because the machine was too
busy or stood still, and forks. Give `--folder` to keep the logs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))
sys.path.insert(0, str(Path(__file__).parents[1] / "real" / "programs"))

from counting import amounts
from swarm import Member, Swarm, kept_in, until

SETTLE_S = 3.0


class Load:
    """Peers that submit all the time; dead ones are replaced."""

    def __init__(self, swarm: Swarm, peers: int, lives: int, options: dict[str, object]) -> None:
        self.swarm, self.lives, self.options = swarm, lives, {"lives": lives, **options}
        self.members: list[Member] = []
        self.living: list[Member] = []
        for _ in range(peers):
            self.join()

    def join(self) -> None:
        """Start one more peer, if there is an element left for it."""
        if (life := len(self.members)) < self.lives:
            member = self.swarm.start(f"life{life}", "counting.py", life=life, **self.options)
            self.members.append(member)
            self.living.append(member)

    def answered(self) -> dict[str, int]:
        """The peers that train, and how many submissions of each were answered."""
        return {m.name: len(lines) for m in self.living if (lines := m.lines("answered"))}

    def kill(self, patience_s: float) -> str:
        """Kill the peer that aggregates slice 0, once three peers train and each has an answered submission."""
        before = self.answered()
        until(
            lambda: len([n for n, count in self.answered().items() if count > before.get(n, 0)]) >= 3,
            patience_s,
            lambda: f"three that are answered; {before} before, {self.answered()} now",
        )
        trained = [m for m in self.living if m.name in self.answered()]
        holders = [m for m in trained if 0 in m.last("answered")["aggregates"]]
        victim = (holders or trained)[0]
        victim.die()
        self.living.remove(victim)
        self.join()
        return victim.name if holders else f"{victim.name} (no peer aggregated at that moment)"

    def kill_the_unanswered(self) -> None:
        """Kill the peers that have no answered submission yet. Otherwise they would go on while the others end, and be
        answered for what no ended peer's θ has."""
        for member in [m for m in self.living if not m.lines("answered")]:
            member.die()
            self.living.remove(member)


def verdict(load: Load) -> list[str]:
    """The violations, a line each."""
    values = [member.last("theta")["values"] for member in load.living if member.lines("theta")]
    newest = [[min(column) for column in zip(*param, strict=True)] for param in zip(*values, strict=True)]
    wrong = []
    for life, member in enumerate(load.members):
        count = len(member.lines("answered"))
        if any(line["refused"] for line in member.lines("answered")):
            wrong.append(f"{member.name}: something was refused")
        allowed = []
        for extra in (0, 1) if member not in load.living else (0,):
            sent = [amounts(number) for number in range(count + extra)]
            allowed.append(tuple(-float(sum(part)) for part in zip((0, 0), *sent, strict=True)))
        for index, theta in enumerate(newest):
            found = theta[2 * life], theta[2 * life + 1]
            if found not in allowed:
                wrong.append(f"{member.name}, slice {index}: answered for {count}, so one of {allowed}; found {found}")
    return wrong


def beside(load: Load) -> list[str]:
    """Logged events that the guarantee does not cover."""
    words = ("was silent for", "no probe has reached it", "fork:", "mismatch:")
    told = ((m.name, line) for m in load.members for line in m.log().splitlines() if any(w in line for w in words))
    return [f"{name} logged: {line}" for name, line in told]


def main() -> int:
    """Put the run under load, kill, compare."""
    parser = argparse.ArgumentParser(
        description="Kill aggregators under load, and compare answered with counted submissions."
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--peers", type=int, default=5)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--numel", type=int, default=250_000, help="elements of a slice")
    parser.add_argument("--folder", type=Path, help="where the logs stay")
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0, help="seconds")
    asked = parser.parse_args()
    kills = int(asked.minutes * 60 / asked.every)
    config = {"heartbeat_interval": 0.5, "heartbeat_timeout": asked.heartbeat_timeout}
    options = {"slices": asked.slices, "numel": asked.numel, "pause_s": 0.05, "settle_s": SETTLE_S, "config": config}
    with kept_in(asked.folder) as folder, Swarm(folder) as swarm:
        swarm.bootstrap()
        load = Load(swarm, asked.peers, asked.peers + kills, options)
        until(lambda: len(load.answered()) >= min(3, asked.peers), 180.0, "three that are answered")
        began, times = time.monotonic(), [time.monotonic()]
        for number in range(kills):
            time.sleep(max(0.0, times[-1] + asked.every - time.monotonic()))
            who = load.kill(60.0)
            times.append(time.monotonic())
            took, left = times[-1] - times[-2], len(load.answered())
            print(f"kill {number + 1} after {took:.1f} s: {who}; {left} left that train", flush=True)
        took_s = time.monotonic() - began
        load.kill_the_unanswered()
        time.sleep(2.0)
        for member in load.living:
            member.tell("end")
        for member in load.living:
            member.wait_for("theta", 60.0)
        wrong, odd = verdict(load), beside(load)
    answered = sum(len(member.lines("answered")) for member in load.members)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    usual, most = statistics.median(gaps), max(gaps)
    print(f"{len(gaps)} kills in {took_s:.0f} s, one every {usual:.1f} s (median), {most:.1f} s at most")
    print(f"{answered} submissions were answered for, of {len(load.members)} lives, in {asked.slices} slices each")
    print("\n".join(odd) or "no live peer was counted as dead, and there was no fork")
    print("\n".join(wrong) or "each answered submission is counted once")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
