"""The DHT records of a private run: hidden keys, sealed values, and each record owned by the member that stored it.

Law: wraps one `Records` in another. Strangers share the DHT: of each record they see its subkey, its owner's id, its
length and its expiration, and nothing else. Each record holds its owner's certificate. Records that no member has
sealed are left out, and so are those of members whose grant was revoked, has expired, or allows only to read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.interface import VALUE_BYTES_MAX, Records, Unreachable, check_record
from p2p_diloco.net.membership import SEAL_BYTES, Membership, Stranger
from p2p_diloco.net.signing import PEER_ID

COPIES = 3
"""A record that no peer owns isn't stored once more while this many other members keep copies of it."""

_COPY = "/~"
"""Stands between the id of the member that stored a record which no peer owns, and the record's own name."""
_LENGTH_BYTES = 2
"""Before the certificate: its length."""


class SealedRecords:
    """A `Records` for the members of a run.

    A record that no peer owns is stored as a copy that its storing member owns. Otherwise a stranger could displace it,
    by storing any bytes under the same name with a later expiration.
    """

    def __init__(self, dht: Records, membership: Membership, clock: Callable[[], float] = time.time) -> None:
        self.peer_id = dht.peer_id
        self.membership = membership
        self._dht, self._clock = dht, clock

    async def store(self, key: str, subkey: str, value: bytes, ttl_s: float, *, owned: bool = True) -> bool:
        """As `Records.store`.

        Raises:
            ConfigError: this peer's invitation allows only to read, so members would leave the record out.
        """
        check_record(key, subkey, value, ttl_s)
        if (own := self.membership.own).role == "observer":
            mend = "use an invitation as a worker"
            raise ConfigError("allows to read the run, and to change nothing", key="invite", value=own.name, mend=mend)
        hello = self.membership.hello
        value = len(hello).to_bytes(_LENGTH_BYTES, "big") + hello + value
        if len(value) > VALUE_BYTES_MAX - SEAL_BYTES:
            raise ValueError(f"the record {key}/{subkey} has no room for its certificate and its seal")
        hidden = self.membership.hidden(key)
        if not owned and await self._others_keep(hidden, subkey, ttl_s):
            return True
        name = subkey if subkey.partition("/")[0] == self.peer_id else f"{self.peer_id}{_COPY}{subkey}"
        return await self._dht.store(hidden, name, self.membership.seal(_place(hidden, name), value), ttl_s)

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        newest: dict[str, tuple[bytes, float]] = {}
        for _, subkey, value, until in await self._opened(self.membership.hidden(key)):
            if until > newest.get(subkey, (b"", 0.0))[1]:
                newest[subkey] = value, until
        return newest

    def sign(self, kind: bytes, statement: bytes) -> str:
        return self._dht.sign(kind, statement)

    def signed_by(self, peer: str, proof: str, kind: bytes, statement: bytes) -> bool:
        return self._dht.signed_by(peer, proof, kind, statement)

    async def _opened(self, hidden: str) -> list[tuple[str, str, bytes, float]]:
        """The records that members have sealed, as (owner, subkey, value, expiration). A copy of a record that another
        peer owns is left out: the copy's owner could have written anything into it."""
        opened = []
        for turn, (name, (sealed, until)) in enumerate((await self._dht.fetch(hidden)).items(), start=1):
            owner, _, copied = name.partition(_COPY)
            owner = owner.partition("/")[0]
            if (value := self._content(owner, _place(hidden, name), sealed)) is not None and not _owned(copied):
                opened.append((owner, copied or name, value, until))
            if turn % 64 == 0:
                await asyncio.sleep(0)  # strangers may have stored many
        return opened

    def _content(self, owner: str, place: bytes, sealed: bytes) -> bytes | None:
        """The value that a record holds; None if its owner isn't a member that may store records."""
        content = self.membership.open(place, sealed)
        if content is None:
            return None
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "big")
        try:
            member = self.membership.admit(owner, content[_LENGTH_BYTES:end], self._clock())
        except Stranger:
            return None
        return None if member.role == "observer" else content[end:]

    async def _others_keep(self, hidden: str, subkey: str, ttl_s: float) -> bool:
        """Whether at least `COPIES` other members keep copies of this record that live for half of `ttl_s` or
        longer."""
        late = self._clock() + ttl_s / 2
        try:
            found = await self._opened(hidden)
        except Unreachable:
            return False
        kept = [owner for owner, name, _, until in found if name == subkey and until >= late]
        return len(set(kept) - {self.peer_id}) >= COPIES


def _owned(subkey: str) -> bool:
    """Whether a subkey is a peer's own: its id, or one that begins with its id and a slash."""
    return PEER_ID.fullmatch(subkey.partition("/")[0]) is not None


def _place(hidden: str, name: str) -> bytes:
    """Name the place for which a value is sealed: its key, and its name with the owner. Anywhere else the value can't
    be decrypted."""
    return f"{hidden}/{name}".encode()
