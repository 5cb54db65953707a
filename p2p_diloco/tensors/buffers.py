"""The buffers of a model that are exchanged, such as BatchNorm's running statistics: which ones, and their outer step.
Also a fingerprint of what is not exchanged.

Law: pure functions. Reads of a model names, dtypes and, once, values; changes nothing. All peers of a run must find the
same buffers, so the rule depends on the model and, at the moment of entering, on whether fp32 holds a buffer's values.

A buffer is exchanged if it is saved with the model and is a mean or a counter: of a floating-point dtype up to fp32, or
of int64. All others stay local:

    not saved (persistent=False), None or empty     caches, which a model computes anew
    bool, complex, fp64, other integers             masks, and codes of quantised weights
    of a module with buffers of other integers      scales and zero points of quantised weights
    a DTensor, or without values (meta device)      no process has all of its values
    sparse, expanded, of inference mode             its elements can't be changed in place
    values that are not finite or above 2³⁰;        fp32, or a sum of them, would not hold them: masks of -inf, hashes,
    for int64 above 2²⁴                             seeds

A contribution to buffers has the values themselves (xᵢ, fp32), because the last values replace the ones before. They
have no gradient: there is no momentum, no clipping, and no limit of the step. Each operation of the outer step is
element-wise, in fp64, and rounded by itself, and the result is rounded to fp32 once. So all replicas get the same bits,
equal values stay as they are, and no result is outside of the values that it is made from: a variance never becomes
negative.

    mean         x ← Σ wᵢ·xᵢ / Σ wᵢ, in the order of the peers' ids        θ' ← (1 − s)·θ + s·x
    greatest     x ← max xᵢ                                                θ' ← max(θ, x)

s is 1 in the synchronous mode, and then θ' is x. In the asynchronous mode a commit counts k submissions of n peers that
train, and s = k/n: one submission moves the statistics by one peer's share. wᵢ are the weights of `mean.weighed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.layout import MEAN, Kind, ParamSpec, plain_name
from p2p_diloco.tensors.limits import Aggregation
from p2p_diloco.tensors.mean import MAGNITUDE_MAX, Given, weighed

MEANS = (torch.float32, torch.bfloat16, torch.float16)
COUNTERS = (torch.int64,)
COUNT_MAX = 2.0**24
"""fp32 holds all integers up to this one."""


def exchanged(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are exchanged, by name, in the model's order. A buffer that several modules share comes
    once, under its first name. Names are those of the model before compilation."""
    return {name: buffer for name, buffer in candidates(model) if _is_held(buffer)}


def candidates(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are exchanged if their values can be, by name."""
    saved = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        module, _, _ = name.rpartition(".")
        fits = buffer.dtype in (*MEANS, *COUNTERS) and buffer.layout is torch.strided
        fits = fits and not hasattr(buffer, "placements") and not buffer.is_meta and can_be_written(buffer)
        if fits and name in saved and buffer.numel() and not _is_quantised(model.get_submodule(module)):
            yield plain_name(name), buffer


def specs_of(model: nn.Module) -> tuple[ParamSpec, ...]:
    """Return the specs of the buffers in `exchanged(model)`, in the same order."""
    return tuple(ParamSpec.of(name, buffer) for name, buffer in exchanged(model).items())


def can_be_written(tensor: Tensor) -> bool:
    """Whether a dense tensor is none of inference mode, and each of its elements has memory of its own."""
    if tensor.is_inference():
        return False
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_quantised(module: nn.Module) -> bool:
    """Whether a module has buffers of integers other than counters, as layers of quantised weights do."""
    dtypes = {buffer.dtype for buffer in module.buffers(recurse=False)}
    return any(not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes - {*COUNTERS, torch.bool})


@torch.no_grad()
def _is_held(buffer: Tensor) -> bool:
    """Whether fp32 holds the buffer's values, and sums of them."""
    low, high = torch.aminmax(buffer.detach())
    most = COUNT_MAX if buffer.dtype in COUNTERS else MAGNITUDE_MAX
    return -most <= low.item() and high.item() <= most  # NaN compares as false


# -- what is not exchanged

SAMPLED = 64
"""The most values of a tensor that are read, at even distances."""


def fingerprint(model: nn.Module) -> str:
    """A fingerprint of a model's frozen parameters, and of its buffers that no run exchanges: 32 hex digits, the same
    for two models with equal names, shapes and samples. It is empty for a model without frozen parameters, and for one
    that is spread over several processes. Values are compared as bf16, because peers may hold the same base in
    different dtypes."""
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


# -- their outer step

CODEC = "fp32"
"""The codec of buffers, in both directions."""


def together(kind: Kind, contributions: Sequence[Given], numel: int, aggregation: Aggregation) -> Tensor:
    """Return x [numel] fp32 of these contributions. Raises ValueError as `mean.weighted_mean` does."""
    ordered = weighed(contributions, aggregation)
    values = [codecs.decode(buffer, CODEC, numel).numpy() for _, _, buffer in ordered]
    if kind != MEAN:
        return torch.from_numpy(np.maximum.reduce(values))
    total, sums = np.float64(0.0), np.zeros(numel, np.float64)
    for (_, weight, _), one in zip(ordered, values, strict=True):
        total = total + np.float64(weight)
        np.add(sums, np.multiply(one, np.float64(weight), dtype=np.float64), out=sums)
    return torch.from_numpy(np.divide(sums, total).astype(np.float32))


def stepped(kind: Kind, theta: Tensor, values: Tensor, share: float) -> Tensor:
    """Return θ' [numel] fp32 for θ, x (`values`) and s (`share`). The inputs stay unchanged."""
    if share >= 1:
        return values.clone()
    if kind != MEAN:
        return torch.maximum(theta, values)
    kept = np.multiply(theta.numpy(), np.float64(1 - share), dtype=np.float64)
    moved = np.multiply(values.numpy(), np.float64(share), dtype=np.float64)
    return torch.from_numpy(np.add(kept, moved).astype(np.float32))
