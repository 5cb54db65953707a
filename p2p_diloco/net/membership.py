"""Membership of a private run: which peers are members, and the members' records in the DHT.

Law: works on keys and bytes, and wraps one `Records` in another. The bytes of other peers are untrusted: `admit`,
`revoke` and `open` refuse bytes that don't fit, with the same answer for every reason. Strangers share the DHT: of each
record they see its subkey, its owner's id, its length and its expiration, and nothing else.

A peer without a `Membership` is in an open run, where every peer is taken. docs/security.md describes what membership
defends against.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections.abc import Callable
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.certificates import Grant, Stranger, admit_chain, banned_by, chain_of, split
from p2p_diloco.net.interface import VALUE_BYTES_MAX, Records, Unreachable, check_record
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.signing import PEER_ID, derived, key_in, signed

SEAL_BYTES = 12 + 16
"""The bytes that `Membership.seal` adds: a nonce and an authentication tag."""
COPIES = 3
"""A record that no peer owns isn't stored once more while this many other members keep copies of it."""

_COPY = "/~"
"""Stands between the id of the member that stored a record which no peer owns, and the record's own name."""

log = logging.getLogger(__name__)


class Membership:
    """This peer's own membership of one run."""

    def __init__(self, invitation: Invitation, peer_id: str, now: float) -> None:
        """Make this peer's certificate. `now`: seconds since 1970.

        Raises:
            ConfigError: the invitation has expired, or is for another peer.
        """
        grant = invitation.grant
        grant.check_time(now)
        if grant.peer not in (None, peer_id):
            mend = f"use --identity-path with the identity of {grant.peer}"
            raise ConfigError(
                f"is for another peer than this one, {peer_id}", key="invite", value=grant.name, mend=mend
            )
        self.run = grant.run
        """The run's identity: the run key's public half."""
        self.own = grant
        """The grant by which this peer is a member."""
        self.peer_id = peer_id
        self.chain = chain_of(grant, invitation.seed, key_in(peer_id))
        """This peer's certificate below its grant's, which it shows to others."""
        self.banned: frozenset[bytes] = frozenset()
        """The ids of the revoked grants."""
        self.revocations: bytes | None = None
        """The signed list of revocations, to pass on; None: there is none yet."""
        self.number = -1
        """The number of the list in `revocations`; -1: there is none yet."""
        self.token_salt = derived(invitation.secret, b"token")
        """Mixed into the run's token, which its messages carry."""
        self._runs = frozenset([grant.run])
        self._sealing = ChaCha20Poly1305(derived(invitation.secret, b"records"))
        self._hiding = derived(invitation.secret, b"names of records")

    def admit(self, peer: str, chain: bytes, now: float) -> Grant:
        """The grant by which a peer is a member of this run. `peer`: the id that the connection has proven.

        Raises:
            Stranger: the peer is not a member of this run.
        """
        return admit_chain(chain, peer, now, self._runs, self.banned)

    def revoke(self, packed: bytes) -> bool:
        """Take a signed list of revocations. False: it is not valid, or not newer than the last one."""
        try:
            number, banned = banned_by(self.run, packed)
        except ValueError as error:
            log.debug("a list of revocations is not valid: %s", error)
            return False
        if number <= self.number:
            return False
        self.number, self.banned, self.revocations = number, banned, packed
        return True

    @property
    def revoked(self) -> bool:
        """Whether this peer's own grant is revoked."""
        return self.own.id in self.banned

    def by_the_run_key(self, kind: bytes, statement: bytes, signature: bytes) -> bool:
        """Whether the run key signed this statement of this kind."""
        return signed(self.run, signature, kind, statement)

    def seal(self, name: bytes, value: bytes) -> bytes:
        """Encrypt a value for the members. It can be decrypted only under the same name. Encryption adds
        `SEAL_BYTES`."""
        nonce = os.urandom(12)  # random: one key must encrypt fewer than 2**32 values, and a run stores far fewer
        return nonce + self._sealing.encrypt(nonce, value, name)

    def open(self, name: bytes, sealed: bytes) -> bytes | None:
        """Decrypt a value that a member sealed under this name; None if no member has sealed it."""
        try:
            return self._sealing.decrypt(sealed[:12], sealed[12:], name)
        except (InvalidTag, ValueError):
            return None

    def hidden(self, key: str) -> str:
        """The DHT key under which the members store a record's key: strangers can neither guess nor read it."""
        return hmac.new(self._hiding, key.encode(), sha256).hexdigest()


