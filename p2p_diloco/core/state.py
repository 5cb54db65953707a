"""One shard's replicated state: how a commit is appended, how versions relate, and what a digest covers.

Law: pure functions. A state is never changed; appending a commit returns a new one.
"""

from __future__ import annotations

import json
from dataclasses import astuple, replace

from .lending import submissions, tables_after
from .messages import Commit, Plan, State
from .rules import Rules
from .version import Version, descends


def append(state: State, commit: Commit, rules: Rules) -> State:
    """Return the state after the outer step of ``commit``, which was made on ``state``."""
    version = commit.version
    history = {**state.history, version.epoch: version.digest}
    if len(history) > rules.history:
        del history[min(history)]
    counted = {**state.counted, **{c.peer: c.id for c in commit.contributions}}
    buffered = _buffered_after(state, commit, rules.dn_buffer_size)
    held = version, commit.term, commit.plan, counted, history, buffered
    paced, tables = _paced_after(state, commit, rules), tables_after(state, commit, rules)
    return State(state.shard, *held, revision=commit.revision, paced=paced, tables=tables)


def fetched(state: State, rules: Rules) -> State:
    """Return a copy of a fetched state, without its tensors. Its history keeps only the newest ancestors,
    ``rules.history`` at most."""
    newest = sorted(state.history)[-rules.history :]
    return replace(state, history={epoch: state.history[epoch] for epoch in newest}, payload=None)


def _buffered_after(state: State, commit: Commit, size: int) -> int:
    """Return the number of submissions in the Delayed Nesterov buffer after this commit. A full buffer is emptied; no
    commit counts more submissions than fit into it."""
    return (state.buffered + submissions(commit)) % size if size > 1 else 0


def _paced_after(state: State, commit: Commit, rules: Rules) -> tuple[int, int]:
    """Return when the H of the state after this commit came into force, in the form of `State.paced`."""
    fragment = rules.fragment_of(state.shard)
    before = rules.steps_between(state.revision, fragment)
    if rules.steps_between(commit.revision, fragment) == before:
        return state.paced
    return commit.version.epoch, steps_of(state, rules, fragment) + before


def steps_of(state: State, rules: Rules, fragment: int) -> int:
    """Return how many inner steps this shard's commits stand for: each for `Rules.steps_between` at its own H."""
    epoch, steps = state.paced
    return steps + (state.version.epoch - epoch) * rules.steps_between(state.revision, fragment)


def founding(shard: int, version: Version, founder: str, role: str) -> State:
    """Return a shard's state at epoch 0. Its plan names only the founder, but other peers' contributions count, too."""
    plan = Plan((founder,) if role == "worker" else (), (founder,))
    return State(shard, version, 0, plan, {}, {0: version.digest})


def founding_meta(generation: int, founder: str, role: str) -> bytes:
    """Return the bytes that go into the digest of each shard at epoch 0, besides θ₀."""
    return meta_of(founding(0, Version(generation, 0, 0, ""), founder, role))


def relation(mine: State | None, theirs: Version) -> str:
    """Return how the version ``theirs`` relates to this peer's state ``mine``: ``equal``, ``ancestor``, ``fork`` (on
    another lineage) or ``ahead`` (newer, without a sign of a fork). If this peer holds no state, every version is
    ``ahead``."""
    if mine is None:
        return "ahead"
    version = mine.version
    if theirs == version:
        return "equal"
    if theirs.generation != version.generation:
        return "fork"
    if theirs.epoch > version.epoch:
        return "ahead" if theirs.samples >= version.samples else "fork"
    return "ancestor" if descends(version, mine.history, theirs) else "fork"


def grown_from(state: State | None, base: Version) -> bool:
    """Whether the state's version is ``base`` or descends from it."""
    return state is not None and descends(state.version, state.history, base)


def final(state: State | None, rules: Rules) -> bool:
    """Whether a shard at this state has reached the end of the run, by the stops of the state's own revision. So all
    replicas agree, whatever later revision some of them know."""
    if state is None:
        return False
    version, (epochs, samples) = state.version, rules.stops(state.revision)
    return (epochs is not None and version.epoch >= epochs) or (samples is not None and version.samples >= samples)


def meta_of(state: State) -> bytes:
    """Return the bytes that go into the digest of a state's version, besides the tensors. They are canonical JSON of
    the version, term, plan, counted contributions, and, where not zero, the buffered submissions, the revision,
    ``paced`` and the tables."""
    version, revision = state.version, state.revision
    covered: list[object] = [
        version.generation,
        version.samples,
        version.epoch,
        state.term,
        state.plan.group,
        state.plan.succession,
        [[peer, id.incarnation, id.sequence] for peer, id in sorted(state.counted.items())],
    ]
    if revision.number:
        covered += [state.buffered, list(revision.covered)]
    elif state.buffered:
        covered.append(state.buffered)
    if any(state.paced):
        covered.append(list(state.paced))
    if state.tables:
        covered.append([astuple(table) for table in state.tables])
    return json.dumps(covered, separators=(",", ":")).encode()
