"""The asynchronous mode's numbers in real processes: peers submit in turn, and one of them may be killed in between."""

from __future__ import annotations

import json
from typing import Any

import pytest
from swarm import Member, Swarm, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

NUMBERS = [-1 / 3, -2 / 3, -1.9, -1.9 - 1 / 3, -1.9 - 2 / 3, -4.61]
"""Delayed Nesterov with a buffer of three: the models after six submissions in turn."""


class Turns:
    """Peers that submit when they are told to."""

    def __init__(self, swarm: Swarm, count: int) -> None:
        self.members = [swarm.start(f"p{index}", "turns.py") for index in range(count)]

    def tell(self, member: Member, **command: Any) -> None:
        member.tell(json.dumps(command))

    def enter(self, run: str, elements: int = 2, **config: Any) -> None:
        common = {"mode": "async", "sync_every": 1, "codec": "fp32", "outer_lr": 1.0, "shard_elements": 1}
        settings = {**common, "heartbeat_interval": 0.5, "heartbeat_timeout": 30.0, **config}
        for member in self.members:
            self.tell(member, do="enter", run=run, elements=elements, config=settings)
        for member in self.members:
            member.wait_for("in", run=run)
        until(lambda: all(self.where(m)["peers"] == len(self.members) for m in self.members), 60.0, "all have met")

    def where(self, member: Member) -> dict[str, Any]:
        return self._ask(member, "where", do="where")

    def submit(self, index: int, delta: float = 1.0) -> dict[str, Any]:
        return self._ask(self.members[index % len(self.members)], "submitted", do="submit", delta=delta)

    def kill_the_aggregator(self) -> None:
        """Kill all processes of the peer that would write the next commit of shard 0."""
        holder: list[Member] = []

        def found() -> bool:
            holder.extend(member for member in self.members if 0 in self.where(member)["aggregates"])
            return bool(holder)

        until(found, 60.0, "a peer that aggregates")
        holder[0].die()
        self.members.remove(holder[0])

    def _ask(self, member: Member, answer: str, **command: Any) -> dict[str, Any]:
        known = len(member.lines(answer))
        self.tell(member, **command)
        until(lambda: len(member.lines(answer)) > known or member.process.poll() is not None, 60.0, member.log)
        assert member.process.poll() is None, member.log()
        return member.lines(answer)[known]


def test_the_numbers_survive_the_aggregator(swarm: Swarm) -> None:
    """The aggregator is killed with two submissions in the buffer: the others go on with its momentum, its buffer and
    its counts. After each submission its author's model has the formula's value, in every shard."""
    swarm.bootstrap()
    trio = Turns(swarm, 3)
    found = []
    trio.enter("killed", dn_buffer_size=3)
    for number in range(len(NUMBERS)):
        if number == 2:
            trio.kill_the_aggregator()
        found.append(trio.submit(number)["values"])
    assert found == [pytest.approx([expected] * 2, rel=1e-6) for expected in NUMBERS]
