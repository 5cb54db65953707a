"""What the run key of a private run signs (grants, revocations), and the certificates that peers make from grants.

Law: works on keys and bytes. It uses no socket and reads no clock: `now` is an argument, in seconds since 1970. Only
the run key's own file is read and written here.

The run key signs a grant. The grant's key signs the certificate of one peer, which that peer shows to others. Neither
private key is sent to other peers, and a certificate is worthless to any peer but its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.private_files import read_private, write_new
from p2p_diloco.net.statements import as_text, derived, from_text, moment, octets, pack, public_of, sign, signed, unpack

ROLES = ("worker", "aggregator", "observer")
"""What a grant may allow: to train and aggregate, only to aggregate, or only to read."""
HELLO_BYTES_MAX = 1024
"""The longest packed certificate; a longer one isn't read."""
BANNED_MAX = 100
"""The most grants that one list of revocations names, so that the list fits into one DHT record."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
"""The names that a grant or a run may have."""

_KIND, _VERSION = "p2p_diloco run key", 1


@dataclass(frozen=True, slots=True)
class Grant:
    """What the run key allows: whoever holds the private key to `public` may take part in the run `run` (the run key's
    public half) in this role, until `expires` (seconds since 1970). `peer`: the libp2p id of the only peer that may use
    the grant; None: any peer may."""

    run: bytes
    id: bytes
    role: str
    name: str
    expires: int
    peer: str | None
    public: bytes
    signature: bytes
    """The run key's signature of all other fields."""

    @property
    def statement(self) -> bytes:
        """The bytes that the run key signs."""
        return pack(*(getattr(self, field.name) for field in fields(self)[:-1]))

    @staticmethod
    def read(statement: bytes, signature: bytes) -> Grant:
        """Read a grant, and check its fields and its signature.

        Raises:
            ValueError: the bytes are no grant, or the run key that they name didn't sign it.
        """
        run, id, role, name, expires, peer, public = unpack(statement, 7)
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"the grant's role is none of {', '.join(ROLES)}")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError("the grant's name can't be used")
        if not (peer is None or isinstance(peer, str)):
            raise ValueError("the grant's peer can't be used")
        if not signed(octets(run, 32), signature, b"grant", statement):
            raise ValueError("the run key did not sign the grant")
        return Grant(octets(run, 32), octets(id, 8), role, name, moment(expires), peer, octets(public, 32), signature)


class RunKey:
    """The key of a private run, which signs its grants, its record and its revocations. Made once, by the founder."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self.public = public_of(seed)
        """The run's identity: 32 bytes."""
        self.secret = derived(seed, b"secret of the members")
        """The secret that all members of the run share: 32 bytes, from which the key can't be computed."""

    @classmethod
    def create(cls) -> RunKey:
        return cls(os.urandom(32))

    @classmethod
    def load(cls, path: Path) -> RunKey:
        """Read a key from its file.

        Raises:
            ConfigError: the file can't be read, can be read by other users, or holds no run key.
        """
        text = read_private(path, key="run key")
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or (content["kind"], content["version"]) != (_KIND, _VERSION):
                raise ValueError("another kind of file")
            return cls(from_text(content["seed"], 32))
        except (KeyError, ValueError, RecursionError):
            mend = "name the .key file that the run's founder wrote"
            raise ConfigError("holds no run key", key="run key", value=path, mend=mend) from None

    def save(self, path: Path) -> None:
        """Write the key into a new file that only its owner may read.

        Raises:
            ConfigError: the file exists, or can't be written.
        """
        content = {"kind": _KIND, "version": _VERSION, "public": self.public.hex(), "seed": as_text(self._seed)}
        write_new(path, json.dumps(content, indent=1) + "\n", key="run key")

    def grant(self, role: str, name: str, expires: float, peer: str | None = None) -> tuple[Grant, bytes]:
        """Make a new grant; returns it with the private seed of its key.

        Raises:
            ConfigError: the role or the name can't be used.
        """
        if role not in ROLES:
            raise ConfigError("is no role", key="role", value=role, mend=f"choose {', '.join(ROLES)}")
        if not NAME.fullmatch(name):
            mend = "use up to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit"
            raise ConfigError("is not a name that can be used", key="name", value=name, mend=mend)
        seed = os.urandom(32)
        statement = pack(self.public, os.urandom(8), role, name, int(expires), peer, public_of(seed))
        return Grant.read(statement, self.sign(b"grant", statement)), seed

    def sign_revocations(self, number: int, ids: Iterable[bytes]) -> bytes:
        """Sign the list of the ids of all revoked grants. Of several lists, peers use the one with the highest number.

        Raises:
            ConfigError: the list is too long for one DHT record.
        """
        banned = sorted(set(ids))
        if len(banned) > BANNED_MAX:
            mend = "leave out grants that have expired, or found a new run"
            raise ConfigError(f"are more than {BANNED_MAX}", key="revocations", value=len(banned), mend=mend)
        statement = pack(self.public, number, b"".join(banned))
        return pack(statement, self.sign(b"revocations", statement))

    def sign(self, kind: bytes, statement: bytes) -> bytes:
        """Sign a statement of this kind: 64 bytes."""
        return sign(self._seed, kind, statement)


def is_run_key(path: Path) -> bool:
    """Whether a file holds a run key, and not for instance a peer's identity."""
    try:
        return _KIND.encode() in path.read_bytes()[:1024]
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Member:
    """A peer whose certificate was accepted. `run`: the public run key of its run."""

    peer: str
    role: str
    name: str
    grant_id: bytes
    expires: int
    run: bytes


def certificate(grant: Grant, seed: bytes, peer: str) -> bytes:
    """The certificate of one peer, made with the private seed of a grant: at most `HELLO_BYTES_MAX` bytes."""
    statement = pack(grant.statement, grant.signature, peer, grant.expires)
    return pack(statement, sign(seed, b"certificate", statement))


def member_of(peer: str, hello: bytes, now: float) -> Member:
    """Check the certificate of a peer, whatever its run is. The caller checks the run, and whether the grant is
    revoked.

    Raises:
        ValueError: the certificate isn't valid for this peer at this time.
    """
    if len(hello) > HELLO_BYTES_MAX:
        raise ValueError("the certificate is too long")
    packed, signature = unpack(hello, 2)
    statement = octets(packed)
    granted, granted_signature, named, until = unpack(statement, 4)
    if named != peer:
        raise ValueError("the certificate is of another peer")
    expires = moment(until)
    if expires <= now:
        raise ValueError("the certificate has expired")
    grant = Grant.read(octets(granted), octets(granted_signature))
    if grant.expires < expires or grant.peer not in (None, peer):
        raise ValueError("the grant does not allow this certificate")
    if not signed(grant.public, octets(signature), b"certificate", statement):
        raise ValueError("the grant's key did not sign the certificate")
    return Member(peer, grant.role, grant.name, grant.id, expires, grant.run)


def banned_by(run: bytes, packed: bytes) -> tuple[int, frozenset[bytes]]:
    """Read a signed list of revocations: its number, and the ids of the revoked grants.

    Raises:
        ValueError: it isn't a list that this run's key signed.
    """
    listed, signature = unpack(packed, 2)
    statement = octets(listed)
    named, number, joined = unpack(statement, 3)
    ids = octets(joined)
    if named != run or type(number) is not int or len(ids) % 8:
        raise ValueError("its fields can't be used")
    if not signed(run, octets(signature), b"revocations", statement):
        raise ValueError("the run key did not sign it")
    return number, frozenset(ids[at : at + 8] for at in range(0, len(ids), 8))
