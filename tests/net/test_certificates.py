"""The chain run key, grant, leaf: what our check takes, and what TLS with OpenSSL takes of it. Bytes of strangers lead
to `Stranger`, with one text, never to another error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from p2p_diloco.errors import ConfigError
from p2p_diloco.net import certificates
from p2p_diloco.net.certificates import (
    Grant,
    RunKey,
    Stranger,
    admit,
    admit_chain,
    chain_of,
    split,
)  # fmt: skip
from p2p_diloco.net.signing import key_in, private_key, public_of
from tests.net.members import id_of, key_of

NOW = 1_800_000_000.0
DAY = 86_400
ALICE, BOB, EVE = map(id_of, ("alice", "bob", "eve"))
KEY, OTHER = RunKey(b"k" * 32), RunKey(b"o" * 32)
RUNS = frozenset([KEY.public])
GRANT, SEED = KEY.grant("worker", "alice", NOW + DAY)
CHAIN = chain_of(GRANT, SEED, key_in(BOB))
RUN_SIGNER, SIGNER = Ed25519PrivateKey.from_private_bytes(b"k" * 32), private_key(SEED)


def der(made: x509.Certificate) -> bytes:
    return made.public_bytes(Encoding.DER)


def test_a_member_is_admitted_by_what_its_grant_says_until_it_ends() -> None:
    # A member is admitted by what its grant says. By the whole chain, or by a leaf that TLS has verified.
    assert admit_chain(CHAIN, BOB, NOW, RUNS) == replace(GRANT, der=b"")
    assert admit_chain(CHAIN, BOB, NOW) == admit(split(CHAIN)[1], KEY.public, BOB, NOW) == replace(GRANT, der=b"")
    assert Grant.read(GRANT.der) == GRANT

    # A revoked or expired grant is refused. With the leaf alone, too.
    leaf = split(CHAIN)[1]
    assert admit(leaf, KEY.public, BOB, NOW, frozenset([b"12345678"]))
    for now, banned in ((NOW, frozenset([GRANT.id])), (NOW + DAY, frozenset[bytes]())):
        with pytest.raises(Stranger):
            admit_chain(CHAIN, BOB, now, RUNS, banned)
        with pytest.raises(Stranger):
            admit(leaf, KEY.public, BOB, now, banned)


def test_every_flipped_bit_of_a_chain_is_refused() -> None:
    """No bit is without meaning, so there is no second form of a chain."""
    for at in range(8 * len(CHAIN)):
        changed = bytearray(CHAIN)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(Stranger):
            admit_chain(bytes(changed), BOB, NOW)


def chained(granted: x509.Certificate | bytes, leaf: x509.Certificate) -> bytes:
    return (granted if isinstance(granted, bytes) else der(granted)) + der(leaf)


def spelt(name: x509.Name) -> Grant:
    """This run's grant under another subject."""

    class Spelt(Grant):
        subject = name  # type: ignore[assignment]

    return Spelt(GRANT.run, GRANT.id, GRANT.role, GRANT.name, GRANT.expires)


def changed(old: str, new: str) -> Grant:
    parts = [x509.NameAttribute(p.oid, str(p.value).replace(old, new), _type=p._type) for p in GRANT.subject]
    return spelt(x509.Name(parts))


def other_case() -> list[Grant]:
    """The grant's subject with each letter in the other case."""
    made = []
    for place, part in enumerate(GRANT.subject):
        text, parts = str(part.value), list(GRANT.subject)
        for at in (at for at, letter in enumerate(text) if letter.isalpha()):
            swapped = text[:at] + text[at].swapcase() + text[at + 1 :]
            parts[place] = x509.NameAttribute(part.oid, swapped, _type=part._type)
            made.append(spelt(x509.Name(parts)))
    return made


def in_another_form() -> list[Grant]:
    """In another order, with one attribute more, twice or less, in another type of string, as one set."""
    parts = list(GRANT.subject)
    more = x509.NameAttribute(NameOID.LOCALITY_NAME, "here")
    printable = [x509.NameAttribute(p.oid, str(p.value), _type=x509.name._ASN1Type.PrintableString) for p in parts]
    names = [parts[::-1], [*parts, more], [*parts, parts[0]], parts[1:], parts[:-1], printable]
    one_set = x509.Name([x509.RelativeDistinguishedName(parts)])
    return [*(spelt(x509.Name(name)) for name in names), spelt(one_set)]


