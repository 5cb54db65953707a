"""One fragment's replicated state: how a commit is appended, how versions are chained, how two lineages relate.

Law: pure functions. Every peer at one version has equal values in all fields. The key (the hash of a choice) and the
means fix the next version: neither the term nor the author of a commit is in it, so whoever commits one key makes the
same version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from statistics import median_low
from typing import Any

from .leases import WEIGHT_MIN, Claim, Tables, after, holders
from .messages import Choice, Close, Commit, Links, Ready
from .plan import Member, Plan, plan_after
from .revision import FOUNDED, Revision
from .rules import Rules
from .version import ContributionId, Version, life_of

FORGOTTEN_AFTER = 1024
"""In synchronous mode a member that no commit has counted for this many epochs leaves the roll."""
DEMOTED_FOR = 64
"""A member named late by two leaders within this many epochs comes last in the order for as many."""


SAMPLES_TIMES = 4
"""A contribution's samples count at most this many times the median of its commit's, if three or more tell some: so no
member can drive a version, or end a run after its samples, by what it says of itself. Of three, one that says
anything at all makes the sum at most twice the truth. In asynchronous mode the median is that of what each member told
last."""


@dataclass(frozen=True, slots=True)
class State:
    """The replicated state of a fragment, without its tensors. ``buffered``: submissions in the Delayed Nesterov
    buffer. ``paced``: (epoch, inner steps) when H last changed.
    ``tables``: which data is used and leased; only fragment 0 has them. ``key``, ``hashes``: of the commit that made
    it, so that everybody can compute its chain."""

    fragment: int
    version: Version
    roll: Mapping[str, Member]
    plan: Plan
    links: Links
    buffered: int = 0
    revision: Revision = FOUNDED
    paced: tuple[int, int] = (0, 0)
    tables: Tables = ()
    key: str = ""
    hashes: tuple[str, ...] = ()


# -- keys and chains


def hash_of(*parts: object) -> str:
    """Return a hash of plain data: numbers, texts, dataclasses without their seals, and sequences and tables of
    these."""
    text = json.dumps(parts, separators=(",", ":"), sort_keys=True, default=_fields)
    return blake2b(text.encode(), digest_size=16).hexdigest()


NAMES: dict[type, tuple[str, ...]] = {}
"""The fields of each class that hashes cover."""


def _fields(one: Any) -> object:
    if isinstance(one, Revision):
        return one.covered
    kind = type(one)
    if kind not in NAMES:
        NAMES[kind] = tuple(field.name for field in fields(one) if field.name != "seal")
    return [getattr(one, name) for name in NAMES[kind]]


def rooted(ready: Ready) -> Ready:
    """Return a Ready with the hash over its slices' hashes, which its author signs and commits name."""
    return replace(ready, root=hash_of(ready.hashes))


def key_of(fragment: int, base: Version, choice: Choice) -> str:
    """Return the key of a choice: the hash of all that its leader chose, on this base."""
    return hash_of(fragment, base, choice.bare())


def founding(fragment: int, version: Version, founder: str, slices: int) -> State:
    """Return a fragment's state at epoch 0: its plan names the founder alone."""
    roll = {founder: Member(ContributionId(0, 0), 0, 0)}
    return State(fragment, version, roll, Plan((founder,), (founder,) * slices, 1), ((0, version.chain),))


def founded_by(founder: str, state: State, rules: Rules) -> State:
    """Return a state as the first one of another run, that of ``founder``: the old run's peers are gone. It has the
    chain and the plan that its other fields lead to, so others find it sound."""
    version, epoch = state.version, state.version.epoch
    if not epoch:
        return founding(state.fragment, version, founder, len(rules.fragments[state.fragment]))
    roll = {founder: Member(ContributionId(0, 0), epoch, epoch)}
    tables = after(state.tables, (), holders(state.tables), epoch, recall=0)
    ours = replace(state, roll=roll, revision=FOUNDED, tables=tables)
    chain = _chain(state.links[-2][1], ours, version.generation, version.samples, epoch)
    links = (*state.links[:-1], (epoch, chain))
    plan = plan_after(rules, state.fragment, epoch, roll, roll, 0, (founder,) if rules.asynchronous else ())
    return replace(ours, version=replace(version, chain=chain), links=links, plan=plan)


