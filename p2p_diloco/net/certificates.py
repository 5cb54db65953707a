"""The certificates of a private run (X.509), their one check, and the run key, which signs grants and revocations.

    run key    CN=<run key, hex>                    may sign grants; each peer computes this certificate, none sends it
      grant    O=<role>, CN=<name>, title=<expiry>, UID=<peer id, or none>, serialNumber=<id><sum>    may sign leaves
        leaf   CN=peer; its key is the peer's identity, from which the peer's id follows

A peer shows its **chain**: grant and leaf, in DER. Role, name, expiry and allowed peer are in the leaf's issuer, so a
leaf that TLS has verified says all of it. OpenSSL takes names for equal that differ in case or spaces; the sum (of the
exact texts) fits only the spelling that the run key signed.

Law: works on keys and bytes. It uses no socket and reads no clock: `now` is an argument, in seconds since 1970. Only
the run key's own file is read and written here. A certificate has one form, that in which it is made here.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.private_files import read_private, write_new
from p2p_diloco.net.signing import (
    PEER_ID,
    SIGNATURE_BYTES,
    as_text,
    derived,
    from_text,
    octets,
    pack,
    peer_id_of,
    private_key,
    public_key,
    public_of,
    sign,
    signed,
    unpack,
)  # fmt: skip

ROLES = ("worker", "aggregator", "observer")
"""What a grant may allow: to train and aggregate, only to aggregate, or only to read."""
CHAIN_BYTES_MAX = 1100
"""The longest chain; a longer one isn't read."""
BANNED_MAX = 100
"""The most grants that one list of revocations names, so that the list fits into one DHT record."""
FOREVER = 253_402_214_400
"""The end of the year 9999, the last time that a certificate can name, in seconds since 1970."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
"""The names that a grant or a run may have."""

_KIND, _VERSION = "p2p_diloco run key", 1
_EPOCH = datetime(1970, 1, 1)
_Key = Ed25519PrivateKey
_Issuer = tuple[x509.Name, bytes]  # and the id of its key
_ANYBODY = Ed25519PrivateKey.from_private_bytes(bytes(32))  # signs where only the bytes before the signature matter
_O, _CN, _TITLE = NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME, NameOID.TITLE
_UID, _SERIAL = NameOID.USER_ID, NameOID.SERIAL_NUMBER
_PEER = x509.Name([x509.NameAttribute(_CN, "peer")])

log = logging.getLogger(__name__)


class Stranger(Exception):
    """The peer is not a member of this run. The text is the same for every reason, so that a stranger learns nothing;
    this peer's debug log has the reason."""

    def __init__(self) -> None:
        super().__init__("not a member of this run")


