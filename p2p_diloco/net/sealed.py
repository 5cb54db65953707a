"""The DHT records of a private run: hidden keys, sealed values, and each record owned by the member that stored it.

Law: wraps one `Records` in another. Strangers share the DHT: of each record they see its subkey, its owner's id, its
length and its expiration, and nothing else. Records that no member has sealed are left out.
"""

from __future__ import annotations

import asyncio
import time

from p2p_diloco.net.interface import VALUE_BYTES_MAX, Records, Unreachable, check_record
from p2p_diloco.net.membership import SEAL_BYTES, Membership

COPIES = 3
"""A record that no peer owns isn't stored once more while this many other members keep copies of it."""

_COPY = "/~"
"""Stands between the id of the member that stored a record which no peer owns, and the record's own name."""


class SealedRecords:
    """A `Records` for the members of a run.

    A record that no peer owns is stored as a copy that its storing member owns. Otherwise a stranger could displace it,
    by storing any bytes under the same name with a later expiration.
    """

    def __init__(self, dht: Records, membership: Membership) -> None:
        self.peer_id = dht.peer_id
        self._dht, self._membership = dht, membership

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        check_record(key, subkey, value, ttl_s)
        if len(value) > VALUE_BYTES_MAX - SEAL_BYTES:
            raise ValueError(f"the record {key}/{subkey} has {len(value)} bytes, and no room for its seal")
        hidden = self._membership.hidden(key)
        if not owned and await self._others_keep(hidden, subkey, ttl_s):
            return True
        name = subkey if subkey.partition("/")[0] == self.peer_id else f"{self.peer_id}{_COPY}{subkey}"
        return await self._dht.store(hidden, name, self._membership.seal(_place(hidden, name), value), ttl_s)

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        newest: dict[str, tuple[bytes, float]] = {}
        for _, subkey, value, until in await self._opened(self._membership.hidden(key)):
            if until > newest.get(subkey, (b"", 0.0))[1]:
                newest[subkey] = value, until
        return newest

    def sign(self, kind: bytes, statement: bytes) -> str:
        return self._dht.sign(kind, statement)

    def signed_by(self, peer: str, proof: str, kind: bytes, statement: bytes) -> bool:
        return self._dht.signed_by(peer, proof, kind, statement)

    async def _opened(self, hidden: str) -> list[tuple[str, str, bytes, float]]:
        """The records that members have sealed, as (owner, subkey, value, expiration)."""
        opened = []
        for turn, (name, (sealed, until)) in enumerate((await self._dht.fetch(hidden)).items(), start=1):
            if (value := self._membership.open(_place(hidden, name), sealed)) is not None:
                owner, _, copied = name.partition(_COPY)
                opened.append((owner, copied or name, value, until))
            if turn % 64 == 0:
                await asyncio.sleep(0)  # strangers may have stored many
        return opened

    async def _others_keep(self, hidden: str, subkey: str, ttl_s: float) -> bool:
        """Whether at least `COPIES` other members keep copies of this record that live for half of `ttl_s` or
        longer."""
        late = time.time() + ttl_s / 2
        try:
            found = await self._opened(hidden)
        except Unreachable:
            return False
        kept = [owner for owner, name, _, until in found if name == subkey and until >= late]
        return len(set(kept) - {self.peer_id}) >= COPIES


def _place(hidden: str, name: str) -> bytes:
    """Name the place for which a value is sealed: its key, and its name with the owner. Anywhere else the value can't
    be decrypted."""
    return f"{hidden}/{name}".encode()