def append(state: State, choice: Choice, key: str, hashes: tuple[str, ...], rules: Rules) -> State:
    """Return the state after the commit of this choice, whose means have these hashes."""
    base, epoch = state.version, state.version.epoch + 1
    after_it = replace(
        state,
        roll=_roll_after(state, choice, epoch, rules),
        buffered=_buffered_after(state, choice, rules.dn_buffer_size),
        paced=_paced_after(state, choice, rules),
        revision=choice.revision,
        tables=_tables_after(state, choice, epoch, rules),
        key=key,
        hashes=hashes,
    )
    samples = base.samples + sum(samples_of(state, choice).values())
    chain = _chain(base.chain, after_it, base.generation, samples, epoch)
    version = Version(base.generation, samples, epoch, chain)
    links = (*state.links, (epoch, chain))[-rules.history :]
    names = tuple(peer for peer, _ in choice.entries)
    plan = plan_after(rules, state.fragment, epoch, after_it.roll, names, len(state.plan.succession), choice.successors)
    return replace(after_it, version=version, links=links, plan=plan)


def _chain(before: str, state: State, generation: int, samples: int, epoch: int) -> str:
    return hash_of(before, generation, samples, epoch, state.key, state.hashes, _summed(state))


def is_sound(state: State) -> bool:
    """Whether a told state has the chain of its version: a false roll or table does not."""
    v = state.version
    if v.epoch == 0:  # its founder alone is known, and it has counted nothing
        return state == founding(state.fragment, v, min(state.roll), len(state.plan.owners))
    if len(state.links) < 2:
        return False
    ends = state.links[-1] == (v.epoch, v.chain) and state.links[-2][0] == v.epoch - 1
    return ends and v.chain == _chain(state.links[-2][1], state, v.generation, v.samples, v.epoch)


def _summed(state: State) -> str:
    """Return a hash of what a commit changes in a state besides its version. The plan follows from it."""
    return hash_of(dict(state.roll), state.buffered, state.paced, state.tables, state.revision)


def samples_of(state: State, choice: Choice) -> dict[str, int]:
    """Return how many samples each entry adds to the version."""
    told = {peer: ready.samples for peer, ready in choice.entries if ready.weight}
    others = [member.samples for peer, member in state.roll.items() if peer not in told]
    return dict(zip(told, credited(list(told.values()), others), strict=True))


def _roll_after(state: State, choice: Choice, epoch: int, rules: Rules) -> dict[str, Member]:
    roll = dict(state.roll)
    for peer, ready in choice.entries:
        before = roll.get(peer)
        led, demoted = (epoch, ("", 0, 0)) if before is None else (before.led, before.demoted)
        told, grant = ready.samples if rules.asynchronous else 0, ready.grant or peer
        roll[peer] = Member(ready.id, epoch, led, ready.link, ready.reachable, grant, False, demoted, told)
    for peer in choice.gone:
        roll[peer] = replace(roll[peer], gone=True)
    for peer in _had_their_turn(state, choice):
        roll[peer] = replace(roll[peer], led=epoch)
    for peer in choice.late:
        roll[peer] = replace(roll[peer], demoted=_demoted_after(roll, peer, choice.by, epoch))
    if not rules.asynchronous:
        roll = {peer: member for peer, member in roll.items() if epoch - member.epoch <= FORGOTTEN_AFTER}
    return roll


def _had_their_turn(state: State, choice: Choice) -> list[str]:
    """Return who goes to the end of the line: who chose, and the candidates whose turn it was before. So a leader that
    is dead costs one takeover, and not one in each round until it leaves the plan."""
    line = state.plan.succession
    before = line[: choice.term] if choice.term < len(line) else line
    return [peer for peer in dict.fromkeys((*before, choice.by)) if peer in state.roll]


