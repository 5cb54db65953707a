"""The built-in trainer: a small GPT on real text, trained in a run.

Law: uses only the public API, as any user's script would. What a run needs beyond the training loop belongs in `Peer`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.interrupts import Interrupts, exit_code
from p2p_diloco.peer import Peer
from p2p_diloco.peer.devices import usable
from p2p_diloco.trainer.blocks import Text, load_text
from p2p_diloco.trainer.config import TrainerConfig
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.progress import Progress, Stopped, log
from p2p_diloco.trainer.schedule import learning_rate, run_horizon
from p2p_diloco.trainer.text import Batches, held_out_batches, own_part, training_part

BETAS = (0.9, 0.95)
"""AdamW's betas, as usual for GPT-like models."""

WARM_LINE_EVERY_S = 5.0
"""Seconds between two log lines of the warm start."""

Windows = Sequence[tuple[Tensor, Tensor]]
"""Inputs and targets, each int64 [batch, context]."""


def main(
    run_config: Mapping[str, object],
    peer_config: PeerConfig,
    trainer_config: TrainerConfig,
    text: Text | None = None,
) -> int:
    """Train until the run ends, this peer has made `steps` inner steps, or a signal comes. Return the exit status.

    `run_config`: the run's settings that were given. `text`: the text that `data` names, if it has been read already.

    Raises:
        ConfigError: the text, the device or the log file can't be used. `Peer` raises further errors.
    """
    run, config = RunConfig.model_validate(dict(run_config)), trainer_config
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    text = text or load_text(config.data)
    fixed = training_part(text, config.num_shards or 1, config.shard_index)
    size, context = config.batch_size, config.context
    draw = partial(Batches, batch_size=size, context=context, seed=config.seed)
    judged = list(held_out_batches(text, count=config.eval_batches, batch_size=size, context=context))
    warm_batches = draw(fixed, key="warm start")
    model = GPT(_model_config(config)).to(usable(config.device))
    stopped: Stopped
    status = 0
    with Progress(config.log_path) as progress:
        progress.parameters = sum(parameter.numel() for parameter in model.parameters())
        try:
            with Interrupts():
                if config.warm_start:
                    log.info("warm start: this peer trains %d steps alone before it joins", config.warm_start)
                    warm_start(model, warm_batches, config.warm_start, config)
                optimizer = new_optimizer(model, config)
                with Peer(model, optimizer, config=run, local=peer_config) as peer:
                    content = fixed if config.num_shards is not None else own_part(text, peer.peer_id, config.context)
                    batches = draw(content, key=peer.peer_id)
                    stopped = train(model, optimizer, peer, batches, judged, config, progress)
                if stopped == "steps":  # leaving may have exchanged the last steps
                    _judge(GPT(model.config).to(_device(model)), peer, judged, progress)
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
    model: GPT,
    optimizer: Optimizer,
    peer: Peer,
    batches: Batches,
    judged: Windows,
    config: TrainerConfig,
    progress: Progress,
) -> Stopped:
    """Make inner steps until the run has `finished` or this peer has made its own `steps`.

    The number of the next batch, and the learning rate after a peer's own warm-up, follow the run's step, so that a
    peer that joins late, or joins again, continues where the others are.
    """
    judge = GPT(model.config).to(_device(model))
    batches.position = peer.global_step
    next_judgement, judged_at = peer.epoch + config.eval_every_epochs, -1
    while not peer.finished and (config.steps is None or progress.steps < config.steps):
        run = peer.config
        horizon = run_horizon(
            epochs=run.stop_after_epochs,
            sync_every=run.sync_every,
            own_steps=config.steps,
            submitters=max(1, peer.metrics.peers) if run.mode == "async" else 1,
        )
        _follow_schedule(optimizer, peer.global_step, progress.steps, horizon, config)
        loss = _backward(model, next(batches), config.clip)
        peer.report(loss=loss, samples=config.batch_size)
        optimizer.step()  # the exchange with the other peers happens in this call
        optimizer.zero_grad()
        progress.stepped(peer, loss)
        if peer.epoch >= next_judgement:
            next_judgement = peer.epoch + config.eval_every_epochs
            judged_at = progress.steps
            _judge_in_run(judge, peer, judged, progress)
        if config.pause_s:
            time.sleep(config.pause_s)
    if not peer.finished:
        return "steps"
    if judged_at != progress.steps:
        _judge_in_run(judge, peer, judged, progress)
    return "finished"


def warm_start(
    model: GPT, batches: Batches, steps: int, config: TrainerConfig, clock: Callable[[], float] = time.monotonic
) -> None:
    """Train `model` alone for `steps` inner steps, with an optimizer of its own, which is dropped at the end.

    In short runs a high outer momentum harms a model near its random start, and helps later. So the founder may train a
    little before it founds the run; the others fetch its model.
    """
    optimizer = new_optimizer(model, config)
    told_at = clock()
    for step in range(steps):
        _follow_schedule(optimizer, step, step, None, config)
        loss = _backward(model, next(batches), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        if clock() - told_at >= WARM_LINE_EVERY_S:
            told_at = clock()
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


def _judge(judge: GPT, peer: Peer, judged: Windows, progress: Progress) -> None:
    """Evaluate the global parameters, which are the run's result, instead of this peer's local ones."""
    if judged:
        epoch = peer.epoch  # the epoch may rise during the evaluation
        judge.load_state_dict(peer.global_state_dict())
        progress.evaluated(peer, epoch, mean_loss(judge, judged))


def _judge_in_run(judge: GPT, peer: Peer, judged: Windows, progress: Progress) -> None:
    """Evaluate the global parameters while the other peers wait."""
    if judged:
        with peer.pause():
            _judge(judge, peer, judged, progress)
            peer.report(held_out_loss=progress.val_loss)


def _follow_schedule(
    optimizer: Optimizer, step: int, own_step: int, horizon: int | None, config: TrainerConfig
) -> None:
    rate = learning_rate(
        step,
        own_step=own_step,
        horizon=horizon,
        peak=config.lr,
        warmup_steps=config.warmup_steps,
        min_ratio=config.min_lr_ratio,
    )
    for group in optimizer.param_groups:
        group["lr"] = rate


def _model_config(config: TrainerConfig) -> GPTConfig:
    return GPTConfig(config.layers, config.width, config.heads, config.context, seed=config.seed)


def _device(model: GPT) -> torch.device:
    return model.tokens.weight.device
