"""The flat vector: every element once, in one place, alike on every peer."""

from __future__ import annotations

import itertools
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors import partition
from p2p_diloco.tensors.layout import FragmentPlan, Layout, ParamSpec, specs_of, trainable
from p2p_diloco.tensors.partition import SLICE_ELEMENTS_MAX, SLICE_ELEMENTS_MIN, SLICES, SLICES_MAX

sizes_lists = st.lists(st.integers(1, 50), min_size=1, max_size=9)


def specs(sizes: list[int], names: list[str] | None = None) -> tuple[ParamSpec, ...]:
    names = names or [f"p{i}" for i in range(len(sizes))]
    return tuple(ParamSpec(name, (size,), "float32") for name, size in zip(names, sizes, strict=True))


class Blocks(nn.Module):
    """An embedding, `depth` blocks of equal size, a head."""

    def __init__(self, depth: int, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)


@settings(max_examples=80, deadline=None)
@given(sizes_lists, st.data(), st.sampled_from(["contiguous", "strided"]), st.integers(1, 40))
def test_every_element_lies_in_one_parameter_one_fragment_and_one_slice(sizes, data, how, slice_elements):
    """Parameters tile fragments, slices tile fragments, fragments tile the flat vector; no slice is too
    large.
    """
    count = data.draw(st.integers(1, len(sizes)))
    layout = Layout.build(specs(sizes), count, how, slice_elements)
    owner = [-1] * layout.numel
    for fragment, members in enumerate(layout.fragments):
        start, stop = layout.slices_of(fragment)[0].start, layout.slices_of(fragment)[-1].stop
        assert stop - start == sum(sizes[index] for index in members)
        for index in members:
            first = dict(layout.places)[layout.params[index]]
            for element in range(first, first + sizes[index]):
                assert owner[element] == -1
                assert start <= element < stop
                owner[element] = index
        slices = layout.slices_of(fragment)
        assert [s.start for s in slices] == [start, *(s.stop for s in slices[:-1])]
        assert slices[-1].stop == stop
        assert len(slices) == -(-(stop - start) // slice_elements)
        assert max(s.numel for s in slices) - min(s.numel for s in slices) <= 1
    assert -1 not in owner
    assert [s.index for s in layout.slices] == list(range(len(layout.slices)))
    assert len(layout.fragments) == count
    assert all(layout.fragments)


numels = st.one_of(st.integers(1, 10**5), st.integers(1, 10**8), st.integers(1, 10**11))


@given(numels, st.integers(1, 2000))
def test_a_chosen_number_of_slices_keeps_to_its_bounds(numel, limit):
    """No slice is longer than SLICE_ELEMENTS_MAX. Spreading alone makes no slice shorter than SLICE_ELEMENTS_MIN, and
    no more slices than the limit.
    """
    count = partition.spread(numel, limit)
    needed = -(-numel // SLICE_ELEMENTS_MAX)
    assert count >= needed
    if count > needed and needed <= SLICES:
        assert count == 1 or numel // count >= SLICE_ELEMENTS_MIN
        assert count <= limit


@pytest.mark.parametrize("peers", range(2, 17))
@pytest.mark.parametrize("numel", [200_000, 1_000_000, 4_000_000, 10_000_000, 25_000_000, 26_000_000, 60_000_000])
def test_every_number_of_peers_shares_the_aggregation_nearly_evenly(numel, peers):
    """The peer that averages most slices sends at most a fifth more bytes than on an exactly even share."""
    count = partition.spread(numel, SLICES_MAX)
    share = -(-count // peers) / count
    assert 1 + (peers - 2) * share <= 1.2 * (1 + (peers - 2) / peers)


@pytest.mark.parametrize("fragments", [1, 4, 20, 100, 900])
def test_many_fragments_are_not_spread_over_too_many_slices(fragments):
    """All fragments together have SLICES_MAX slices at most, if no slice must be cut for its length; each one has one
    at least.
    """
    layout = Layout.build(specs([100_000] * fragments), fragments)
    assert fragments <= len(layout.slices) <= SLICES_MAX
    assert len(Layout.build(specs([10] * 1000), 1000).slices) == 1000


def test_given_slice_elements_replace_the_choice():
    """Then a fragment is cut into the fewest slices of at most so many elements."""
    model = specs([100_000])
    assert len(Layout.build(model).slices) == 12
    assert len(Layout.build(model, slice_elements=100_000).slices) == 1
    assert len(Layout.build(model, slice_elements=99_999).slices) == 2


@settings(max_examples=60, deadline=None)
@given(sizes_lists, st.data())
def test_the_largest_contiguous_fragment_is_as_small_as_any_cut_makes_it(sizes, data):
    """Against every possible cut, by force."""
    count = data.draw(st.integers(1, len(sizes)))
    fragments = partition.contiguous(sizes, count)
    assert [i for fragment in fragments for i in fragment] == list(range(len(sizes)))
    best = min(
        max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(sizes))))
        for cuts in itertools.combinations(range(1, len(sizes)), count - 1)
    )
    assert max(sum(sizes[i] for i in fragment) for fragment in fragments) == best


