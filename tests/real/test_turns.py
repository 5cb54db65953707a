"""The asynchronous mode's numbers in real processes: peers submit in turn, and one of them may be killed in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from swarm import Member, Swarm, until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

PLAIN = [-1.9, -4.61, -8.049, -12.1441]
NUMBERS: dict[tuple[int, str], list[float]] = {
    (0, "paper"): PLAIN,
    (2, "paper"): [-0.5, -1.9, -2.4, -4.61, -5.11, -8.049],
    (3, "paper"): [-1 / 3, -2 / 3, -1.9, -1.9 - 1 / 3, -1.9 - 2 / 3, -4.61],
    (2, "buffered"): [-1.0, -2.9, -3.9, -6.61],
    (3, "buffered"): [-1.0, -2.0, -3.9, -4.9, -5.9, -8.61],
}
SOON = (0, "paper")
"""The case of the quick tests; the tests below have others."""


class Turns:
    """Peers that submit when they are told to."""

    def __init__(self, swarm: Swarm, count: int, **options: Any) -> None:
        self.swarm, self.told = swarm, 0
        self.members = [swarm.start(f"p{index}", "turns.py", **options) for index in range(count)]

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

    def leave(self, run: str) -> None:
        for member in self.members:
            self.tell(member, do="leave")
        for member in self.members:
            member.wait_for("out", run=run)

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


@pytest.fixture(scope="module")
def trio(shared_swarm: Swarm) -> Iterator[Turns]:
    """Three peers that play the cases together."""
    shared_swarm.bootstrap()
    return Turns(shared_swarm, 3)


@pytest.mark.parametrize(
    ("size", "variant"), [SOON, *(pytest.param(*case, marks=pytest.mark.chaos) for case in NUMBERS if case != SOON)]
)
def test_submissions_in_turn_reach_the_numbers(trio: Turns, size: int, variant: str) -> None:
    """Three peers in turn: after each submission its author's model has the formula's value, in every shard. Its base
    is the merge after its last submission; plans that first name a successor are epochs, too."""
    run = f"n{size}-{variant}"
    trio.enter(run, dn_buffer_size=size, dn_variant=variant)
    said = [trio.submit(number) for number in range(len(NUMBERS[size, variant]))]
    trio.leave(run)
    for line, expected in zip(said, NUMBERS[size, variant], strict=True):
        assert line["values"] == pytest.approx([expected] * 2, rel=1e-6)
        assert line["refused"] == 0
    assert [line["staleness"] for line in said[3:]] == [2] * (len(said) - 3)


def test_fragments_have_buffers_of_their_own(trio: Turns) -> None:
    """Two fragments take turns in each peer's submissions, N = 2: each has the numbers of its own six submissions. All
    elements change at each step, and a fragment is sent at every second one: the steps are 1 and 0."""
    trio.enter("fragments", num_fragments=2, sync_every=2, dn_buffer_size=2, dn_variant="buffered")
    said = [trio.submit(number, (number // 3 + 1) % 2)["values"] for number in range(12)]
    trio.leave("fragments")
    turns = {0: [0, 1, 2, 6, 7, 8], 1: [3, 4, 5, 9, 10, 11]}
    for fragment, numbers in turns.items():
        found = [said[number][fragment] for number in numbers]
        assert found == pytest.approx([-1.0, -2.9, -3.9, -6.61, -7.61, -11.049], rel=1e-6)


def test_the_numbers_survive_the_aggregator(trio: Turns) -> None:
    """Delayed Nesterov, N = 3, and the aggregator is killed with two submissions in the buffer: the others go on with
    its momentum, its buffer and its counts."""
    trio.enter("killed", dn_buffer_size=3)
    found = []
    for number in range(6):
        if number == 2:
            trio.kill_the_aggregator()
        found.append(trio.submit(number)["values"])
    assert found == [pytest.approx([expected] * 2, rel=1e-6) for expected in NUMBERS[3, "paper"]]


@pytest.mark.chaos
@pytest.mark.parametrize("size", [2, 3])
def test_the_numbers_survive_a_new_aggregator_each_time(swarm: Swarm, size: int) -> None:
    """The aggregator is killed between any two of six submissions, until two peers of seven are left."""
    swarm.bootstrap()
    turns = Turns(swarm, 7)
    turns.enter("killed", dn_buffer_size=size)
    found = [turns.submit(0)["values"]]
    for number in range(1, 6):
        turns.kill_the_aggregator()
        found.append(turns.submit(number)["values"])
    assert found == [pytest.approx([expected] * 2, rel=1e-6) for expected in NUMBERS[size, "paper"]]
