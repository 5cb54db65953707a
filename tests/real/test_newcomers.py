"""A newcomer to a run of real peers, one of which was killed, is counted; and all peers report the same of each
epoch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from newcomers import CASES, Case, plays
from warm import Nursery

SHORT = {
    "tiny": replace(CASES["tiny"], exchanges=150),
    "three-million": replace(CASES["ten-million"], numel=3_000_000, shard_elements=2**18),
    "unlike": replace(CASES["unlike"], exchanges=30),
}

pytestmark = [pytest.mark.real, pytest.mark.slow]


def check(case: Case, times: int, seed: int, folder: Path, nursery: Nursery | None = None) -> None:
    """Every law holds in each of this many plays."""
    for number, played in enumerate(plays(case, times, Random(seed), folder, nursery), 1):
        if played.broken:
            pytest.fail("\n".join([f"play {number}: {played}", *played.broken]), pytrace=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHORT)
def test_a_newcomer_is_counted(name: str, tmp_path: Path, nursery: Nursery | None) -> None:
    """From its second exchange on, in all shards, in rounds of some ms, in rounds shorter than a heartbeat with many
    shards, and with a peer that is three times slower; its `sync_count` is the number of outer steps that counted it,
    and two looks at one epoch have the same digest and θ."""
    check(SHORT[name], 1, 1, tmp_path, nursery)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_ten_newcomers_are_counted(name: str, tmp_path: Path) -> None:
    """Ten times, whichever peer is killed, at any time."""
    check(CASES[name], 10, 2, tmp_path)
