"""The built-in trainer: a small GPT on real text, trained in a run.

Law: uses only the public API, as any user's script would. What a run needs beyond the training loop belongs in `Peer`.
The learning rate is a pure function of step counts; the windows of a peer are one of the text, a seed and a key, so
that a restarted peer draws the same ones as before. What is reported decides nothing; the command sets up logging.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError, reason
from p2p_diloco.interrupts import Interrupts, exit_code
from p2p_diloco.observe.figures import figure
from p2p_diloco.peer import Peer
from p2p_diloco.peer.devices import usable
from p2p_diloco.peer.metrics import Metrics
from p2p_diloco.trainer.blocks import Block, Text, hash_of, load_text
from p2p_diloco.trainer.config import TrainerConfig
from p2p_diloco.trainer.gpt import GPT, GPTConfig

OWN_PART = 3
"""A peer's own part is one of every OWN_PART blocks."""


def joined(blocks: tuple[Block, ...]) -> Tensor:
    """Return the blocks' bytes, one block after another, as uint8 [bytes]."""
    return torch.frombuffer(bytearray(b"".join(block.content for block in blocks)), dtype=torch.uint8)


def training_part(text: Text, num_shards: int = 1, shard_index: int = 0) -> Tensor:
    """Return every `num_shards`-th training block, beginning with block `shard_index`, as uint8 [bytes]. The parts are
    disjoint and together make up the whole text. Raises ConfigError when there are fewer blocks than parts."""
    if num_shards > len(text.training):
        raise ConfigError(
            f"is more than the {len(text.training)} blocks that the training text has",
            key="num_shards",
            value=num_shards,
            mend="give more text or fewer parts",
        )
    return joined(text.training[shard_index::num_shards])