@dataclass(frozen=True, slots=True)
class Grant:
    """What the run key allows: whoever holds the grant's private key may take part in the run `run` (the run key's
    public half) in this role, until `expires` (seconds since 1970). `peer`: the libp2p id of the only peer that may use
    the grant; None: any peer may. `der`: its certificate; empty if only a leaf was seen."""

    run: bytes
    id: bytes
    role: str
    name: str
    expires: int
    peer: str | None = None
    der: bytes = b""

    @classmethod
    def named(cls, run: bytes, subject: x509.Name) -> Grant:
        """Read a grant's subject.

        Raises:
            ValueError, KeyError: it isn't exactly as `subject` writes it.
        """
        texts = {part.oid: str(part.value) for part in subject}
        id, role, name = bytes.fromhex(texts[_SERIAL][:16]), texts[_O], texts[_CN]
        grant = cls(run, id, role, name, int(texts[_TITLE]), texts.get(_UID))
        if role not in ROLES or not NAME.fullmatch(name) or grant.subject.public_bytes() != subject.public_bytes():
            raise ValueError("the grant has another form")
        return grant

    @classmethod
    @lru_cache(maxsize=256)  # many peers may have one invitation
    def read(cls, der: bytes, runs: frozenset[bytes] | None = None) -> Grant:
        """Read a grant's certificate. `runs`: the run keys of which one must have signed it; None: any run key may.

        Raises:
            Exception: the bytes are no grant, or the run key that they name didn't sign it.
        """
        certificate = x509.load_der_x509_certificate(der)
        [run_name] = certificate.issuer
        run = bytes.fromhex(str(run_name.value))
        if runs is not None and run not in runs:
            raise ValueError("the grant is of another run")
        grant = replace(cls.named(run, certificate.subject), der=der)
        _check_form(der, grant.certificate(grant.public, _ANYBODY))
        certificate.verify_directly_issued_by(authority(run))
        return grant

    def check_time(self, now: float) -> None:
        """Raise ConfigError if the grant has expired. `now`: seconds since 1970."""
        if self.expires <= now:
            raise ConfigError("has expired", key="invite", value=self.name, mend="ask for a new invitation")

    @property
    def subject(self) -> x509.Name:
        texts = {_O: self.role, _CN: self.name, _TITLE: str(self.expires)} | ({_UID: self.peer} if self.peer else {})
        summed = sha256("\0".join(texts.values()).encode()).digest()[:8]
        texts[_SERIAL] = (self.id + summed).hex()
        return x509.Name([x509.NameAttribute(oid, text) for oid, text in texts.items()])

    @property
    def public(self) -> bytes:
        """The public half of the grant's key."""
        return _public_in(x509.load_der_x509_certificate(self.der))

    def certificate(self, public: bytes, signer: _Key) -> x509.Certificate:
        """The certificate of this grant and its key, signed with the run key."""
        return _certificate(_issuer(self.run), self.subject, public, self.expires, signer, ca=(self.id, 0))

    def leaf(self, peer: bytes, signer: _Key) -> x509.Certificate:
        """The certificate of the peer with this public key, signed with the grant's key."""
        return _certificate((self.subject, self.id), _PEER, peer, self.expires, signer)


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
            ConfigError: the role, the name or the peer can't be used.
        """
        if role not in ROLES:
            raise ConfigError("is no role", key="role", value=role, mend=f"choose {', '.join(ROLES)}")
        if not NAME.fullmatch(name):
            mend = "use up to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit"
            raise ConfigError("is not a name that can be used", key="name", value=name, mend=mend)
        if not (peer is None or PEER_ID.fullmatch(peer)):
            raise ConfigError("is no peer id", key="peer", value=peer, mend="give the id that begins with 12D3KooW")
        grant, seed = Grant(self.public, os.urandom(8), role, name, int(expires), peer), os.urandom(32)
        made = grant.certificate(public_of(seed), private_key(self._seed))
        return replace(grant, der=made.public_bytes(Encoding.DER)), seed

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


def admit(leaf: bytes, run: bytes, peer: str, now: float, banned: frozenset[bytes] = frozenset()) -> Grant:
    """The grant by which a peer is a member of this run. `leaf`: the certificate (DER) that TLS has verified. `peer`:
    the peer that is expected. `banned`: the ids of revoked grants.

    Raises:
        Stranger: the peer is not a member.
    """
    try:
        shown_by, grant = _read_leaf(leaf, run)
        if shown_by != peer or grant.peer not in (None, peer):
            raise ValueError("the certificate is of another peer")
        if grant.expires <= now:
            raise ValueError("the certificate has expired")
        if grant.id in banned:
            raise ValueError(f"the grant {grant.id.hex()} ({grant.name}) is revoked")
    except Exception as error:  # the parser raises exceptions of many kinds
        log.debug("%s is not a member: %r", peer, error)
        raise Stranger from None
    return grant


def admit_chain(
    chain: bytes, peer: str, now: float, runs: frozenset[bytes] | None = None, banned: frozenset[bytes] = frozenset()
) -> Grant:
    """As `admit`, where no TLS has verified the leaf. `runs`: the runs of which the peer must be a member; None: any.

    Raises:
        Stranger: the peer is not a member.
    """
    try:
        leaf, run = _verified(chain, runs)
    except Exception as error:  # the parser raises exceptions of many kinds
        log.debug("%s is not a member: %r", peer, error)
        raise Stranger from None
    return admit(leaf, run, peer, now, banned)


def chain_of(grant: Grant, seed: bytes, peer: bytes) -> bytes:
    """The chain of the peer with this public key, made with the private seed of a grant."""
    return grant.der + grant.leaf(peer, private_key(seed)).public_bytes(Encoding.DER)


def split(chain: bytes) -> tuple[bytes, bytes]:
    """The grant and the leaf of a chain."""
    end = 4 + int.from_bytes(chain[2:4], "big")  # a DER header: type, length of the length, length
    return chain[:end], chain[end:]


@lru_cache(maxsize=64)
def authority(run: bytes) -> x509.Certificate:
    """The certificate of a run key. Its signature is anybody's: a certificate that is trusted proves nothing by it."""
    name, id = _issuer(run)
    return _certificate((name, id), name, run, FOREVER, _ANYBODY, ca=(id, 1))


