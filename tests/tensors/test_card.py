"""A model's card: what it says of the model, and that a card from a stranger does no harm."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor, nn

from p2p_diloco.tensors import buffers
from p2p_diloco.tensors import card as cards
from p2p_diloco.tensors.buffers import exchanged
from p2p_diloco.tensors.card import CARD_BYTES_MAX, ModelCard, card_of
from p2p_diloco.tensors.export import assemble
from p2p_diloco.tensors.layout import Layout, specs_of


class Tied(nn.Module):
    """An embedding tied to the output, a normalisation with running statistics, a frozen scale, a local buffer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
        self.register_buffer("cache", torch.ones(9), persistent=False)


class Config:
    def to_json_string(self) -> str:
        return json.dumps({"model_type": "tied", "architectures": None})


def test_a_card_names_what_the_state_dict_has() -> None:
    """All entries in order, the tied name with the first one, and the values of what is not trained; also after it was
    packed."""
    model = Tied()
    card = card_of(model)
    model.norm(torch.randn(8, 4))  # the values are copies
    for each in (card, ModelCard.unpack(card.pack())):
        assert each is not None
        assert each.names == tuple(model.state_dict())
        assert each.tied == {"head.weight": "embed.weight"}
        assert {name: value.tolist() for name, value in each.rest.items()} == {
            "scale": [3.0, 3.0],
            "norm.running_mean": [0.0] * 4,
            "norm.running_var": [1.0] * 4,
            "norm.num_batches_tracked": 0,
        }
        assert each.rest["norm.num_batches_tracked"].dtype == torch.int64
        assert each.files == {}


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
        torch.ones(2, dtype=torch.complex128),
        torch.empty(2, dtype=torch.quint8),
    ],
    ids=["sparse", "compressed sparse", "wide complex", "quantised"],
)
def test_a_value_that_no_file_holds_is_left_out_alone(value: Tensor) -> None:
    """The card has the other values, so an export names one entry as missing."""
    model = Tied()
    model.register_buffer("odd", value)
    card = ModelCard.unpack(card_of(model).pack())
    assert card is not None
    assert "odd" in card.names
    assert {*card.rest} == {*card_of(Tied()).rest}


def test_a_card_has_no_values_that_the_run_has() -> None:
    """And an aliased buffer is one entry with two names, as a tied parameter is."""
    model = Tied()
    model.register_buffer("mean", model.norm.running_mean)
    card = card_of(model, exchanged(model))
    assert {*card.rest} == {"scale"}
    assert card.tied == {"norm.running_mean": "mean", "head.weight": "embed.weight"}
    layout = Layout.build(specs_of(model), buffers=buffers.specs_of(model))
    made = assemble(layout, torch.full((layout.numel,), 2.0), card)
    assert made.tensors["mean"].tolist() == [2.0] * 4
    assert made.tied["norm.running_mean"] == "mean"
    assert made.missing == ()
    assert made.parameters == layout.numel - sum(spec.numel for spec in layout.buffers)


def test_a_configuration_is_in_the_card_with_the_models_class() -> None:
    model: Any = Tied()
    model.config = Config()
    assert json.loads(card_of(model).files["config.json"]) == {"model_type": "tied", "architectures": ["Tied"]}
    model.config = type("Bad", (), {"to_json_string": lambda self: "{no json"})()
    assert card_of(model).files == {}


def test_many_values_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names stay, so that an export can say what it lacks."""
    monkeypatch.setattr(cards, "REST_BYTES_MAX", 8)
    card = card_of(Tied())
    assert not card.rest
    assert "scale" in card.names
    monkeypatch.setattr(cards, "CARD_BYTES_MAX", 50)
    assert card_of(Tied()).pack() == b"", "a card that is too long is none"


def packed(*fields: object) -> bytes:
    return bytes(msgpack.packb(list(fields)))


@pytest.mark.parametrize(
    "stranger",
    [
        b"",
        b"\xc1",
        None,
        b"x" * (CARD_BYTES_MAX + 1),
        packed(1, [], {}, {}),
        packed(2, [], {}, {}, b""),
        packed(1, [7], {}, {}, b""),
        packed(1, [""], {}, {}, b""),
        packed(1, ["x" * 5000], {}, {}, b""),
        packed(1, [], {"a": 1}, {}, b""),
        packed(1, [], {}, {"../x": "{}"}, b""),
        packed(1, [], {}, {"config.json": b"{}"}, b""),
        packed(1, [], {}, {}, b"no tensors"),
    ],
)
def test_what_is_no_card_is_none(stranger: object) -> None:
    assert ModelCard.unpack(stranger) is None
