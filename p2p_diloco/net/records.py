"""How a record is named in the DHT, and which of the records found there count.

Law: names and choices only; signatures are checked before by `hivemind`, which owns keys and sockets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_OWNED = re.compile(rb"(?P<name>.*?)\[owner:(?P<key>.+?)\]", re.DOTALL)
_PEER_ID = re.compile(r"Qm[1-9A-HJ-NP-Za-km-z]{44}|12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")


def newest_records(
    found: Mapping[bytes, tuple[bytes, float]], *, now: float, peer_of_key: Callable[[bytes], str]
) -> dict[str, tuple[bytes, float]]:
    """The live records among those under a key: of several with one name, the one that lives longest.

    A record whose name is a peer id, or starts with one and a slash, counts only if that peer owns it.

    Args:
        found: subkey, with the owner's marker if it has one -> (value, expiration in seconds since 1970).
        now: seconds since 1970.
        peer_of_key: the peer id that an owner's public key makes; raises ValueError if it is no key.
    """
    newest: dict[str, tuple[bytes, float]] = {}
    for subkey, (value, until) in found.items():
        owned = _OWNED.fullmatch(subkey)
        try:
            name = (owned["name"] if owned else subkey).decode()
            owner = peer_of_key(owned["key"]) if owned else ""
        except ValueError:
            continue
        named = name.partition("/")[0]
        foreign = _PEER_ID.fullmatch(named) is not None and named != owner
        if until > now and not foreign and until > newest.get(name, (b"", now))[1]:
            newest[name] = (value, until)
    return newest
