"""Members of private runs, for tests."""

from __future__ import annotations

import time
from hashlib import sha256

from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.membership import Membership
from p2p_diloco.net.signing import SigningKey
from p2p_diloco.net.tls import Tls

KEY, OTHER_KEY = RunKey(b"k" * 32), RunKey(b"o" * 32)
ADDRESS = "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW" + "A" * 44
DAY_S = 86_400.0
OPEN = Invitation.anybody("real")
"""The invitation to an open run."""


def invitation(
    role: str = "worker", name: str = "alice", key: RunKey = KEY, life_s: float = DAY_S, peer: str | None = None
) -> Invitation:
    """A new invitation."""
    grant, seed = key.grant(role, name, time.time() + life_s, peer)
    return Invitation("real", (ADDRESS,), grant, seed, key.secret)


def membership(peer: str, invited: Invitation | None = None) -> Membership:
    """A peer's membership, by an invitation of its own or by the given one."""
    return Membership(invited or invitation(), peer, time.time())


def revocation(*invited: Invitation, number: int = 1, key: RunKey = KEY) -> bytes:
    """The signed revocation of these invitations."""
    return key.sign_revocations(number, [one.grant.id for one in invited])


def id_of(name: str) -> str:
    """The id of the peer that a test calls by this name: it holds a public key, as every id does."""
    return key_of(name).peer_id


def key_of(name: str) -> SigningKey:
    """The identity of the peer that a test calls by this name."""
    return SigningKey(sha256(name.encode()).digest())


def tls_of(key: SigningKey, invited: Invitation = OPEN) -> Tls:
    """A peer's end of the handshake."""
    return Tls(membership(key.peer_id, invited), key)
