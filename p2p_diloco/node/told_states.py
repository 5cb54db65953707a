"""How a state is written: its roll, one row for each member, and no plan, because that follows from the roll.

Law: pure. So the most that a donor can lie about a plan is which members are candidates that missed many commits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from p2p_diloco.core.leases import Table
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.fragments.messages import Links
from p2p_diloco.fragments.plan import SPARE_EPOCHS, Member, Plan, plan_after
from p2p_diloco.fragments.state import State, founding
from p2p_diloco.node import forms as f
from p2p_diloco.node.fields import COUNT, KEY, written
from p2p_diloco.node.forms import About, Form, Unfit


@dataclass(frozen=True, slots=True)
class Row:
    """A member of a told roll. `grant`: None if it is the member itself."""

    peer: str
    id: ContributionId
    epoch: int
    led: int
    link: float = 0.0
    reachable: bool = True
    grant: str | None = None
    gone: bool = False
    behind: tuple[str, int, int] = ("", 0, 0)


@dataclass(frozen=True, slots=True)
class Stated:
    """A state. Its plan follows from its roll and from `candidates`: the least number of candidates before that gives
    this plan; and from the `successors` that an asynchronous leader chose."""

    version: Version
    roll: tuple[Row, ...]
    links: Links
    successors: tuple[str, ...]
    candidates: int
    buffered: int
    revision: Revision
    paced: tuple[int, int]
    tables: tuple[Table, ...]
    key: str
    hashes: tuple[str, ...]


ROW = written(Row, gone=f.FLAG, behind=f.pair(f.NAMED, COUNT, COUNT))
STATED = written(Stated, roll=f.several(ROW), key=KEY)


def _write_state(state: State, about: About) -> Any:
    rows = tuple(
        Row(peer, member.id, member.epoch, member.led, member.link, member.reachable,
            None if member.grant == peer else member.grant, member.gone, member.behind)
        for peer, member in sorted(state.roll.items())
    )  # fmt: skip
    line = state.plan.succession
    missed = max((state.version.epoch - state.roll[peer].epoch for peer in line if peer in state.roll), default=0)
    of = max(0, missed - SPARE_EPOCHS), state.buffered, state.revision, state.paced, state.tables, state.key
    successors = line[: state.plan.named] if about.rules.asynchronous else ()
    return STATED.write(Stated(state.version, rows, state.links, successors, *of, state.hashes), about)


def _read_state(value: Any, about: About) -> State:
    told: Stated = STATED.read(value, about)
    roll = {
        row.peer: Member(row.id, row.epoch, row.led, row.link, row.reachable,
                         row.peer if row.grant is None else row.grant, row.gone, row.behind)
        for row in told.roll
    }  # fmt: skip
    if not roll or len(roll) != len(told.roll):
        raise Unfit("its roll is empty, or names a member twice")
    of = told.buffered, told.revision, told.paced, told.tables, told.key, told.hashes
    state = State(about.fragment, told.version, roll, Plan((), ()), told.links, *of)
    return replace(state, plan=_plan_of(state, told, about.rules))


def _plan_of(state: State, told: Stated, rules: Rules) -> Plan:
    """Return the plan that follows from a state."""
    epoch, fragment, roll = state.version.epoch, state.fragment, state.roll
    if not epoch:
        founder = min(roll)
        return founding(fragment, state.version, founder, len(rules.fragments[fragment])).plan
    counted = [peer for peer, member in roll.items() if member.epoch == epoch]
    if not rules.asynchronous and not counted:
        raise Unfit("its roll names nobody whom the last commit counts")
    return plan_after(rules, fragment, epoch, roll, counted, told.candidates, told.successors)


STATE = Form(STATED.type, _write_state, _read_state)