def _demoted_after(roll: Mapping[str, Member], peer: str, by: str, epoch: int) -> tuple[str, int, int]:
    """Return the mark of a member that the leader ``by`` names late: the second mark within `DEMOTED_FOR` epochs
    demotes it. The two must not come from one grant, where the run has several: else one leader could demote all."""
    grants = len({member.grant for member in roll.values()}) > 1
    accuser = roll[by].grant if grants and by in roll else by
    first, when, until = roll[peer].demoted
    second = bool(first) and first != accuser and epoch - when <= DEMOTED_FOR
    return accuser, epoch, epoch + DEMOTED_FOR if second else until


def is_empty(ready: Ready) -> bool:
    """Whether a contribution is empty: in a run with data, its author has trained nothing since its last one."""
    return bool(ready.uses) and ready.weight <= WEIGHT_MIN


def _buffered_after(state: State, choice: Choice, size: int) -> int:
    count = sum(ready.weight > 0 and not is_empty(ready) for _, ready in choice.entries)
    return (state.buffered + count) % size if size > 1 else 0


def _paced_after(state: State, choice: Choice, rules: Rules) -> tuple[int, int]:
    before = rules.steps_between(state.revision, state.fragment)
    if rules.steps_between(choice.revision, state.fragment) == before:
        return state.paced
    return state.version.epoch + 1, steps_of(state, rules) + before


def steps_of(state: State, rules: Rules) -> int:
    """Return how many inner steps the fragment's commits stand for."""
    epoch, steps = state.paced
    return steps + (state.version.epoch - epoch) * rules.steps_between(state.revision, state.fragment)


def _tables_after(state: State, choice: Choice, epoch: int, rules: Rules) -> Tables:
    if state.fragment or not (state.tables or any(ready.uses for _, ready in choice.entries)):
        return ()
    claims: list[Claim] = [(peer, life_of(ready.id.incarnation), ready.uses) for peer, ready in choice.entries]
    recall = rules.recall * (max(1, len(holders(state.tables))) if rules.asynchronous else 1)
    return after(state.tables, claims, choice.gone, epoch, recall)


# -- questions


def final(state: State, rules: Rules) -> bool:
    """Whether the run ends for a fragment at this state, by the stops of the state's own revision."""
    version, (epochs, samples) = state.version, rules.stops(state.revision)
    return (epochs is not None and version.epoch >= epochs) or (samples is not None and version.samples >= samples)


def commit_of(state: State, close: Close, hashes: tuple[str, ...], owners: tuple[str, ...], rules: Rules) -> Commit:
    """Return the commit of a Close, whose means have these hashes and were made by these owners."""
    assert close.choice is not None
    version = append(state, close.choice, close.key, hashes, rules).version
    held = close.term, close.leader, close.key, close.choice.bare(), hashes, owners
    return Commit(state.fragment, state.version, version, *held)


def chain_at(links: Links, epoch: int) -> str | None:
    """Return the chain of this epoch; None if these links don't have it."""
    place = epoch - links[0][0]
    return links[place][1] if 0 <= place < len(links) else None


def relation(mine: Version, my_links: Links, theirs: Version, their_links: Links = ()) -> str:
    """Return how ``theirs`` relates to ``mine``: ``equal``, ``ancestor``, ``ahead`` (it descends from mine, or nothing
    shows that it doesn't) or ``fork``. Versions and their links decide; a version below the other's links counts as its
    ancestor."""
    if theirs == mine:
        return "equal"
    if theirs.generation != mine.generation:
        return "fork"
    if any(chain_at(my_links, epoch) not in (None, chain) for epoch, chain in their_links):
        return "fork"
    if theirs.epoch > mine.epoch:
        return "ahead"
    known = chain_at(my_links, theirs.epoch)
    return "ancestor" if known in (theirs.chain, None) else "fork"


def descends(state: State, older: Version) -> bool:
    """Whether the state's version is ``older`` or descends from it, as far as its links tell."""
    return relation(state.version, state.links, older) in ("equal", "ancestor")


def credited(told: Sequence[int], others: Sequence[int] = ()) -> list[int]:
    """Return how many samples a commit counts for each of its contributions, which tell this many. ``others``: what
    members told last whom it does not count."""
    some = [samples for samples in (*told, *others) if samples]
    most = SAMPLES_TIMES * median_low(some) if len(some) >= 3 else max(some, default=0)
    return [min(samples, most) for samples in told]
