"""An asynchronous run of real processes, in few bits: peers are killed, restart from their checkpoints, and join."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from swarm import PROGRAMS, Member, Swarm, until

sys.path.insert(0, str(PROGRAMS))

from counting import amounts

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]

LIVES, NUMEL, SHARDS = 5, 16, 2
CONFIG = {"codec": "int4", "reply_codec": "fp32", "heartbeat_interval": 0.5, "heartbeat_timeout": 5.0}
RESIDUAL = 2.0
"""The largest error of int4 for values up to 17 with a residual: half of a fifteenth of twice the largest, and a
margin."""


def moved(submissions: int) -> tuple[float, float]:
    """How far the first submissions of a life change its two elements."""
    made = [amounts(number) for number in range(submissions)]
    return sum(one for one, _ in made), sum(other for _, other in made)


def test_in_few_bits_nothing_answered_for_is_lost_or_doubled(swarm: Swarm, tmp_path: Path) -> None:
    """θ holds the sums of four-bit submissions of unlike size. Of a life that goes on: all answered ones, except the
    error that its codec keeps. Of a life that was killed: at most one more. A peer that restarts from its checkpoint
    finds its own part there, and its old life's submissions stay counted."""
    disk = {"checkpoint_dir": str(tmp_path / "disk"), "save_every": 3, "identity_path": str(tmp_path / "identity")}

    def start(name: str, life: int, **local: Any) -> Member:
        given = {"life": life, "lives": LIVES, "numel": NUMEL, "shards": SHARDS, "pause_s": 0.02, "settle_s": 2.0}
        return swarm.start(name, "counting.py", config=CONFIG, local=local, **given)

    def answered(member: Member) -> int:
        return len(member.lines("answered"))

    swarm.bootstrap()
    stays = start("stays", 0)
    stays.wait_for("in")
    back, dies = start("back", 1, **disk), start("dies", 2)
    for member in (back, dies):
        until(lambda member=member: answered(member) >= 12, 90.0, f"submissions of {member.name}")
        member.die()
    again, fresh = start("again", 3, **disk), start("fresh", 4)
    for member in (again, fresh):
        until(lambda member=member: answered(member) >= 12, 90.0, f"submissions of {member.name}")
    living = (stays, again, fresh)
    for member in living:
        member.tell("end")
    told = [member.wait_for("theta", 60.0)["values"] for member in living]
    theta = [min(shards, key=sum) for shards in zip(*told, strict=True)]  # the shard's holder has the newest value
    for life, member in enumerate((stays, back, dies, again, fresh)):
        count = answered(member)
        lost, more = moved(count), moved(count + (member not in living))
        for shard in theta:
            for element in (0, 1):
                moved_by = -shard[2 * life + element]
                assert lost[element] - RESIDUAL <= moved_by <= more[element] + RESIDUAL, (member.name, element)
    assert "starting from the checkpoint" in again.log()
    assert "the inner optimizer starts without a saved state" not in again.log()
