"""A fingerprint of a model's frozen parameters, and of its buffers that no run exchanges (`buffers.candidates`).

Law: reads a sample of each tensor, so it is quick for large models too. Values are compared as bf16, because peers may
hold the same base in different dtypes. A model without frozen parameters has no fingerprint, and neither has one that
is spread over several processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from p2p_diloco.tensors.buffers import candidates
from p2p_diloco.tensors.layout import plain_name

SAMPLED = 64
"""The most values of a tensor that are read, at even distances."""


def fingerprint(model: nn.Module) -> str:
    """A fingerprint of 32 hex digits, the same for two models with equal names, shapes and samples. It is empty for a
    model without frozen parameters, and for one that is spread over several processes."""
    parameters = dict(model.named_parameters())
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad and p.numel()}
    if not frozen or any(hasattr(p, "placements") for p in parameters.values()):
        return ""
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted({**frozen, **dict(_buffers(model))}.items()):
        hasher.update(f"{plain_name(name)} {tuple(tensor.shape)}\n".encode())
        hasher.update(_sample(tensor))
    return hasher.hexdigest()


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The non-empty buffers that are saved with the model, except those that a run may exchange: they describe a peer's
    data, or joiners get them from the run."""
    saved = model.state_dict(keep_vars=True).keys()
    exchanged = {id(buffer) for _, buffer in candidates(model)}
    for name, buffer in model.named_buffers():
        if name in saved and id(buffer) not in exchanged and buffer.numel():
            yield name, buffer


@torch.no_grad()
def _sample(tensor: Tensor) -> bytes:
    count = min(SAMPLED, tensor.numel())
    places = torch.linspace(0, tensor.numel() - 1, count, dtype=torch.float64, device="cpu").long().to(tensor.device)
    try:
        values = torch.take(tensor.detach(), places).to("cpu")
        if values.is_complex():
            values = torch.view_as_real(values)
        values = values.flatten().to(torch.float32).to(torch.bfloat16)
    except (NotImplementedError, RuntimeError, TypeError):  # a quantised tensor: only its name and shape are compared
        return b""
    return bytes(values.view(torch.uint8).tolist())
