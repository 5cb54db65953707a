"""The answer to a peer that asks for newer states.

Law: a peer on another lineage first gets this replica's versions of all shards, so that both peers can tell which
model wins. It gets states once it asks for ``whole`` ones.
"""

from __future__ import annotations

from .events import Effect, Send
from .logs import Logs
from .messages import Fetch, Versions
from .state import relation


def answer(logs: Logs, peer: str, request: Fetch) -> list[Effect]:
    """Return the messages that answer a peer's Fetch: the commits and states that the peer lacks. If the peer is on
    another lineage and did not ask for ``whole`` states, it gets this replica's versions instead. It gets the versions
    in addition if it asked for versions alone, if it has a newer version of some shard, or if it asked for a shard of
    which nothing newer is here: otherwise it would wait for that shard. While a shard is missing here, there is no
    answer."""
    mine = [log.state for log in logs if log.state is not None]
    if len(mine) < len(logs) or len(request.have) != len(logs):
        return []
    relations = ["ancestor" if h is None else relation(s, h) for s, h in zip(mine, request.have, strict=True)]
    if request.whole and request.shards is not None:
        return [Send(peer, state) for state in mine if state.shard in request.shards]
    if request.whole:
        return [Send(peer, state) for state, r in zip(mine, relations, strict=True) if r != "equal"]
    if "fork" in relations:
        return tell_versions(logs, peer)
    lacks = {state.shard for state, r in zip(mine, relations, strict=True) if r == "ancestor"}
    asked = lacks if request.shards is None else set(request.shards)
    effects: list[Effect] = [
        send
        for state, have in zip(mine, request.have, strict=True)
        if state.shard in lacks & asked
        for send in logs[state.shard].outgoing.answer(state, peer, have)
    ]
    if "ahead" in relations or asked - lacks or request.shards == ():
        effects += tell_versions(logs, peer, forked=False)
    return effects


def tell_versions(logs: Logs, peer: str, *, forked: bool = True) -> list[Effect]:
    """Return a message that tells the peer this replica's versions; no message while a shard is missing here.
    ``forked``: whether the peer is on another lineage."""
    versions = [log.version for log in logs if log.version is not None]
    return [Send(peer, Versions(tuple(versions), forked=forked))] if len(versions) == len(logs) else []
