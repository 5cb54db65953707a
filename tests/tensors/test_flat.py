"""Several threads compute the same bits as one."""

from __future__ import annotations

import pytest
import torch

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.flat import Threads
from p2p_diloco.tensors.mean import weighted_mean

NUMEL = 1000


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small slice has several."""
    monkeypatch.setattr("p2p_diloco.tensors.flat.BLOCK", 128)
    monkeypatch.setattr("p2p_diloco.tensors.outer_state.BLOCK", 128)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("count", [1, 2, 3, 64])
@pytest.mark.parametrize("numel", [1, 128, 129, NUMEL])
def test_ranges_cover_all_elements_once(count: int, numel: int) -> None:
    """Each element is in one range, whatever the number of threads; no more ranges than threads."""
    seen, ranges = torch.zeros(numel), []

    def work(place: slice) -> None:
        seen[place] += 1
        ranges.append(place)

    Threads(count).over(numel, work)
    assert bool((seen == 1).all())
    assert len(ranges) <= count
    assert all(place.start % 128 == 0 for place in ranges)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("codec", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("aggregation", ["mean", "clip", "centered_clip"])
def test_a_mean_has_the_same_bits(codec: str, aggregation: str) -> None:
    """Also with a codec whose bytes can't be divided."""
    torch.manual_seed(0)
    given = [(f"p{i}", 1.0 + i, codecs.encode(torch.randn(NUMEL) * (1 + i), codec)) for i in range(4)]
    alone, together = (
        weighted_mean(given, codec, NUMEL, torch.bfloat16, aggregation, Threads(count))  # type: ignore[arg-type]
        for count in (1, 3)
    )
    assert torch.equal(alone, together)


def test_an_error_of_any_thread_comes_after_all_are_done() -> None:
    """No thread goes on using memory that the caller takes back."""
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("here")

    with pytest.raises(RuntimeError, match="here"):
        Threads(2).all(lambda: done.append(1), fail, lambda: done.append(2))
    assert done == [1, 2]
