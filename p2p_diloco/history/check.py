"""Plays a history again: a new replica is told the recorded events, and its effects are compared with those recorded.

Law: pure. The core reads no clock and draws no numbers, so equal events lead to equal effects. What a history does not
record (payloads, seals, what follows from other fields) is not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from p2p_diloco.core.events import Effect
from p2p_diloco.core.replica import Replica
from p2p_diloco.history.reading import Life
from p2p_diloco.history.words import tell


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
    head = life.head
    if head.file != 1:
        return Verdict(0, None, "its first files are gone, and a replica can't be played from the middle of its life")
    try:
        of = {"role": head.role, "eligible": head.eligible, "incarnation": head.incarnation, "grant": head.grant}
        replica = Replica(head.peer, head.rules, now=head.began, **of)  # type: ignore[arg-type]
    except Exception as error:  # rules that no run has fail in many ways
        return Verdict(0, None, f"it was written by version {head.version}, whose rules differ ({error})")
    for at, (entry, now) in enumerate(zip(life.entries, life.clocks, strict=True)):
        assert not isinstance(entry.what, str), "only simulated worlds have texts for events"
        try:
            replica.next_wakeup()  # as the node asks, before the first event and after each one
            effects = tuple(replica.handle(entry.what, now))
        except Exception as error:  # events that no replica meets break its invariants
            return Verdict(at, at, f"The event can't be played: {error!r}")
        if effects != entry.effects:
            return Verdict(at, at, _difference(entry.effects, effects))
    return Verdict(len(life.entries))


def _difference(recorded: tuple[Effect, ...], played: tuple[Effect, ...]) -> str:
    """Tell the first effect in which the recorded effects and the played ones differ."""
    differ = next(pair for pair in zip_longest(recorded, played) if pair[0] != pair[1])
    was, now = ("nothing" if one is None else tell(one) for one in differ)
    if was == now:  # they differ in a part that isn't told
        was, now = map(repr, differ)
    return f"recorded: {was}; played: {now}"
