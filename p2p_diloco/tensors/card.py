"""The card of a model: all that a saved model has besides the values of its trained parameters.

Law: bounded in length, and plain values: a card may come from another peer. It has the names of the
entries of the model's state_dict, which of these names belong to one tied parameter, and the text of the model's
configuration. It also has the values of entries that are not exchanged (other buffers, frozen parameters), if these are
few.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import msgpack
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from p2p_diloco.tensors.layout import plain_name

REST_BYTES_MAX = 2**20
"""The most bytes of values in a card. If a model's untrained values have more, its card has no values."""
CARD_BYTES_MAX = 2 * 2**20
"""The most bytes of a card, because a peer that asks for the model waits only some seconds."""
FILE_LETTERS_MAX = 2**17
NAME_LETTERS_MAX = 4096
FILES = {"config.json": "config", "generation_config.json": "generation_config"}
"""The configuration files of a Transformers model that a card has: the file's name, and the model's attribute that
writes it."""
_VERSION = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """`names`: the entries of the state_dict, in order. `tied`: for each further name of a tied parameter or buffer the
    first one. `files`: the text of configuration files. `rest`: the values of entries that are not exchanged; empty if
    they are too many."""

    names: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    rest: Mapping[str, Tensor] = field(default_factory=dict)

    def pack(self) -> bytes:
        """Encode the card. If it would be too long, the values are left out; if it is still too long, the result is
        empty."""
        for rest in (self.rest, {}):
            values = safetensors.torch.save(dict(rest)) if rest else b""
            content = [_VERSION, list(self.names), dict(self.tied), dict(self.files), values]
            if len(packed := bytes(msgpack.packb(content))) <= CARD_BYTES_MAX:
                return packed
        return b""

    @classmethod
    def unpack(cls, packed: object) -> ModelCard | None:
        """Decode a card; None for anything but a card that `pack` has encoded, in the same version of the format."""
        if not isinstance(packed, bytes) or not 0 < len(packed) <= CARD_BYTES_MAX:
            return None
        try:
            match msgpack.unpackb(packed):
                case [int(version), list(names), dict(tied), dict(files), bytes(values)] if version == _VERSION:
                    rest = safetensors.torch.load(values) if values else {}
                case _:
                    return None
        except (ValueError, TypeError, msgpack.UnpackException, SafetensorError):
            return None
        texts = [*names, *tied, *tied.values(), *rest]
        sound = all(isinstance(text, str) and 0 < len(text) <= NAME_LETTERS_MAX for text in texts)
        sound = sound and files.keys() <= FILES.keys() and all(map(_is_file, files.values()))
        return cls(tuple(names), tied, files, rest) if sound else None


def card_of(model: nn.Module, exchanged: Collection[str] = ()) -> ModelCard:
    """The card of a model at this moment. Its parameters may be sharded over several processes; then the card has no
    values. `exchanged`: names of buffers whose values the run has anyway."""
    named = chain(model.named_parameters(), model.named_buffers())
    first = {id(tensor): plain_name(name) for name, tensor in named}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    names, tied, rest = [], {}, {}
    for full, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):  # the extra state of a module, which is no tensor
            continue
        name = plain_name(full)
        names.append(name)
        if first.get(id(value), name) != name:
            tied[name] = first[id(value)]
        elif id(value) not in trained and name not in exchanged:
            rest[name] = value
    return ModelCard(tuple(names), tied, dict(_files_of(model)), _copied(rest))


@torch.no_grad()
def _copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the values in host memory; empty if they have too many bytes. Without those that no file of safetensors
    holds, such as sparse and quantised tensors: an export names them as missing."""
    values = {name: value for name, value in values.items() if _is_plain(value)}
    nbytes = sum(value.numel() * value.element_size() for value in values.values())
    sharded = any(hasattr(value, "placements") for value in values.values())
    if nbytes > REST_BYTES_MAX or sharded:
        return {}
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in values.items()}


def _is_plain(value: Tensor) -> bool:
    """Whether safetensors can hold a tensor: nothing else tells which dtypes it knows."""
    if value.layout is not torch.strided:
        return False
    try:
        safetensors.torch.save({"none": torch.empty(0, dtype=value.dtype, device="cpu")})
    except (KeyError, SafetensorError):
        return False
    return True


def _files_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The configuration files of a Transformers model; none of any other model."""
    for file, attribute in FILES.items():
        write = getattr(getattr(model, attribute, None), "to_json_string", None)
        if not callable(write):
            continue
        try:
            text = write()
            text = _with_class(text, model) if file == "config.json" else text
        except Exception:  # another library's code: training must not fail on a configuration that can't be written
            log.warning("the model's %s can't be written, so an export of the run lacks it", file, exc_info=True)
            continue
        if _is_file(text):
            yield file, text


def _with_class(text: str, model: nn.Module) -> str:
    """The configuration with the name of the model's class added, as Transformers does when it saves a model."""
    content = json.loads(text)
    return json.dumps({**content, "architectures": [type(model).__name__]}, indent=2, sort_keys=True) + "\n"


def _is_file(text: object) -> bool:
    return isinstance(text, str) and len(text) <= FILE_LETTERS_MAX
