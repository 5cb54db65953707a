"""A model's card: what it says of the model, and that a card from a stranger does no harm. A written model loads as
what it was: names, tied parameters, buffers, dtypes; and nothing is overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from p2p_diloco.errors import ConfigError
from p2p_diloco.tensors import buffers, export
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


def test_a_value_that_no_file_holds_is_left_out_alone() -> None:
    """The card has the other values, so an export names one entry as missing."""
    quantised, complex_ = torch.empty(2, dtype=torch.quint8), torch.ones(2, dtype=torch.complex128)
    for value in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), complex_, quantised):
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


# -- exports


TOLD = {"run_id": "r", "epoch": "3", "digest": "d"}


def parts(model: nn.Module, fragments: int = 2) -> tuple[Layout, Tensor]:
    """The layout of a model, and global parameters that count 0, 1, 2, …"""
    layout = Layout.build(specs_of(model), fragments, "strided")
    return layout, torch.arange(layout.numel, dtype=torch.float32) / 7


def expected(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of the model once it has the global parameters."""
    layout, theta = parts(model)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for spec, start in layout.places[: len(layout.params)]:
            named[spec.name].copy_(theta[start : start + spec.numel].view(spec.shape))
    return model.state_dict()


def written(folder: Path, form: str, dtype: str = "keep", model: nn.Module | None = None, **more: Any) -> list[str]:
    """Write a model's global parameters; the names of the files."""
    model = model or Tied()
    layout, theta = parts(model)
    exported = export.assemble(layout, theta, more.pop("card", card_of(model)))
    return list(export.write(folder, exported, form, dtype, TOLD, **{"replace": False, **more}))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def test_safetensors_loads_into_the_model(tmp_path: Path) -> None:
    """The library's own `load_model` is satisfied: nothing is missing, the tied parameter is there once."""
    assert written(tmp_path, "safetensors") == ["model.safetensors"]
    fresh = Tied()
    assert safetensors.torch.load_model(fresh, str(tmp_path / "model.safetensors")) == (set(), [])
    assert same(fresh.state_dict(), expected(Tied()))
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {"head.weight": "embed.weight", "epoch": "3", "run_id": "r"}.items() <= file.metadata().items()
        assert "head.weight" not in file.keys()  # noqa: SIM118 - not a dictionary


def test_values_of_rare_dtypes_are_written(tmp_path: Path) -> None:
    """Whatever a card has: rotary tables are complex, quantised weights have 8 bits."""
    model = Tied()
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2):
        model.register_buffer(str(dtype).removeprefix("torch."), torch.ones(3).to(dtype))
    card = card_of(model)
    written(tmp_path, "safetensors", model=model, card=card)
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name: str(found[name].tolist()) for name in card.rest} == {n: str(v.tolist()) for n, v in card.rest.items()}
    assert "complex64" in card.rest


def test_a_state_dict_has_all_names(tmp_path: Path) -> None:
    """It loads strictly and without pickle; the names of a tied parameter share memory, and no other tensors do."""
    assert written(tmp_path, "torch") == ["model.pt"]
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    fresh = Tied()
    fresh.load_state_dict(state, strict=True)
    assert same(fresh.state_dict(), expected(Tied()))
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state) - 1


def test_the_dtype_is_that_of_the_trained_parameters(tmp_path: Path) -> None:
    """Buffers keep theirs: a count of batches is no fraction. Without one it is the dtype in the run."""
    model = nn.Linear(3, 2).to(torch.bfloat16)
    written(tmp_path / "kept", "safetensors", model=model)
    kept = safetensors.torch.load_file(tmp_path / "kept" / "model.safetensors")
    assert {value.dtype for value in kept.values()} == {torch.bfloat16}
    written(tmp_path, "torch", "bfloat16")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    wanted = expected(Tied())
    trained = {"embed.weight", "head.weight", "norm.weight", "norm.bias"}
    assert {name for name, value in state.items() if value.dtype == torch.bfloat16} == trained
    assert all(torch.equal(state[name], wanted[name].bfloat16()) for name in trained)
    assert state["norm.num_batches_tracked"].dtype == torch.int64


def test_without_a_card_the_trained_parameters_are_written(tmp_path: Path) -> None:
    """And with a card without values, what is missing is named."""
    written(tmp_path / "a", "safetensors", card=None)
    assert set(safetensors.torch.load_file(tmp_path / "a" / "model.safetensors")) == set(
        dict(Tied().named_parameters())
    ) - {"scale"}
    whole = card_of(Tied())
    layout, theta = parts(Tied())
    exported = export.assemble(layout, theta, ModelCard(whole.names, whole.tied))
    assert exported.missing == ("scale", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert exported.parameters == layout.numel


def with_config(model: Any) -> Any:
    model.config = Config()
    return model


def test_hf_is_cut_into_files_with_an_index(tmp_path: Path) -> None:
    """Each tensor is in the file that the index names, and the configuration names the dtype of the parameters."""
    names = written(tmp_path, "hf", "float16", model=with_config(Tied()), part_bytes=60)
    parts_written = [name for name in names if name.startswith("model-")]
    assert len(parts_written) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for part in parts_written:
        tensors = safetensors.torch.load_file(tmp_path / part)
        assert {index["weight_map"][name] for name in tensors} == {part}
        found |= tensors
    assert found.keys() == expected(Tied()).keys() - {"head.weight"}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"


def test_hf_needs_a_configuration_and_all_values(tmp_path: Path) -> None:
    """A folder that `from_pretrained` would fill up with random values is never written."""
    with pytest.raises(ConfigError, match=r"--format=hf needs the model's config\.json"):
        written(tmp_path, "hf")
    whole = card_of(with_config(Tied()))
    with pytest.raises(ConfigError, match="needs values that the run does not have: scale, norm"):
        written(tmp_path, "hf", card=ModelCard(whole.names, whole.tied, whole.files))
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_export_stays_unless_it_may_be_replaced(tmp_path: Path) -> None:
    """With permission its other files go too: a reader would take them for parts of the new one."""
    written(tmp_path, "hf", model=with_config(Tied()), part_bytes=60)
    (tmp_path / "README.md").write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"--out=.* has config\.json, .* already; choose another folder"):
        written(tmp_path, "safetensors")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    written(tmp_path, "safetensors", replace=True)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "model.safetensors"}


def test_a_failed_export_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the earlier model is whole, and nothing half-written is left."""
    written(tmp_path, "safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        (tmp_path / ".unfinished" / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_tensors", full)
    with pytest.raises(ConfigError, match="no space left on device"):
        written(tmp_path, "safetensors", replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before
