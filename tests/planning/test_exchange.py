"""The model of our exchange: identities of bytes, and the rounds that were measured."""

from __future__ import annotations

import pytest

from p2p_diloco.config import RunConfig
from p2p_diloco.node.run import reply_codec_of
from p2p_diloco.planning.exchange import (
    FEEDS_BACK,
    HEADERS,
    SLICE_S,
    STEP_S,
    WIRE_BYTES,
    Codecs,
    Exchange,
    Machine,
    data_parallel,
    of_model,
    round_trips,
)
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import Layout, ParamSpec

M = 10**6
ON_LINKS = [
    # peers, parameters, Mbit/s, round trip in s, measured round in s (docs/performance.md, quiet machine)
    (2, 25 * M, (100,), 0, 4.585),
    (3, 25 * M, (100,), 0, 6.556),
    (4, 25 * M, (100,), 0, 7.240),
    (3, 25 * M, (100, 100, 20), 0, 25.5),
    (3, M, (20,), 0, 1.345),
    (8, 4 * M, (20,), 0, 7.774),
    (2, 25 * M, (500,), 0.1, 1.351),
    (2, M, (100,), 0.1, 0.386),
    (3, M, (20,), 0.2, 1.523),
    (4, 10 * M, (100,), 0.05, 3.419),
]


def exchange(
    peers: int, numel: int, mbit: tuple[float, ...] = (100,), rtt_s: float = 0, codec: str = "bf16"
) -> Exchange:
    links = mbit * peers if len(mbit) == 1 else mbit
    return of_model(numel, 1, [Machine(each * 1e6 / 8, rtt_s) for each in links], Codecs.of(codec))


@pytest.mark.parametrize(("peers", "numel", "mbit", "rtt_s", "measured_s"), ON_LINKS)
def test_measured_rounds_are_met_within_a_tenth(
    peers: int, numel: int, mbit: tuple[float, ...], rtt_s: float, measured_s: float
) -> None:
    assert exchange(peers, numel, mbit, rtt_s).seconds == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize("codec", codecs.CODECS)
def test_bytes_of_a_parameter_are_the_codecs(codec: str) -> None:
    numel = 2**20
    assert WIRE_BYTES[codec] * numel == pytest.approx(codecs.nbytes(codec, numel), rel=1e-6)
    assert (codec in FEEDS_BACK) == codecs.feeds_back(codec)
    assert Codecs.of(codec).reply == reply_codec_of(RunConfig(codec=codec))  # type: ignore[arg-type]


@pytest.mark.parametrize(("numel", "fragments"), [(1000, 1), (M, 1), (25 * M, 4), (3 * M, 7), (10**8, 1)])
def test_slices_are_those_of_the_layout(numel: int, fragments: int) -> None:
    """For fragments of equal length."""
    each = -(-numel // fragments)
    specs = [ParamSpec(f"w{number}", (each,), "float32") for number in range(fragments)]
    found = of_model(numel, fragments, [Machine(1e6)] * 2, Codecs()).slices
    assert found * fragments == len(Layout.build(specs, fragments).slices)


@pytest.mark.parametrize("peers", [2, 3, 4, 8])
def test_a_round_sends_what_an_all_reduce_sends(peers: int) -> None:
    """2 (1 − 1/K) times the model's bytes, on equal links, in bf16: as data-parallel training in a step."""
    found = exchange(peers, 24 * M)
    assert found.mean_sent == pytest.approx(2 * (1 - 1 / peers) * 2 * 24 * M)
    assert found.mean_sent == pytest.approx(data_parallel(24 * M, [Machine(1e8 / 8)] * peers, 2)[0])
    assert found.sent == pytest.approx([found.mean_sent] * peers)


def test_a_peer_that_aggregates_nothing_waits_for_its_last_means() -> None:
    """Its contributions take P / b; then a round trip, and one slice of each of the two aggregators at b. Another round
    trip is for what the leader says."""
    near, far = exchange(3, 24 * M, (100, 100, 10)), exchange(3, 24 * M, (100, 100, 10), 0.1)
    assert near.sent[2] == 2 * 24 * M
    assert far.hideable_s - near.hideable_s == pytest.approx(0.2)
    contributions_s, after_s = 2 * 24 * M * HEADERS / (10 * M / 8), SLICE_S * near.slices + STEP_S * 24 * M
    assert near.hideable_s == pytest.approx(contributions_s * 1.015 + contributions_s * 2 / 24 + after_s)


def test_the_node_limits_a_round_where_the_link_is_fast() -> None:
    """5 s of the node's processor for each GB sent, 5.2 ns for each parameter's outer step."""
    found = exchange(2, 100 * M, (1e6,))
    assert found.hideable_s == pytest.approx(5 * 0.2 + 0.52, rel=0.1)


def test_distances_are_of_pairs() -> None:
    """The round trip between two peers is the mean of theirs; the most distant one counts."""
    machines = [Machine(1e6, 0.1), Machine(1e6, 0.02), Machine(1e6, 0.04)]
    assert round_trips(machines) == pytest.approx([0.07, 0.06, 0.07])
