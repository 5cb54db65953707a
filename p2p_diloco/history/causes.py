"""What led to what: the chain of causes that ends in an entry, over all peers.

Law: pure. Each event of a replica has one cause: a message was sent, tensor work was asked for, the trainer was let go,
a time limit passed. Followed backwards, the causes fill the whole time, so they tell what the time went to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from p2p_diloco.core.events import (
    Applied,
    Apply,
    Average,
    Averaged,
    Closed,
    Contribute,
    Delivered,
    Fill,
    Filled,
    Found,
    Load,
    Merge,
    Note,
    Pause,
    Ready,
    Received,
    Release,
    Send,
    SendFailed,
    Wakeup,
)
from p2p_diloco.core.messages import Commit, Contribution, Probe, ProbeAck, Promise, State, TakeOver, Want
from p2p_diloco.history.entry import Entry
from p2p_diloco.history.order import DIED, key_of

WAYS = {
    Commit: "the commit's way to {to}",
    Contribution: "{sender}'s contribution's way to {to}",
    Want: "{sender}'s request to {to}",
    TakeOver: "{sender}'s claim's way to {to}",
    Promise: "{sender}'s promise's way to {to}",
    State: "the state's way to {to}",
}
CRASHED = ("crashes", DIED)
"""Texts of entries by which a peer dies."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One part of a chain of causes: what the time from `since` to `until` went to. `peer`: which peer worked or was
    waited for; `part`: inner, encode, transfer, outer_step, group, paused, before or
    death."""

    since: float
    until: float
    peer: str
    part: str
    text: str


class Causes:
    """The cause of each entry: the entry before it, and what happened between the two."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._of: list[tuple[int, str, str] | None] = []  # (cause, part, text), by entry
        self._sent = defaultdict[Any, deque[int]](deque)
        self._last: dict[Any, int] = {}
        self._died: dict[str, int] = {}
        self._groups: dict[str, tuple[str, ...]] = {}  # by digest of a version: the next round's averaging group
        for at, entry in enumerate(entries):
            self._of.append(self._cause(entry))
            self._remember(at, entry)

    def chain(self, at: int, since: float) -> list[Hop]:
        """What the time from `since` to an entry went to, oldest first."""
        hops: list[Hop] = []
        until = self._entries[at].time
        while until > since and (cause := self._of[at]) is not None and not self._root(self._entries[at]):
            at, part, text = cause
            begun = max(since, self._entries[at].time)
            if begun < until:
                hops.append(Hop(begun, until, self._entries[at].peer, part, text))
            until = min(until, begun)
        if until > since and (root := self._root(self._entries[at])):
            hops.append(Hop(since, until, self._entries[at].peer, "before", root))
        return hops[::-1]

    @staticmethod
    def _root(entry: Entry) -> str:
        """What the time before an entry is called whose cause is no other entry; empty: it has no name."""
        if entry.what in CRASHED:
            return f"before the death of {entry.peer}"
        return f"until {entry.peer} may train" if any(isinstance(effect, Ready) for effect in entry.effects) else ""

    def _cause(self, entry: Entry) -> tuple[int, str, str] | None:
        me = entry.peer
        match entry.what:
            case Received(sender, message):
                sent = self._sent.get((sender, me, key_of(message)))
                if not sent:  # the sender's history is missing, or lacks its end
                    return self._at((me, "act"), "group", f"{me} waits for {sender}")
                text = WAYS.get(type(message), "{sender}'s message's way to {to}").format(sender=sender, to=me)
                return sent.popleft() if len(sent) > 1 else sent[0], "transfer", text
            case Averaged(shard, base) | Applied(shard, base):
                return self._at((me, shard, base), "outer_step", f"{me}'s outer step")
            case Filled(shard, version):
                return self._at((me, shard, version), "transfer", f"{me} loads a state")
            case Contribute():
                return self._at((me, Load), "encode", f"{me} encodes")
            case Merge():
                return self._at((me, Release), "inner", f"{me}'s inner steps")
            case Pause(paused):
                why = ("inner", f"{me}'s inner steps") if paused else ("paused", f"{me} pauses")
                return self._at((me, Release), *why)
            case Delivered(to, message) | SendFailed(to, message):
                gone = isinstance(entry.what, SendFailed) and entry.what.gone
                if gone and to in self._died:
                    return self._died[to], "death", f"{me} notices the death of {to}"
                return self._at((me, to, key_of(message)), "transfer", f"the answer of {to} to {me}")
            case Closed(peer) if peer in self._died:
                return self._died[peer], "death", f"{me} notices the death of {peer}"
            case Closed() | Wakeup():
                return self._at((me, "act"), "group", f"{me} waits {self._for(entry)}")
        return None

    def _for(self, entry: Entry) -> str:
        """What a peer has waited for in vain when it goes on by itself."""
        for effect in entry.effects:
            match effect:
                case Note("died", text):
                    return f"until {text}"
                case Average(_, base, contributions):
                    came = {peer for peer, _ in contributions}
                    if missing := [peer for peer in self._groups.get(base.digest, ()) if peer not in came]:
                        return f"in vain for {' and '.join(missing)}"
        return "for its timer"

    def _at(self, key: Any, part: str, text: str) -> tuple[int, str, str] | None:
        return None if key not in self._last else (self._last[key], part, text)

    def _remember(self, at: int, entry: Entry) -> None:
        me, last, acts = entry.peer, self._last, False
        if entry.what in CRASHED:
            self._died[me] = at
        elif entry.what == "starts":
            self._died.pop(me, None)
        for effect in entry.effects:
            match effect:
                case Send(to, message):
                    if isinstance(message, Commit):
                        self._groups[message.version.digest] = message.plan.group
                    self._sent[me, to, key_of(message)].append(at)
                    last[me, to, key_of(message)] = at
                    acts |= not isinstance(message, (Probe, ProbeAck))
                case Average(shard, base):
                    last[me, shard, base] = at
                case Apply(commit):
                    self._groups[commit.version.digest] = commit.plan.group
                    last[me, commit.shard, commit.base] = at
                case Fill(state):
                    last[me, state.shard, state.version] = at
                case Load():
                    last[me, Load] = at
                case Release() | Ready():
                    last[me, Release] = at
        if isinstance(entry.what, Pause):
            last[me, Release] = at  # what the trainer does from now on is another part
        if acts or isinstance(entry.what, (Contribute, Found)):
            last[me, "act"] = at


def joined(hops: Sequence[Hop]) -> Iterator[Hop]:
    """The hops, with neighbours of one text made one."""
    before: Hop | None = None
    for hop in hops:
        if before is not None and before.text == hop.text:
            before = Hop(before.since, hop.until, hop.peer, hop.part, hop.text)
            continue
        if before is not None:
            yield before
        before = hop
    if before is not None:
        yield before
