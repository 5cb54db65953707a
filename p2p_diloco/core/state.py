"""One shard's replicated state as a value: appending a commit, how versions relate, what a digest covers.

Law: pure functions. A state is never changed; appending a commit returns another one.
"""

from __future__ import annotations

import json
from dataclasses import replace

from .messages import Commit, Plan, State
from .rules import Rules
from .version import Version, descends


def append(state: State, commit: Commit, rules: Rules) -> State:
    """The state after the outer step of ``commit``, which was made on ``state``."""
    version = commit.version
    history = {**state.history, version.epoch: version.digest}
    if len(history) > rules.history:
        del history[min(history)]
    counted = {**state.counted, **{c.peer: c.id for c in commit.contributions}}
    buffered = _buffered_after(state, commit, rules.dn_buffer_size)
    held = version, commit.term, commit.plan, counted, history, buffered
    return State(state.shard, *held, revision=commit.revision)


def fetched(state: State, rules: Rules) -> State:
    """A fetched state without its tensors, and with no more ancestors than this peer remembers."""
    newest = sorted(state.history)[-rules.history :]
    return replace(state, history={epoch: state.history[epoch] for epoch in newest}, payload=None)


def _buffered_after(state: State, commit: Commit, size: int) -> int:
    """Submissions in the Delayed Nesterov buffer after this commit; no commit goes beyond the one that empties the
    buffer."""
    return (state.buffered + len(commit.contributions)) % size if size > 1 else 0


def founding(shard: int, version: Version, founder: str, role: str) -> State:
    """The state of a shard at epoch 0. Its plan names the founder alone; other contributions count as well."""
    plan = Plan((founder,) if role == "worker" else (), (founder,))
    return State(shard, version, 0, plan, {}, {0: version.digest})


def founding_meta(generation: int, founder: str, role: str) -> bytes:
    """What the digest of every shard of epoch 0 covers besides θ₀."""
    return meta_of(founding(0, Version(generation, 0, 0, ""), founder, role))


def relation(mine: State | None, theirs: Version) -> str:
    """How a version relates to my state: ``equal``, ``ancestor``, ``fork``, or ``ahead`` (newer, and no sign of a
    fork)."""
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
    """Whether the state is ``base`` or descends from it."""
    return state is not None and descends(state.version, state.history, base)


def final(version: Version | None, rules: Rules) -> bool:
    """Whether the run ends for a shard at this version."""
    if version is None:
        return False
    epochs, samples = rules.stop_after_epochs, rules.stop_after_samples
    return (epochs is not None and version.epoch >= epochs) or (samples is not None and version.samples >= samples)


def meta_of(state: State) -> bytes:
    """What the digest of a state's version covers besides the tensors: canonical JSON of all but the digest itself."""
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
        covered += [state.buffered, [revision.number, revision.outer_lr, revision.outer_momentum]]
    elif state.buffered:
        covered.append(state.buffered)
    return json.dumps(covered, separators=(",", ":")).encode()