class SealedRecords:
    """A `Records` for the members of a run. Each record begins with its owner's chain. Records that no member has
    sealed are left out, and so are those of members whose grant was revoked, has expired, or allows only to read.

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
        value = self.membership.chain + value
        if len(value) > VALUE_BYTES_MAX - SEAL_BYTES:
            raise ValueError(f"the record {key}/{subkey} has no room for its certificate and its seal")
        hidden = self.membership.hidden(key)
        if not owned and await self._others_keep(hidden, subkey, ttl_s):
            return True
        name = subkey if subkey.partition("/")[0] == self.peer_id else f"{self.peer_id}{_COPY}{subkey}"
        return await self._dht.store(hidden, name, self.membership.seal(_place(hidden, name), value), ttl_s)

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        newest: dict[str, tuple[bytes, float]] = {}
        for _, _, subkey, value, until in await self._opened(self.membership.hidden(key)):
            if until > newest.get(subkey, (b"", 0.0))[1]:
                newest[subkey] = value, until
        return newest

    async def grants(self, key: str) -> dict[str, Grant]:
        """By peer, the grant by which it is a member, as the records that it has stored under this key prove."""
        return {owner: grant for owner, grant, *_ in await self._opened(self.membership.hidden(key))}

    def sign(self, kind: bytes, statement: bytes) -> str:
        return self._dht.sign(kind, statement)

    def signed_by(self, peer: str, proof: str, kind: bytes, statement: bytes) -> bool:
        return self._dht.signed_by(peer, proof, kind, statement)

    async def _opened(self, hidden: str) -> list[tuple[str, Grant, str, bytes, float]]:
        """The records that members have sealed, as (owner, its grant, subkey, value, expiration). A copy of a record
        that another peer owns is left out: the copy's owner could have written anything into it."""
        opened = []
        for turn, (name, (sealed, until)) in enumerate((await self._dht.fetch(hidden)).items(), start=1):
            owner, _, copied = name.partition(_COPY)
            owner = owner.partition("/")[0]
            if (found := self._content(owner, _place(hidden, name), sealed)) is not None and not _owned(copied):
                opened.append((owner, found[0], copied or name, found[1], until))
            if turn % 16 == 0:
                await asyncio.sleep(0)  # there may be many, and a chain that is new takes a millisecond to check
        return opened

    def _content(self, owner: str, place: bytes, sealed: bytes) -> tuple[Grant, bytes] | None:
        """The owner's grant, and the value that its record holds; None if it isn't a member that may store records."""
        content = self.membership.open(place, sealed)
        if content is None:
            return None
        granted, rest = split(content)
        leaf, value = split(rest)
        try:
            member = self.membership.admit(owner, granted + leaf, self._clock())
        except Stranger:
            return None
        return None if member.role == "observer" else (member, value)

    async def _others_keep(self, hidden: str, subkey: str, ttl_s: float) -> bool:
        """Whether at least `COPIES` other members keep copies of this record that live for half of `ttl_s` or
        longer."""
        late = self._clock() + ttl_s / 2
        try:
            found = await self._opened(hidden)
        except Unreachable:
            return False
        kept = [owner for owner, _, name, _, until in found if name == subkey and until >= late]
        return len(set(kept) - {self.peer_id}) >= COPIES


def _owned(subkey: str) -> bool:
    """Whether a subkey is a peer's own: its id, or one that begins with its id and a slash."""
    return PEER_ID.fullmatch(subkey.partition("/")[0]) is not None


def _place(hidden: str, name: str) -> bytes:
    """Name the place for which a value is sealed: its key, and its name with the owner. Anywhere else the value can't
    be decrypted."""
    return f"{hidden}/{name}".encode()