def own_part(text: Text, key: str, context: int) -> Tensor:
    """Return a third of the training blocks, chosen by the peer's identity (`key`), as uint8 [bytes].

    Each peer ranks all blocks by a hash of its key and the block's name, and takes the first third (and further blocks
    while the sum is no longer than `context`). So no peer needs to know the others. Two peers share about a third of
    their parts, and k peers together train on 1 − (2/3)^k of the text.
    """
    ranked = sorted(text.training, key=lambda block: (hash_of(f"{key}/{block.name}"), block.name))
    count = -(-len(ranked) // OWN_PART)
    while count < len(ranked) and sum(len(block.content) for block in ranked[:count]) <= context:
        count += 1
    return joined(tuple(ranked[:count]))


class Batches:
    """Draws an endless sequence of batches of windows from a peer's text. Batch n depends only on the text, the seed,
    the key and n, so it is enough to save `position`, the number of the next batch."""

    def __init__(self, content: Tensor, *, batch_size: int, context: int, seed: int, key: str) -> None:
        """`content` is uint8 [bytes]; `key` tells peers apart (their identity). Raises ConfigError when the
        text is shorter than one window.
        """
        _check_length(content, context)
        self.content = content
        self.batch_size = batch_size
        self.context = context
        self.position = 0
        self._seed = hash_of(f"{seed}:{key}")

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the next batch, each int64 [batch_size, context]. A target is the byte after
        its input."""
        generator = torch.Generator().manual_seed((self._seed + self.position) % 2**63)
        self.position += 1
        last = len(self.content) - self.context
        starts = torch.randint(last, (self.batch_size,), generator=generator)
        return _windows(self.content, starts, self.context)


def held_out_batches(text: Text, *, count: int, batch_size: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` batches that are spread evenly over the held-out text. They are the same on every peer and at every
    call.

    Raises ConfigError when the held-out text is shorter than one window.
    """
    content = joined(text.held_out)
    _check_length(content, context)
    last = len(content) - context - 1
    starts = torch.linspace(0, last, count * batch_size, dtype=torch.float64).long()
    for first in range(0, len(starts), batch_size):
        yield _windows(content, starts[first : first + batch_size], context)


def _windows(content: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = content[starts[:, None] + torch.arange(context + 1)].long()  # [batch, context + 1]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _check_length(content: Tensor, context: int) -> None:
    if len(content) <= context:
        raise ConfigError(
            f"needs {context + 1} bytes of text in each part, but one part has {len(content)}",
            key="context",
            value=context,
            mend="give more text in data, or make context smaller",
        )


BETAS = (0.9, 0.95)
"""AdamW's betas, as usual for GPT-like models."""

WARM_LINE_EVERY_S = 5.0
"""Seconds between two log lines of the warm start."""

LINE_EVERY_S, UNWATCHED_EVERY_S = 3.0, 10.0
"""Seconds between two log lines: on a terminal, and elsewhere, where fewer lines keep log files short."""
LOSS_MEMORY = 0.95
"""Weight of earlier losses in the running mean that is shown, because the losses of single batches vary too much."""

Windows = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets, each int64 [batch, context]."""
Stopped = Literal["finished", "steps", "interrupted", "terminated"]
"""How training ended: with the run, after this peer's own `steps`, or by a signal (SIGINT or SIGTERM)."""

log = logging.getLogger("p2p_diloco.trainer")


def main(run: RunConfig, local: PeerConfig, config: TrainerConfig, text: Text | None = None) -> int:
    """Train until the run ends, this peer has made `steps` inner steps, or a signal comes. Return the exit status.

    `text`: the text that `data` names, if it has been read already.

    Raises:
        ConfigError: the text, the device or the log file can't be used. `Peer` raises further errors.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    text = text or load_text(config.data)
    fixed = training_part(text, config.num_shards or 1, config.shard_index)
    size, context = config.batch_size, config.context
    draw = partial(Batches, batch_size=size, context=context, seed=config.seed)
    judged = list(held_out_batches(text, count=config.eval_batches, batch_size=size, context=context))
    warm_batches = draw(fixed, key="warm start")
    shape = GPTConfig(config.layers, config.width, config.heads, context, seed=config.seed)
    model = GPT(shape).to(usable(config.device))
    stopped: Stopped
    status = 0
    with Progress(model, judged, config.log_path) as progress:
        try:
            with Interrupts():
                if config.warm_start:
                    log.info("warm start: this peer trains %d steps alone before it joins", config.warm_start)
                    warm_start(model, warm_batches, config.warm_start, config)
                optimizer = new_optimizer(model, config)
                with Peer(model, optimizer, config=run, local=local) as peer:
                    content = fixed if config.num_shards is not None else own_part(text, peer.peer_id, context)
                    batches = draw(content, key=peer.peer_id)
                    stopped = train(model, optimizer, peer, batches, config, progress)
                if stopped == "steps":  # leaving may have exchanged the last steps
                    progress.judge(peer)
                progress.digest = peer.digest
        except KeyboardInterrupt as interrupt:
            status = exit_code(interrupt)
            stopped = "interrupted" if status == 128 + signal.SIGINT else "terminated"
        summary = progress.summary(stopped)
        if config.summary_json:
            sys.stdout.write(json.dumps(summary) + "\n")
        else:
            loss = "not evaluated" if progress.val_loss is None else f"held-out loss {progress.val_loss:.4f}"
            log.info("%s after %d steps, %s", stopped, progress.steps, loss)
    return status


def train(
    model: GPT, optimizer: Optimizer, peer: Peer, batches: Batches, config: TrainerConfig, progress: Progress
) -> Stopped:
    """Make inner steps until the run has `finished` or this peer has made its own `steps`.

    The number of the next batch, and the learning rate after a peer's own warm-up, follow the run's step, so that a
    peer that joins late, or joins again, continues where the others are.
    """
    batches.position = peer.global_step
    next_judgement, judged_at = peer.epoch + config.eval_every_epochs, -1
    while not peer.finished and (config.steps is None or progress.steps < config.steps):
        run = peer.config
        horizon = run_horizon(run, config.steps, max(1, peer.metrics.peers) if run.mode == "async" else 1)
        _follow_schedule(optimizer, peer.global_step, progress.steps, horizon, config)
        loss = _backward(model, next(batches), config.clip)
        peer.report(loss=loss, samples=config.batch_size)
        optimizer.step()  # the exchange with the other peers happens in this call
        optimizer.zero_grad()
        progress.stepped(peer, loss)
        if peer.epoch >= next_judgement:
            next_judgement = peer.epoch + config.eval_every_epochs
            judged_at = progress.steps
            progress.judge(peer, within=peer.pause())
        if config.pause_s:
            time.sleep(config.pause_s)
    if not peer.finished:
        return "steps"
    if judged_at != progress.steps:
        progress.judge(peer, within=peer.pause())
    return "finished"


def warm_start(model: GPT, batches: Batches, steps: int, config: TrainerConfig) -> None:
    """Train `model` alone for `steps` inner steps, with an optimizer of its own, which is dropped at the end.

    In short runs a high outer momentum harms a model near its random start, and helps later. So the founder may train a
    little before it founds the run; the others fetch its model.
    """
    optimizer = new_optimizer(model, config)
    told_at = time.monotonic()
    for step in range(steps):
        _follow_schedule(optimizer, step, step, None, config)
        loss = _backward(model, next(batches), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        if time.monotonic() - told_at >= WARM_LINE_EVERY_S:
            told_at = time.monotonic()
            log.info("warm start: step %d of %d  loss %.3f", step + 1, steps, loss)


def new_optimizer(model: GPT, config: TrainerConfig) -> AdamW:
    """Return a new AdamW with the trainer's settings, for use as the inner optimizer."""
    return AdamW(model.parameters(), lr=config.lr, betas=BETAS, weight_decay=config.weight_decay)


@torch.no_grad()
def mean_loss(model: GPT, windows: Windows) -> float:
    """Return the mean loss over `windows` of equal length, in nats a byte."""
    device = _device(model)
    losses: list[float] = [model(x.to(device), y.to(device)).item() for x, y in windows]
    return sum(losses) / len(losses)


def _backward(model: GPT, batch: tuple[Tensor, Tensor], clip: float) -> float:
    """Compute the clipped gradients of one batch, and return its loss."""
    tokens, targets = (part.to(_device(model)) for part in batch)  # int64 [batch, context] each
    loss: Tensor = model(tokens, targets)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    return loss.item()


def _follow_schedule(
    optimizer: Optimizer, step: int, own_step: int, horizon: int | None, config: TrainerConfig
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = config.lr * share_of_rate(config, step, own_step, horizon)


def _device(model: GPT) -> torch.device:
    return model.tokens.weight.device


# -- the learning rate: the cosine follows the run's steps, so that a late peer continues where the others are


def share_of_rate(config: TrainerConfig, step: int, own_step: int, horizon: int | None) -> float:
    """Return the learning rate of the run's inner step `step`, as a share of the highest one. `own_step` is the number
    of this step among the peer's own steps; both count from 0, and are equal for a peer that has taken part from the
    beginning.

    The run's rate is 1 up to step `warmup_steps`, then half a cosine down to `min_lr_ratio` at `horizon`, where it
    stays; without a horizon it stays at 1. Over a peer's own first `warmup_steps` its rate rises linearly
    to the run's, because its inner optimizer starts without any state, however far the run is.
    """
    warmup, least = config.warmup_steps, config.min_lr_ratio
    risen = min(1.0, (own_step + 1) / max(1, warmup))
    if horizon is None or step < warmup:
        return risen
    gone = min(1.0, (step - warmup) / max(1, horizon - warmup))
    return risen * (least + (1 - least) * (1 + math.cos(math.pi * gone)) / 2)


def run_horizon(run: RunConfig, own_steps: int | None, submitters: int = 1) -> int | None:
    """Return the inner step at which the schedule ends: the run's last step if it is known, else this peer's last step;
    None if neither is known. `submitters`: in asynchronous mode the number of peers, because each peer's submission
    makes an epoch; otherwise 1."""
    return own_steps if run.stop_after_epochs is None else run.stop_after_epochs * run.sync_every // submitters


# -- what is reported


class Progress:
    """Keeps the latest figures of the training, and logs them every few seconds. It is a context manager, which closes
    the file of rows at its end.

    `judged`: the windows on which the run's global parameters are evaluated, in a model like `model`. `rows_path` gets
    one JSON object per step, and one per evaluation.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(self, model: GPT, judged: Windows, rows_path: Path | None = None) -> None:
        self._judge, self._judged = GPT(model.config).to(_device(model)), judged
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.steps = 0
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.digest = ""
        self._at = (0, 0)  # global step, epoch
        self._traffic = Metrics()
        self._started = self._shown_at = time.monotonic()
        self._steps_shown = 0
        self._rate: float | None = None  # steps a second, up to the last line
        self._line_every_s = LINE_EVERY_S if sys.stderr.isatty() else UNWATCHED_EVERY_S
        self._rows = _opened(rows_path)

    def stepped(self, peer: Peer, loss: float) -> None:
        self.steps += 1
        self.loss = loss if self.loss is None else LOSS_MEMORY * self.loss + (1 - LOSS_MEMORY) * loss
        self._note(peer, loss, None)
        if time.monotonic() - self._shown_at >= self._line_every_s:
            self._show(peer)

    def judge(self, peer: Peer, within: AbstractContextManager[object] | None = None) -> None:
        """Evaluate the global parameters, which are the run's result, instead of this peer's local ones. `within`: a
        pause of the peer, while which the others wait, and in which it reports the loss."""
        if self._judged:
            with within or nullcontext():
                epoch = peer.epoch  # it may rise during the evaluation
                self._judge.load_state_dict(peer.global_state_dict())
                self.val_loss = mean_loss(self._judge, self._judged)
                self._note(peer, None, self.val_loss, epoch)
                self._show(peer)
                if within is not None:
                    peer.report(held_out_loss=self.val_loss)

    def summary(self, stopped: Stopped) -> dict[str, Any]:
        """Return the summary of the training, as `--summary-json` prints it. Losses are in nats a byte."""
        return {
            "stopped": stopped,
            "steps": self.steps,  # this peer's own
            "global_step": self._at[0],
            "epoch": self._at[1],
            "loss": self.loss,  # a running mean
            "val_loss": self.val_loss,  # of the global parameters when last evaluated
            "seconds": round(time.monotonic() - self._started, 3),
            "parameters": self.parameters,  # tied ones once
            "rounds": self._traffic.sync_count,  # that this peer contributed to
            "waiting_s": round(self._traffic.waiting_time_s, 3),
            "bytes_sent": self._traffic.bytes_sent,
            "bytes_received": self._traffic.bytes_received,
            "digest": self.digest,  # the run's; empty after an interrupt, and without a run
        }

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows is not None:
            self._rows.close()

    def _note(self, peer: Peer, loss: float | None, val_loss: float | None, epoch: int | None = None) -> None:
        self._at, self._traffic = (peer.global_step, peer.epoch if epoch is None else epoch), peer.metrics
        if self._rows is not None:
            row = {"time": time.time(), "step": self.steps, "global_step": self._at[0], "epoch": self._at[1]}
            self._rows.write(json.dumps({**row, "loss": loss, "val_loss": val_loss}) + "\n")

    def _show(self, peer: Peer) -> None:
        now = time.monotonic()
        if self.steps > self._steps_shown:  # an evaluation may follow the last line at once
            self._rate = (self.steps - self._steps_shown) / max(now - self._shown_at, 1e-9)
            self._shown_at, self._steps_shown = now, self.steps
        losses = f"loss {figure(self.loss, '.3f')}  held-out {figure(self.val_loss, '.3f')}"
        step, epoch = self._at
        speed = figure(self._rate, ".1f")
        log.info("step %d  epoch %d  %s  steps/s %s  peers %d", step, epoch, losses, speed, peer.metrics.peers)


def _opened(rows_path: Path | None) -> TextIO | None:
    if rows_path is None:
        return None
    try:
        return rows_path.open("a", buffering=1, encoding="utf-8")  # by line: a killed peer leaves whole rows
    except OSError as error:
        wrong, mend = f"can't be written ({reason(error)})", "name a file in a folder that this user may write to"
        raise ConfigError(wrong, key="log_path", value=rows_path, mend=mend) from None
