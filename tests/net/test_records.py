"""Which records of the DHT are believed."""

from __future__ import annotations

import time

import msgpack
import pytest

pytestmark = pytest.mark.real  # it imports Hivemind


def test_invalid_records_are_not_believed() -> None:
    """Plain, wrongly signed, oversized, long-lived and undecodable ones."""
    from hivemind.dht.validation import DHTRecord
    from hivemind.utils.crypto import RSAPrivateKey

    from p2p_diloco.net.records import SignedRecords

    mine, theirs = SignedRecords(RSAPrivateKey()), SignedRecords(RSAPrivateKey())
    soon = time.time() + 60

    def record(name: bytes, value: bytes, until: float = soon, signer: SignedRecords = mine) -> DHTRecord:
        bare = DHTRecord(b"key", msgpack.packb(name), value, until)
        return DHTRecord(b"key", msgpack.packb(name), signer.sign_value(bare), until)

    value = msgpack.packb(b"1")
    owned = b"x" + mine.local_public_key
    assert theirs.validate(record(b"free", value))
    assert theirs.validate(record(owned, value))
    assert theirs.validate(record(owned, msgpack.packb(bytes(1024))))
    assert not theirs.validate(record(owned, value, signer=theirs))
    assert not theirs.validate(DHTRecord(b"key", msgpack.packb(owned), record(owned, value).value, soon + 1))
    assert not theirs.validate(record(b"x[owner:ssh-rsa garbage]", value + b"[signature:abc]"))
    assert not theirs.validate(record(b"free", msgpack.packb(bytes(1025))))
    assert not theirs.validate(record(b"free" * 500, value))
    assert not theirs.validate(record(b"free", value, until=time.time() + 1e7))
    assert not theirs.validate(record(b"free", b"\xc1 no msgpack"))
    assert not theirs.validate(record(b"free", msgpack.packb(["a", "list"])))
    for reserved in (msgpack.packb(None), b""):
        assert not theirs.validate(DHTRecord(b"key", reserved, value, soon))
