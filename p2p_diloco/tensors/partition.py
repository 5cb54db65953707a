"""Cutting a list of parameters into fragments of nearly equal size, and a fragment into slices.

Law: pure functions of names and sizes, so that the same model is always cut the same. A fragment consists of whole
parameters and is never empty. Indices refer to the list passed in.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from p2p_diloco.errors import ConfigError

_BLOCK = re.compile(r"(?:^|.*?\.)\d+\.")
"""A parameter's block: its name up to and including the first number, e.g. "model.layers.3."."""

SLICE_ELEMENTS_MAX = 1 << 20
"""The most elements of a slice: 2 MiB of bf16."""
SLICE_ELEMENTS_MIN = 1 << 13
"""The fewest elements of a slice, unless the whole fragment has fewer. Each slice costs a peer 1 to 2 ms of processor
time in each round; a link of 100 Mbit/s carries 8192 elements in bf16 in 1.3 ms."""
SLICES, SLICES_STEP = 24, 12
"""A fragment is spread over SLICES slices, which 2, 3, 4, 6, 8 and 12 peers divide evenly. A fragment that needs more
has a multiple of SLICES_STEP."""
SLICES_MAX = 960
"""The most slices of all fragments together, unless slices would exceed SLICE_ELEMENTS_MAX. There is a limit because
some messages list all slices."""
FEW_SLICES = (1, 2, 3, 4, 6, 8, 12, 24)
"""The numbers of slices of a fragment that is too small for SLICES."""


def contiguous(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Cut `sizes` into `count` groups of neighbours so that the largest group is as small as possible.

    Among such cuts, each group in turn is as close as possible to the mean size of the groups not yet cut. Raises
    `ConfigError` if there are fewer parameters than fragments.
    """
    if count > len(sizes):
        raise _too_many(count, f"the model has only {len(sizes)} trainable parameters", len(sizes))
    cap = _smallest_cap(sizes, count)
    needed = _runs_needed(sizes, cap)
    fragments: list[tuple[int, ...]] = []
    start, remaining = 0, sum(sizes)
    for left in range(count, 0, -1):
        stop, run = _best_stop(sizes, start, left, cap, needed, remaining / left)
        fragments.append(tuple(range(start, stop)))
        start, remaining = stop, remaining - run
    return tuple(fragments)


def strided(names: Sequence[str], sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Deal the model's blocks out to `count` fragments: the i-th block in order of appearance goes to fragment i mod
    `count`.

    Parameters outside of blocks (embeddings, heads) then go, largest first, to the smallest fragment. Raises
    `ConfigError` if a fragment would stay empty.
    """
    blocks: dict[str, list[int]] = {}
    loose: list[int] = []
    for index, name in enumerate(names):
        block = _BLOCK.match(name)
        if block is None:
            loose.append(index)
        else:
            blocks.setdefault(block.group(), []).append(index)
    if count > len(blocks) + len(loose):
        have = f"the model has only {len(blocks)} blocks and {len(loose)} parameters outside them"
        raise _too_many(count, have, len(blocks) + len(loose))
    fragments: list[list[int]] = [[] for _ in range(count)]
    for rank, members in enumerate(blocks.values()):
        fragments[rank % count] += members
    load = [sum(sizes[index] for index in fragment) for fragment in fragments]
    for index in sorted(loose, key=lambda index: (-sizes[index], index)):
        smallest = load.index(min(load))
        fragments[smallest].append(index)
        load[smallest] += sizes[index]
    return tuple(tuple(sorted(fragment)) for fragment in fragments)


def nearest(buffers: Sequence[str], params: Sequence[str]) -> list[int]:
    """Return, for each buffer, the index of the parameter that is nearest to it in the model: of those that share most
    modules with it, the first. So BatchNorm's statistics are with its weight or, if it has none, with a layer of the
    same block."""
    first: dict[str, int] = {}
    for index, name in enumerate(params):
        for module in _modules(name):
            first.setdefault(module, index)
    return [next(first[module] for module in _modules(name) if module in first) for name in buffers]


def spread(numel: int, limit: int) -> int:
    """Return the number of slices for a fragment of `numel` elements, chosen so that the peers of a run can divide the
    aggregation evenly. There are more than `limit` slices only if a slice would otherwise exceed SLICE_ELEMENTS_MAX."""
    fewest = -(-numel // SLICE_ELEMENTS_MAX)
    if fewest > SLICES:
        return -(-fewest // SLICES_STEP) * SLICES_STEP
    possible = max(1, min(SLICES, limit, numel // SLICE_ELEMENTS_MIN))
    return max(fewest, *(few for few in FEW_SLICES if few <= possible))


def slices(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Return `count` slices of [start, stop) whose sizes differ by at most one."""
    total = stop - start
    return [(start + index * total // count, start + (index + 1) * total // count) for index in range(count)]


def _modules(name: str) -> list[str]:
    """The modules that a parameter or buffer lies in, from its own to the model as a whole, whose name is empty."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _smallest_cap(sizes: Sequence[int], count: int) -> int:
    """Return, by bisection, the lowest `cap` for which `count` groups of at most `cap` elements cover the list."""
    caps = range(max(sizes), sum(sizes))
    return caps.start + bisect_left(caps, True, key=lambda cap: _runs_needed(sizes, cap)[0] <= count)


def _runs_needed(sizes: Sequence[int], cap: int) -> list[int]:
    """Return, for each start, the lowest number of groups of at most `cap` elements that cover the list from there on;
    0 past the end."""
    needed = [0] * (len(sizes) + 1)
    stop, run = len(sizes), 0
    for start in range(len(sizes) - 1, -1, -1):
        run += sizes[start]
        while run > cap:
            stop -= 1
            run -= sizes[stop]
        needed[start] = 1 + needed[stop]
    return needed


def _best_stop(
    sizes: Sequence[int], start: int, left: int, cap: int, needed: Sequence[int], target: float
) -> tuple[int, int]:
    """Return the stop and the size of the group that begins at `start`. Of the cuts that fit, choose the one whose
    group is closest in size to `target`."""
    best: tuple[float, int, int] | None = None
    run = 0
    for stop in range(start + 1, len(sizes) - left + 2):
        run += sizes[stop - 1]
        if run > cap:
            break
        if needed[stop] <= left - 1 and (best is None or abs(run - target) < best[0]):
            best = (abs(run - target), stop, run)
    assert best is not None, "the cap was chosen so that a cut exists"
    return best[1], best[2]


def _too_many(count: int, have: str, most: int) -> ConfigError:
    return ConfigError(f"is too many: {have}", key="num_fragments", value=count, mend=f"use at most {most}")
