"""Membership of a private run: which peers are members, and the seal of the members' records.

Law: works on keys and bytes only. It uses no socket and reads no clock: `now` is an argument, in seconds since 1970.
The bytes of other peers are untrusted: `admit`, `revoke` and `open` refuse bytes that don't fit, with the same answer
for every reason.

A peer without a `Membership` is in an open run, where every peer is taken. docs/security.md describes what membership
defends against.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
from functools import lru_cache
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.grants import (
    HELLO_BYTES_MAX,
    ROLES,
    Grant,
    Member,
    RunKey,
    banned_by,
    certificate,
    is_run_key,
    member_of,
)
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.statements import derived, signed

__all__ = [
    "HELLO_BYTES_MAX",
    "ROLES",
    "SEAL_BYTES",
    "Grant",
    "Invitation",
    "Member",
    "Membership",
    "RunKey",
    "Stranger",
    "is_run_key",
    "member_of",
]

SEAL_BYTES = 12 + 16
"""The bytes that `Membership.seal` adds: a nonce and an authentication tag."""

log = logging.getLogger(__name__)


@lru_cache(maxsize=1024)
def _shown_by(peer: str, hello: bytes) -> Member:
    """The member that shows a certificate, whenever that expires. The last ones are kept, because each record has its
    owner's. Raises ValueError."""
    return member_of(peer, hello, -math.inf)


class Stranger(Exception):
    """The peer is not a member of this run. The text is the same for every reason, so that a stranger learns nothing;
    this peer's debug log has the reason."""

    def __init__(self) -> None:
        super().__init__("not a member of this run")


class Membership:
    """This peer's own membership of one run."""

    def __init__(self, invitation: Invitation, peer_id: str, now: float) -> None:
        """Make this peer's certificate.

        Raises:
            ConfigError: the invitation has expired, or is for another peer.
        """
        grant = invitation.grant
        if grant.expires <= now:
            raise ConfigError("has expired", key="invite", value=grant.name, mend="ask for a new invitation")
        if grant.peer not in (None, peer_id):
            mend = f"use --identity-path with the identity of {grant.peer}"
            raise ConfigError(
                f"is for another peer than this one, {peer_id}", key="invite", value=grant.name, mend=mend
            )
        self.run = grant.run
        """The run's identity: the run key's public half."""
        self.hello = certificate(grant, invitation.seed, peer_id)
        """This peer's certificate, which it shows to others."""
        self.own = member_of(peer_id, self.hello, now)
        self.banned: frozenset[bytes] = frozenset()
        """The ids of the revoked grants."""
        self.revocations: bytes | None = None
        """The signed list of revocations, to pass on; None: there is none yet."""
        self.number = -1
        """The number of the list in `revocations`; -1: there is none yet."""
        self.token_salt = derived(invitation.secret, b"token")
        """Mixed into the run's token, which its messages carry."""
        self._sealing = ChaCha20Poly1305(derived(invitation.secret, b"records"))
        self._hiding = derived(invitation.secret, b"names of records")

    def admit(self, peer: str, hello: bytes, now: float) -> Member:
        """Check the certificate that a peer shows. `peer`: the id that the connection has proven.

        Raises:
            Stranger: the peer is not a member of this run.
        """
        try:
            member = _shown_by(peer, hello)
            if member.expires <= now:
                raise ValueError("the certificate has expired")
            if member.run != self.run:
                raise ValueError("the certificate is of another run")
            if member.grant_id in self.banned:
                raise ValueError(f"the grant {member.grant_id.hex()} ({member.name}) is revoked")
        except ValueError as error:
            log.debug("%s is not a member: %s", peer, error)
            raise Stranger from None
        return member

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
        return self.own.grant_id in self.banned

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
