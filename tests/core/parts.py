"""What stories are made of: states, logs and messages of a run whose peers have one-letter names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from p2p_diloco.core import events as e
from p2p_diloco.core.fragment import FragmentLog
from p2p_diloco.core.messages import Ask, Choice, Close, Commit, Ready, Summary
from p2p_diloco.core.plan import Member
from p2p_diloco.core.roster import Roster
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, append, commit_of, founding, key_of, rooted
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from tests.core.world import rules


def a_state(epoch: int, *names: str, **changes: Member) -> State:
    """Return a state at an epoch that has counted these peers."""
    state = founding(0, Version(0, 0, 0, "theta0"), names[0], 3)
    for number in range(1, epoch + 1):
        state = after(state, *names, sequence=number)
    return replace(state, roll={**state.roll, **changes})


def a_ready(state: State, sequence: int = 99, *, samples: int = 10, grant: str = "", life: int = 1) -> Ready:
    id = ContributionId(life, sequence)
    return rooted(Ready(0, state.version, id, id, 1.0, samples, ("a", "b", "c"), grant=grant))


def choice_of(state: State, *names: str, sequence: int = 99, by: str = "", term: int = 0) -> Choice:
    entries = tuple((name, a_ready(state, sequence)) for name in sorted(names))
    return Choice(by or state.plan.succession[0], term, entries)


def after(state: State, *names: str, sequence: int = 99, choice: Choice | None = None) -> State:
    choice = choice or choice_of(state, *names, sequence=sequence)
    return append(state, choice, key_of(0, state.version, choice), ("x", "y", "z"), rules())


def sent(effects: list[e.Effect], kind: type) -> list[Any]:
    """Return (receiver, message) of all messages of a kind."""
    return [(one.to, one.message) for one in effects if isinstance(one, e.Send) and isinstance(one.message, kind)]


def asks(effects: list[e.Effect]) -> list[tuple[str, tuple[int, ...]]]:
    """Return (receiver, numbers) of all questions for slices."""
    return [(to, ask.numbers) for to, ask in sent(effects, Ask)]


def keeps(effects: list[e.Effect]) -> bool:
    """Whether damage becomes a part of the state."""
    return any(isinstance(one, e.Keep) for one in effects)


def blamed(effects: list[e.Effect]) -> list[str]:
    return [one.peer for one in effects if isinstance(one, e.Complaint)]


def a_close(log: FragmentLog, choice: Choice, owner: str, *, term: int = 0) -> Close:
    """Return the Close of this choice, of which one peer owns all slices."""
    key = key_of(0, log.held.version, choice)
    return Close(0, log.held.version, term, choice.by, 0, key, choice, (owner,) * log.slices)


def a_commit(log: FragmentLog, choice: Choice, owner: str, *, term: int = 0) -> Commit:
    close = a_close(log, choice, owner, term=term)
    return commit_of(log.held, close, ("x", "y", "z"), close.owners, log.rules)


def tells(log: FragmentLog, peer: str, epoch: int, chain: str) -> None:
    """Let a peer tell that it holds this version."""
    log.roster.summarized(peer, Summary(1, "worker", model=ModelVersion(0), heads=((epoch, chain),)))


def a_log(me: str, *names: str, of: Rules | None = None) -> FragmentLog:
    """Return a log at epoch 3 of a peer that knows these others, all at the same version."""
    these = of or rules()
    roster = Roster(me, these, Summary(1 << 20, "worker", model=ModelVersion(0)))
    log, state = FragmentLog(0, these, roster), a_state(3, *names)
    log.begin(state, 0.0)
    for name in names:
        if name != me:
            roster.heard(name)
            tells(log, name, 3, state.version.chain)
    return log
