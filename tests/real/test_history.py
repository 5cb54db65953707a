"""What real peers' histories keep to themselves; tests/real/test_life.py shows what they tell."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from nodes import Field

from tests.net.members import KEY

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_a_history_has_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the files of a private run's peers nor what is compressed in them have the members' secret, the seed of
    a grant, the run key, the run's token, or an address."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    field = Field("ab", audit_rate=1.0)
    try:
        field.do(field.goes_on(4))
        salt = field.nodes[0].access.member.token_salt  # type: ignore[union-attr]
        secrets = {"the run's token": field.run(salt).token, "the salt": salt, "the run key": KEY._seed}
        for node in field.nodes:
            secrets[f"the seed of {node.setup.local.name}"] = node.invited.seed
            secrets[f"the members' secret of {node.setup.local.name}"] = node.invited.secret
        addresses = [address.encode() for address in field.addresses]
    finally:
        field.end()
    paths = sorted(tmp_path.glob("p2p_diloco/history/r/*"))
    assert len(paths) == 2
    for path in paths:
        content = path.read_bytes()
        plain = gzip.decompress(content)
        assert b"Slice" in plain
        for what, secret in secrets.items():
            for form in (secret, secret.hex().encode()):
                assert form not in content, what
                assert form not in plain, what
        for shown in (*addresses, b"/ip4/", b"/tcp/"):
            assert shown not in plain