# cached, because every stream and every record begins with a chain
@lru_cache(maxsize=1024)
def _verified(chain: bytes, runs: frozenset[bytes] | None) -> tuple[bytes, bytes]:
    """The leaf of a chain, and its run, once the signatures have been checked. Raises exceptions of many kinds."""
    if len(chain) > CHAIN_BYTES_MAX:
        raise ValueError("the chain is too long")
    granted, leaf = split(chain)
    grant = Grant.read(granted, runs)
    x509.load_der_x509_certificate(leaf).verify_directly_issued_by(x509.load_der_x509_certificate(granted))
    return leaf, grant.run


@lru_cache(maxsize=1024)
def _read_leaf(leaf: bytes, run: bytes) -> tuple[str, Grant]:
    """The peer that a leaf is of, and the grant in its issuer. Raises exceptions of many kinds."""
    certificate = x509.load_der_x509_certificate(leaf)
    key, grant = _public_in(certificate), Grant.named(run, certificate.issuer)
    _check_form(leaf, grant.leaf(key, _ANYBODY))
    return peer_id_of(key), grant


def _check_form(der: bytes, made: x509.Certificate) -> None:
    """Check that a certificate has no other bytes than the one made here from its fields, but for the signature.

    Raises:
        ValueError: it has.
    """
    if der[:-SIGNATURE_BYTES] != made.public_bytes(Encoding.DER)[:-SIGNATURE_BYTES]:
        raise ValueError("the certificate has another form")


def _public_in(certificate: x509.Certificate) -> bytes:
    key = certificate.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("the certificate's key is of another kind")
    return key.public_bytes_raw()


def _issuer(run: bytes) -> _Issuer:
    return x509.Name([x509.NameAttribute(_CN, run.hex())]), run[:8]


def _certificate(
    issuer: _Issuer, subject: x509.Name, public: bytes, expires: int, signer: _Key, ca: tuple[bytes, int] | None = None
) -> x509.Certificate:
    """Make a certificate. `ca`: for one that may sign others, the id of its key, and how many may follow below."""
    signs, no = ca is not None, False
    tls = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer[0])
        .subject_name(subject)
        .public_key(public_key(public))
        .serial_number(1)
        .not_valid_before(datetime(2000, 1, 1))  # other clocks may be wrong
        .not_valid_after(_EPOCH + timedelta(seconds=expires))
        .add_extension(x509.BasicConstraints(signs, ca and ca[1]), critical=True)
        .add_extension(x509.KeyUsage(not signs, no, no, no, no, signs, no, no, no), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier(issuer[1], None, None), critical=False)
        .add_extension(x509.SubjectKeyIdentifier(ca[0]) if ca else tls, critical=False)
        .sign(signer, None)
    )
