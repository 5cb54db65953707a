"""How good the global model is with BatchNorm's statistics averaged, local, or computed anew. Run it by hand:

    PYTHONPATH=. python tests/node/batchnorm_accuracy.py [seeds]

Two real nodes over the in-memory swarm train a small CNN on images that are drawn from ten shapes: shifted, blurred by
noise, and of unlike brightness. With "unlike data" each peer has five of the ten shapes, and the second peer's images
are brighter. Printed is the held-out accuracy, of all shapes, of each peer's `global_state_dict()` as it is, and after
`torch.optim.swa_utils.update_bn` with 50 batches of both peers' data. Each figure is the median of all seeds.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import statistics
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from tests.net.memory import MemoryNetwork
from tests.node.conftest import QUICK, MemoryPeer
from tests.node.trained import Trained

BATCH, ROUNDS, EVERY = 32, 20, 20
SETTINGS: dict[str, dict[str, Any]] = {
    "plain averaging": {"outer_momentum": 0.0},
    "0.7/0.9": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "overlap of 5": {"outer_momentum": 0.0, "overlap_steps": 5},
    "two fragments": {"outer_momentum": 0.0, "num_fragments": 2},
    "asynchronous": {"outer_lr": 0.5, "outer_momentum": 0.0, "mode": "async", "successors": 0},
}


def shapes() -> Tensor:
    """The ten shapes: [10, 10, 10], smooth, the same for every seed."""
    drawn = torch.Generator().manual_seed(1)
    rough = torch.randn(10, 1, 4, 4, generator=drawn)
    return nn.functional.interpolate(rough, size=(10, 10), mode="bilinear").squeeze(1)


SHAPES = shapes()


def images(drawn: torch.Generator, count: int, peer: int | None, *, unlike: bool) -> tuple[Tensor, Tensor]:
    """Images [count, 1, 12, 12] and their shapes. `peer`: whose; None: of both."""
    whose = torch.randint(0, 2, (count,), generator=drawn) if peer is None else torch.full((count,), peer)
    labels = torch.randint(0, 10, (count,), generator=drawn)
    if unlike:
        labels = labels // 2 + 5 * whose
    drawn_images = torch.zeros(count, 1, 12, 12)
    shifts = torch.randint(0, 3, (count, 2), generator=drawn).tolist()
    for number, (down, right) in enumerate(shifts):
        drawn_images[number, 0, down : down + 10, right : right + 10] = SHAPES[labels[number]]
    bright = torch.rand(count, 1, 1, 1, generator=drawn) + (2.0 * whose.view(-1, 1, 1, 1) if unlike else 0.0)
    return drawn_images * (0.5 + bright) + 1.2 * torch.randn(drawn_images.shape, generator=drawn) + bright, labels


def cnn(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [
        layer
        for i, o in ((1, 8), (8, 16))
        for layer in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(144, 10))


def accuracy(model: nn.Module, *, unlike: bool) -> float:
    """Percent of 4000 held-out images of both peers."""
    held_out, labels = images(torch.Generator().manual_seed(999), 4000, None, unlike=unlike)
    model.eval()
    with torch.no_grad():
        return 100 * (model(held_out).argmax(1) == labels).float().mean().item()


def renewed(model: nn.Module, *, unlike: bool) -> nn.Module:
    """A copy whose statistics `update_bn` has computed anew."""
    model, drawn = copy.deepcopy(model), torch.Generator().manual_seed(77)

    def batches() -> Iterator[Tensor]:
        for _ in range(50):
            yield images(drawn, BATCH, None, unlike=unlike)[0]

    update_bn(batches(), model)
    return model


def learner(seed: int, number: int, *, unlike: bool) -> tuple[nn.Sequential, Any]:
    model, drawn = cnn(seed), torch.Generator().manual_seed(100 * seed + number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step() -> None:
        data, labels = images(drawn, BATCH, number, unlike=unlike)
        loss = nn.functional.cross_entropy(model(data), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


async def states(config: Mapping[str, Any], seed: int, *, unlike: bool) -> list[dict[str, Tensor]]:
    """The global state_dict of each peer after the run."""
    swarm, peers = MemoryNetwork(), list[Trained]()
    for number, name in enumerate("ab"):
        model, step = learner(seed, number, unlike=unlike)
        peer = MemoryPeer(swarm, name, {**config}, model=model)
        peers.append(Trained(peer, model, step))
        await peers[-1].enter()
    interval, later = EVERY // config.get("num_fragments", 1), config.get("overlap_steps", 0)
    for number in range(ROUNDS * config.get("num_fragments", 1)):
        first = interval if not number else interval - later
        if config.get("mode") == "async":
            for one in peers:
                await one.exchange(first)
        else:
            await asyncio.gather(*(one.exchange(first, later=later) for one in peers))
    for one in peers:
        await one.merge()
    found = [await one.state() for one in peers]
    for one in peers:
        await one.peer.stop()
    return found


def row(setting: Mapping[str, Any], seeds: int, *, unlike: bool) -> list[float]:
    """The medians: of each peer as it is, then of each after `update_bn`."""
    quick = {**QUICK, "heartbeat_timeout": 30.0, "codec": "bf16", "sync_every": EVERY, "audit_rate": 0.0}
    start = {} if setting.get("mode") == "async" else {"start_peers": 2}
    found = []
    for seed in range(seeds):
        models = []
        for state in asyncio.run(states({**quick, **start, **setting}, seed, unlike=unlike)):
            models.append(cnn(seed))
            models[-1].load_state_dict(state)
        anew = [renewed(model, unlike=unlike) for model in models]
        found.append([accuracy(model, unlike=unlike) for model in (*models, *anew)])
    return [statistics.median(column) for column in zip(*found, strict=True)]


def main(seeds: int) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    sys.stdout.write("| data | run | buffers | peer a | peer b | a after update_bn | b after update_bn |\n")
    sys.stdout.write("|---|---|---|---|---|---|---|\n")
    for unlike in (True, False):
        for name, setting in SETTINGS.items():
            for buffers in ("local", "average"):
                cells = [f"{found:.1f} %" for found in row({**setting, "buffers": buffers}, seeds, unlike=unlike)]
                data = "unlike" if unlike else "like"
                sys.stdout.write(f"| {data} | {name} | {buffers} | {' | '.join(cells)} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
