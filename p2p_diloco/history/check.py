"""Plays a history again: a new replica is told the recorded events, and its effects are compared with those recorded.

Law: pure. The core reads no clock and draws no numbers, so equal events lead to equal effects. What a history does not
record (payloads, seals, what follows from other fields) is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from p2p_diloco.core.events import Effect
from p2p_diloco.core.replica import Replica
from p2p_diloco.core.rules import Rules
from p2p_diloco.history.reading import Life
from p2p_diloco.history.words import tell
from p2p_diloco.node.recorded import packer


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of playing a life again. `played`: the number of entries whose effects are the same. `at`: the index
    of the first entry whose effects differ; None: there is none, or the life can't be played. `why`: why it can't be
    played, or how the effects differ; empty if neither."""

    played: int
    at: int | None = None
    why: str = ""


def check(life: Life) -> Verdict:
    """Play a life again, up to the first difference."""
    if life.head["file"] != 1:
        return Verdict(0, None, "its first files are gone, and a replica can't be played from the middle of its life")
    try:
        replica = replica_of(life)
    except Exception as error:  # rules of another version, or a damaged head, fail in many ways
        return Verdict(0, None, f"it was written by version {life.head['version']}, whose rules differ ({error})")
    pack = packer()
    for at, (entry, now) in enumerate(zip(life.entries, life.clocks, strict=True)):
        assert not isinstance(entry.what, str), "only simulated worlds have texts for events"
        try:
            replica.next_wakeup()  # as the node asks, before the first event and after each one
            effects = tuple(replica.handle(entry.what, now))
        except Exception as error:  # events that no replica meets break its invariants
            return Verdict(at, at, f"The event can't be played: {error!r}")
        if pack(effects) != pack(entry.effects):
            return Verdict(at, at, _difference(entry.effects, effects))
    return Verdict(len(life.entries))


def replica_of(life: Life) -> Replica:
    """Make the replica with which a life began, from the head of its history file. Raises KeyError or another
    exception if the head lacks a value, has an unfit one, or a rule that this version doesn't know."""
    head, known = life.head, {field.name for field in fields(Rules)}
    if unknown := head["rules"].keys() - known:
        raise KeyError(*unknown)
    rules = Rules(**{**head["rules"], "fragments": tuple(map(tuple, head["rules"]["fragments"]))})
    role, eligible, incarnation = head["role"], head["eligible"], head["incarnation"]
    return Replica(head["peer"], rules, role=role, eligible=eligible, incarnation=incarnation, now=head["began"])


def _difference(recorded: tuple[Effect, ...], played: tuple[Effect, ...]) -> str:
    """Tell the first effect in which the recorded effects and the played ones differ."""
    pack = packer()
    for number in range(max(len(recorded), len(played))):
        was, now = (side[number] if number < len(side) else None for side in (recorded, played))
        if pack(was) != pack(now):
            return f"recorded: {tell(was) if was else 'nothing'}; played: {tell(now) if now else 'nothing'}"
    return "only in the effects' order"