def test_equal_parameters_are_cut_into_nearly_equal_fragments():
    """Among the best cuts, one without a needlessly small rest: 10 in 4 is 3+2+3+2 in some order, not
    3+3+3+1.
    """
    assert sorted(len(f) for f in partition.contiguous([1] * 10, 4)) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("names", "sizes", "fragments"),
    [
        (["a", "b", "c"], [1, 1, 4], ((2,), (0, 1))),
        (["0.w", "2.w", "4.w"], [1, 1, 1], ((0, 2), (1,))),
        (["m.layers.0.experts.0.w", "m.layers.0.experts.1.w", "m.layers.1.experts.0.w"], [1, 1, 1], ((0, 1), (2,))),
    ],
)
def test_which_blocks_a_strided_layout_sees(names, sizes, fragments):
    """What is in no block is placed largest first; blocks count by appearance; a block is the outermost number."""
    assert partition.strided(names, sizes, 2) == fragments


def test_only_trainable_parameters_are_trained():
    """Buffers have no gradient, and a frozen or empty parameter has nothing to say; a tied one comes once, under its
    first name."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    model[0].bias.requires_grad_(False)
    model[2].weight = model[0].weight
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    assert list(trainable(model)) == ["0.weight", "1.weight", "1.bias"]
    assert Layout.build(specs_of(model)).numel == 9 + 3 + 3
    with pytest.raises(ConfigError, match=r"model=Linear has no trainable parameter; set requires_grad"):
        trainable(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_fragments": 0}, "num_fragments=0 must be at least 1"),
        ({"num_fragments": 5}, "num_fragments=5 is too many: .*; use at most 4"),
        ({"num_fragments": 5, "fragment_layout": "strided"}, "num_fragments=5 is too many: .*; use at most 4"),
        ({"slice_elements": 0}, "slice_elements=0 must be at least 1"),
        ({"fragment_layout": "zigzag"}, "fragment_layout=zigzag is unknown; use contiguous or strided"),
    ],
)
def test_arguments_that_make_no_layout_are_refused(arguments, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Layout.build(specs([1, 2, 3, 4]), **arguments)
    with pytest.raises(ConfigError, match="sync_every=2 is less than the number of fragments, 3; use at least"):
        FragmentPlan(Blocks(3), 3, 2)


def test_the_fingerprint_is_the_models_not_the_precisions_nor_the_cuts():
    """A bf16 peer and an fp32 peer of one model agree; another shape, name or order doesn't."""
    model = Blocks(2)
    print_ = Layout.build(specs_of(model)).fingerprint()
    assert Layout.build(specs_of(Blocks(2).bfloat16()), 3, "strided", 7).fingerprint() == print_
    assert Layout.build(specs_of(Blocks(2, width=5))).fingerprint() != print_
    assert Layout.build(specs_of(Blocks(3))).fingerprint() != print_
    assert Layout.build(specs_of(model)[::-1]).fingerprint() != print_
    assert len(print_) == 32


def test_the_difference_is_told_parameter_by_parameter():
    run = Layout.build(
        (ParamSpec("a", (64, 64), "float32"), ParamSpec("b", (), "float32"), ParamSpec("c", (2,), "float32"))
    )
    here = Layout.build(
        (ParamSpec("a", (128, 128), "bfloat16"), ParamSpec("c", (2,), "bfloat16"), ParamSpec("d", (5,), "float32"))
    )
    assert run.difference(here) == [
        "a: 64x64 in the run, 128x128 here",
        "b: scalar in the run, missing here",
        "d: not in the run, 5 here",
    ]
    assert run.difference(run) == []
    assert run.difference(Layout.build(run.params[::-1])) == ["a: in the run's order it stands where this model has c"]


BUFFERS = (
    ParamSpec("1.1.mean", (3,), "float32"),
    ParamSpec("1.1.seen", (), "int64"),
    ParamSpec("0.mean", (2,), "bfloat16"),
    ParamSpec("ema", (4,), "float32"),
)


def test_buffers_come_last_each_with_the_fragment_of_its_module():
    """A slice of buffers has one kind; what lies in no module with parameters is with the first one."""
    layout = Layout.build(specs([5, 6], ["0.weight", "1.0.weight"]), 2, slice_elements=4, buffers=BUFFERS)
    assert layout.homes == (1, 1, 0, 0)
    flat = [(spec.name, start) for spec, start in layout.places]
    assert flat == [("0.weight", 0), ("1.0.weight", 5), ("0.mean", 11), ("ema", 13), ("1.1.mean", 17), ("1.1.seen", 20)]
    assert [(s.fragment, s.start, s.stop, s.kind) for s in layout.slices] == [
        (0, 0, 2, "parameter"),
        (0, 2, 5, "parameter"),
        (1, 5, 8, "parameter"),
        (1, 8, 11, "parameter"),
        (0, 11, 14, "mean"),
        (0, 14, 17, "mean"),
        (1, 17, 20, "mean"),
        (1, 20, 21, "greatest"),
    ]
    assert [s.index for s in layout.slices_of(0)] == [0, 1, 4, 5]
    assert layout.numel == 21