def test_a_grant_has_one_spelling() -> None:
    """OpenSSL takes names for equal that differ in case or spaces; the sum fits one alone. Neither below the true
    grant, nor below a grant of that spelling, is a leaf taken."""
    others = [changed("worker", "king"), changed("alice", "a b"), changed("1800", "1900")]
    for grant in (*other_case(), *in_another_form(), *others):
        leaf = grant.leaf(key_in(BOB), SIGNER)
        for shown in (chained(GRANT.der, leaf), chained(grant.certificate(GRANT.public, RUN_SIGNER), leaf)):
            with pytest.raises(Stranger):
                admit_chain(shown, BOB, NOW)
        with pytest.raises(Stranger):
            admit(der(leaf), KEY.public, BOB, NOW)


def below_a_leaf() -> bytes:
    """A grant that a member signs with its own identity, as if it were the run."""
    false = RunKey(key_of("bob")._seed)
    granted, seed = false.grant("worker", "eve", NOW + DAY)
    return chain_of(granted, seed, key_in(EVE))


def a_grant_below(above: Grant, seed: bytes) -> bytes:
    """Grant and leaf that the holder of a grant has signed."""
    below, key = replace(above, id=b"12345678", der=b""), private_key(b"s" * 32)
    made = certificates._certificate(
        (above.subject, above.id), below.subject, public_of(b"s" * 32), below.expires, private_key(seed),
        ca=(below.id, 0),
    )  # fmt: skip
    return chained(made, below.leaf(key_in(EVE), key))


def by_another_run_key() -> bytes:
    granted = GRANT.certificate(GRANT.public, Ed25519PrivateKey.from_private_bytes(b"o" * 32))
    return chained(granted, GRANT.leaf(key_in(EVE), SIGNER))


def ending_later() -> bytes:
    """The names of the grant, and a later end."""
    issuer, end = (GRANT.subject, GRANT.id), int(NOW + 9 * DAY)
    return chained(GRANT.der, certificates._certificate(issuer, certificates._PEER, key_in(EVE), end, SIGNER))


LATER = replace(GRANT, expires=int(NOW + 9 * DAY))


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(lambda: CHAIN, id="of another peer"),
        pytest.param(lambda: chain_of(*OTHER.grant("worker", "eve", NOW + DAY), key_in(EVE)), id="of another run"),
        pytest.param(lambda: chain_of(*KEY.grant("worker", "eve", NOW), key_in(EVE)), id="expired"),
        pytest.param(lambda: chain_of(*KEY.grant("worker", "eve", NOW + DAY, ALICE), key_in(EVE)), id="for another"),
        pytest.param(lambda: chain_of(GRANT, b"x" * 32, key_in(EVE)), id="not signed with the grant's key"),
        pytest.param(lambda: chained(GRANT.der, GRANT.leaf(key_in(EVE), RUN_SIGNER)), id="signed with the run key"),
        pytest.param(by_another_run_key, id="granted by another key"),
        pytest.param(below_a_leaf, id="granted by a member"),
        pytest.param(lambda: a_grant_below(GRANT, SEED), id="granted by a grant"),
        pytest.param(lambda: chained(GRANT.der, GRANT.certificate(key_in(EVE), SIGNER)), id="a grant as a leaf"),
        pytest.param(lambda: chained(GRANT.der, LATER.leaf(key_in(EVE), SIGNER)), id="a later expiry in the issuer"),
        pytest.param(ending_later, id="a later end"),
        pytest.param(lambda: chain_of(GRANT, SEED, key_in(EVE)) + b"\0", id="longer"),
        pytest.param(lambda: chain_of(GRANT, SEED, key_in(EVE))[:-1], id="shorter"),
        pytest.param(lambda: split(CHAIN)[1] + GRANT.der, id="turned round"),
        pytest.param(lambda: GRANT.der, id="without a leaf"),
        pytest.param(lambda: b"", id="empty"),
    ],
)
def test_a_chain_not_valid_here_is_refused(shown: Callable[[], bytes], caplog: pytest.LogCaptureFixture) -> None:
    """The text is the same for every reason; the reason is in this peer's log."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Stranger, match=r"^not a member of this run$"):
        admit_chain(shown(), EVE, NOW, RUNS)
    assert EVE in caplog.text


@pytest.mark.parametrize(
    ("role", "name", "peer", "key"),
    [("king", "alice", None, "role"), ("worker", "a b", None, "name"), ("worker", "alice", "bob", "peer")],
)
def test_a_grant_has_a_known_role_a_usable_name_and_a_peer_id(role: str, name: str, peer: str | None, key: str) -> None:
    """Otherwise the error names the key."""
    with pytest.raises(ConfigError) as caught:
        KEY.grant(role, name, NOW, peer)
    assert caught.value.key == key
