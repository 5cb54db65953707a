"""Stores each record at the initial peers and at this peer itself too, and asks the initial peers for each key. If
nobody has a record of it, peers that were met earlier are asked as well.

The DHT keeps a record at the members whose ids are nearest to its key. Ids are free: one stranger can invent as many as
it likes, all nearer to a run's keys than any honest member, and would then be the only one that is asked. It can't put
itself in the place of an initial peer, whose peer id the user has given, and which the connection proves.

Law: adds to what Hivemind finds and stores; takes nothing away. An initial peer that doesn't answer costs one deadline,
and isn't asked again for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from p2p_diloco.addresses import peer_of
from p2p_diloco.net.hivemind_library import DHTID, DHTRecord, DictionaryDHTValue, PeerID
from p2p_diloco.net.records import SignedRecords

Found = dict[bytes, tuple[bytes, float]]
"""Subkey -> (value, expiration)."""


class Anchors:
    """The initial peers of a DHT node, and the node itself."""

    def __init__(self, node: Any, initial_peers: Sequence[str], records: SignedRecords) -> None:
        self._node, self._records = node, records
        self._peers = [PeerID.from_base58(peer) for peer in {peer_of(address) for address in initial_peers}]
        self._met: list[Any] = []

    def add(self, peer: str) -> None:
        """Ask this peer, too, for what nobody else has. Each member stores its own records at itself."""
        self._met.append(PeerID.from_base58(peer))

    async def store(self, key: str, subkey: bytes, value: bytes, until: float) -> bool:
        """Store a record; returns whether this peer or an initial peer has it now."""
        protocol, key_id = self._node.protocol, DHTID.generate(source=key)
        name, packed = protocol.serializer.dumps(subkey), protocol.serializer.dumps(value)
        signed = self._records.sign_value(DHTRecord(key_id.to_bytes(), name, packed, until))
        here = bool(protocol.storage.store(key_id, signed, until, subkey=subkey))

        async def at(peer: Any) -> bool:
            if peer in self._node.blacklist:
                return False
            stored = await protocol.call_store(peer, [key_id], [signed], until, subkeys=[subkey])
            (self._node.blacklist.register_failure if stored is None else self._node.blacklist.register_success)(peer)
            return bool(stored and stored[0])

        return any([here, *await asyncio.gather(*map(at, self._peers))])

    async def fetch(self, key: str) -> Found:
        """What the initial peers have under a key. Of several records with one subkey the one that expires last."""
        return await self._ask(self._peers, key)

    async def fetch_from_the_met(self, key: str) -> Found:
        """What peers that were met earlier have under a key."""
        return await self._ask(self._met, key)

    async def _ask(self, peers: Sequence[Any], key: str) -> Found:
        key_id = DHTID.generate(source=key)
        answers = await asyncio.gather(*(self._node._call_find_with_blacklist(peer, [key_id]) for peer in peers))
        return latest(*(self._read(key_id, answer[key_id][0]) for answer in answers if answer))

    def _read(self, key_id: Any, found: Any) -> Found:
        """The valid records in an initial peer's answer; Hivemind has checked them."""
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            return {}
        serializer, read = self._node.protocol.serializer, {}
        for subkey, (signed, until) in found.value.items():
            record = DHTRecord(key_id.to_bytes(), serializer.dumps(subkey), signed, until)
            read[subkey] = serializer.loads(self._records.strip_value(record)), until
        return read


def latest(*found: Found) -> Found:
    """All that was found; of several records with one subkey the one that expires last."""
    kept: Found = {}
    for records in found:
        for subkey, (value, until) in records.items():
            if until > kept.get(subkey, (b"", 0.0))[1]:
                kept[subkey] = value, until
    return kept