def test_another_shape_or_kind_of_a_buffer_is_another_model():
    run = Layout.build(specs([2]), buffers=BUFFERS)
    other = (ParamSpec("1.1.mean", (3,), "int64"), ParamSpec("1.1.seen", (1,), "int64"), *BUFFERS[2:3])
    here = Layout.build(specs([2]), buffers=other)
    assert run.fingerprint() != here.fingerprint()
    assert run.difference(here) == [
        "1.1.mean: 3 (buffer, mean) in the run, 3 (buffer, greatest) here",
        "1.1.seen: scalar (buffer, greatest) in the run, 1 (buffer, greatest) here",
        "ema: 4 (buffer, mean) in the run, missing here",
    ]
    half = [ParamSpec(spec.name, spec.shape, spec.dtype.replace("float32", "float16")) for spec in BUFFERS]
    assert Layout.build(specs([2]), buffers=half).fingerprint() == run.fingerprint()


@settings(max_examples=40, deadline=None)
@given(sizes_lists, st.data(), st.integers(1, 40), st.sampled_from([(), BUFFERS]))
def test_a_layout_survives_the_wire(sizes, data, slice_elements, buffers):
    count = data.draw(st.integers(1, len(sizes)))
    layout = Layout.build(specs(sizes), count, "strided", slice_elements, buffers)
    again = Layout.from_wire(layout.to_wire())
    assert again == layout
    assert again.slices_of(0) == layout.slices_of(0)


@pytest.mark.parametrize(
    "change",
    [
        {"params": None},
        {"params": [["a", [2], "float32"]]},
        {"params": [["a", [2], "float32"], ["a", [3], "float32"]]},
        {"params": [["a", [0], "float32"], ["b", [5], "float32"]]},
        {"params": [["a", [True, 2], "float32"], ["b", [3], "float32"]]},
        {"params": [["a" * 5000, [2], "float32"], ["b", [3], "float32"]]},
        {"fragments": [[0, 0], [1]]},
        {"fragments": [[0, 1], []]},
        {"fragments": [[0], [2]]},
        {"slices": [[0, 0, 2, 0]]},
        {"slices": []},
        {"slices": [[0, 0, 2], [1, 2, 5]]},
        {"slices": [[0, 0, 2, 0], [1, 2, 6, 0]]},
        {"slices": [[0, 0, 3, 0], [1, 3, 5, 0]]},
        {"slices": [[0, 0, 2, 0], [7, 2, 5, 0]]},
        {"slices": [[0, 0, 2, 0], [1, 2]]},
        {"slices": [[0, 0, 2, 0], [1, 2, 2, 0], [1, 2, 5, 0]]},
        {"slices": [[0, 0, 2, 0], [1, 2, -1, 0]]},
        {"slices": [[0, 0, 2, 1], [1, 2, 5, 0]]},
        {"slices": [[0, 0, 2, 3], [1, 2, 5, 0]]},
        {"slices": [[0, 0, 2, 0], [1, 2, 5, 0, 0]]},
        {"slices": [reduce(lambda inner, _: [inner], range(3000), [])]},
        {"homes": [0]},
        {"buffers": [["b", [1], "float32"]]},
        {"buffers": [["b", [1], "float32"]], "homes": [0]},
        {"buffers": [["b", [1], "float32"]], "homes": [2], "slices": [[0, 0, 2, 0], [1, 2, 5, 0], [2, 5, 6, 1]]},
        {"buffers": [["p0", [1], "float32"]], "homes": [0], "slices": [[0, 0, 2, 0], [1, 2, 5, 0], [0, 5, 6, 1]]},
    ],
)
def test_what_is_no_layout_is_refused(change):
    """A layout comes from another peer: gaps, overlaps and nonsense are a ValueError, whatever they are."""
    wire = Layout.build(specs([2, 3]), 2).to_wire()
    Layout.from_wire(wire)
    with pytest.raises(ValueError, match=r"layout"):
        Layout.from_wire({**wire, **change})


def test_fragments_fall_due_in_turn():
    """H = 600 and three fragments: one every 200 steps. The plan of a layout is that of the model."""
    plan = FragmentPlan(Blocks(3), num_fragments=3, sync_every=600)
    due = {step: plan.due(step) for step in (0, 100, 200, 201, 399, 400, 600, 800)}
    assert due == {0: None, 100: None, 200: 0, 201: None, 399: None, 400: 1, 600: 2, 800: 0}
    assert sorted(itertools.chain(*plan.fragments)) == sorted(trainable(Blocks(3)))
    same = FragmentPlan.of(Layout.build(specs_of(Blocks(3)), 3), 600)
    assert (same.fragments, same.fragment_of) == (plan.fragments, plan.fragment_of)
    assert plan.interval == 200
