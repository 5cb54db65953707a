"""Real peers' histories: what they tell of a death, and what they keep to themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from kept import ROUNDS
from nodes import Field
from swarm import Swarm

from p2p_diloco.history.order import ordered
from p2p_diloco.history.reading import check, naming, read
from p2p_diloco.history.story import Story
from p2p_diloco.node.history import GZIP
from tests.net.members import KEY

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

CONFIG = {"sync_every": 4, "outer_lr": 0.5, "codec": "fp32", "start_peers": 3,
          "heartbeat_interval": 0.5, "heartbeat_timeout": 8.0}  # fmt: skip


def test_the_story_of_a_death(swarm: Swarm, tmp_path: Path) -> None:
    """Of three peers one that aggregates is killed, and a fourth joins. The histories tell that in order and with its
    cause in fewer than 30 lines, and each of them, also the killed peer's, plays again with the same effects."""
    options = {"params": {"u": [400_000]}, "step_s": 0.05, "config": CONFIG, "local": {"history_path": str(tmp_path)}}
    swarm.bootstrap()
    alice, *others = [swarm.start(name, **options, delta=1.0) for name in ("alice", "bob", "carol")]
    for peer in (alice, *others):
        peer.epoch(ROUNDS)
    victim = others[0]
    victim.die()
    survivors = [alice, others[1]]
    reached = max(peer.reached() for peer in survivors)
    for peer in survivors:
        peer.epoch(reached + ROUNDS)
    dave = swarm.start("dave", **options, delta=1.0)
    joined = dave.wait_for("in")["epoch"]
    for peer in (*survivors, dave):
        peer.epoch(joined + ROUNDS)

    done = subprocess.run(
        [sys.executable, "-m", "p2p_diloco", "replay", str(tmp_path / "test")],
        capture_output=True, text=True, timeout=100, check=True, env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert 5 < len(lines) < 30, done.stdout
    text = " ".join(done.stdout.split())
    order = [
        r"(\w+) founds the run",
        r"\w+ joins at epoch 0",
        r"epoch 1 took .*? until \w+ may train",
        r"bob dies: its history ends without a goodbye; (alice|carol) notices within [\d.]+ s, (alice|carol) within",
        r"dave joins at epoch \d+",
    ]
    assert re.search(".*".join(order), text), done.stdout

    lives = read([tmp_path])
    assert sorted(map(naming(lives), (life.peer for life in lives))) == ["alice", "bob", "carol", "dave"]
    for life in lives:
        verdict = check(life)
        assert (verdict.at, life.gap) == (None, "")
        assert verdict.played == len(life.entries) > 50
    story = Story(ordered(lives).entries, len(lives[0].head.rules.fragments))
    for one in story.rounds[1:]:
        assert sum(hop.until - hop.since for hop in one.why) <= one.took + 1e-6


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
        plain = zlib.decompressobj(GZIP).decompress(content)
        assert b"Slice" in plain
        for what, secret in secrets.items():
            for form in (secret, secret.hex().encode()):
                assert form not in content, what
                assert form not in plain, what
        for shown in (*addresses, b"/ip4/", b"/tcp/"):
            assert shown not in plain
