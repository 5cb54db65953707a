"""`DilocoCallback` for the Trainer of Transformers.

Law: the callback decides when to enter, to evaluate and to leave; `TakingPart` does it. Trainer's own counters
(`state.global_step`, epochs, checkpoint names) count this peer's own steps; the learning rate, evaluation, saving and
the end follow the run's steps.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from p2p_diloco.errors import ConfigError
from p2p_diloco.integrations.schedule import follow
from p2p_diloco.integrations.taking_part import OfARun, SharedLoader, TakingPart, as_one_peer
from p2p_diloco.peer.extents import is_sharded
from p2p_diloco.peer.peer import Peer

try:
    from accelerate.data_loader import get_sampler
    from transformers import TrainerCallback, set_seed
except ImportError as error:
    raise ImportError(
        f"p2p_diloco.integrations.transformers needs {error.name}, which isn't installed; "
        "install it with: pip install 'p2p-diloco[hf]'"
    ) from error

KEPT = "p2p_diloco"
"""The peer's counters stand under this name in Trainer's `trainer_state.json`."""


class DilocoCallback(OfARun, TrainerCallback):  # type: ignore[misc]  # its types are not read
    """Makes a Trainer one peer of a run.

    The arguments are those of `Peer` after the optimizer. Without arguments, `Peer.from_env` makes the peer, which
    trains alone unless `p2p-diloco join` started the program. Trainer evaluates and saves the global parameters. The
    model holds the run's result when `train` returns.
    """

    def __init__(self, **settings: Any) -> None:
        self._part = TakingPart(settings)
        self._at = 0
        self._counter = SampleCounter()
        self._counting = ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, lr_scheduler: Any, **others: Any
    ) -> None:
        """Enter the run and continue at the run's step. The order of batches is seeded by this peer, so that no two
        peers train on the same batches.

        Raises:
            ConfigError: Trainer would make no step on the last batches of a shared data set.
        """
        steps = args.gradient_accumulation_steps
        if steps > 1 and not all(loader.endless for loader in self._part.loaders):
            mend = "use larger batches, or leave `epochs` out, so that max_steps ends training"
            raise ConfigError("must be 1 if the data ends", key="gradient_accumulation_steps", value=steps, mend=mend)
        if self._part.loaders:
            args.ignore_data_skip = True  # the run knows which samples are used
        peer = self._part.enter(model if any(map(is_sharded, model.parameters())) else as_one_peer(model), optimizer)
        if state.global_step:  # resumed
            peer.load_state_dict(state.stateful_callbacks.get(KEPT) or {"local_step": state.global_step})
        if isinstance(peer, Peer):
            set_seed(peer.seed)
            loader = others["train_dataloader"]
            sampler: Any = None if isinstance(loader, SharedLoader) else get_sampler(loader)
            if hasattr(sampler, "initial_seed"):  # Accelerate's, which Trainer uses unless told otherwise
                sampler.initial_seed = peer.seed
        self._at = peer.global_step
        follow(lr_scheduler, self._at)
        self._counting.close()  # an exception may have ended an earlier training
        self._counter = SampleCounter()
        self._counting.callback(model.register_forward_pre_hook(self._counter, with_kwargs=True).remove)
        if args.eval_on_start:
            self._part.show_global()

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the pause of an evaluation or a save that is over."""
        self._part.show_own()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report the samples of this step."""
        self.peer.report(samples=self._counter.taken())

    def on_step_end(self, args: Any, state: Any, control: Any, *, lr_scheduler: Any, **others: Any) -> None:
        """Follow the run: its learning rate, its end, and when it evaluates and saves."""
        before, self._at = self._at, self.peer.global_step
        follow(lr_scheduler, self._at)
        state.stateful_callbacks[KEPT] = self.peer.state_dict()
        if self.peer.finished or self._at >= state.max_steps:
            control.should_training_stop = True
        if self._at != state.global_step:  # all peers pause at the same steps of the run, so each waits only once

            def due(strategy: str, every: int) -> bool:
                passed = every and self._at // every > before // every
                return strategy == "steps" and bool(passed or control.should_training_stop)

            control.should_evaluate = due(args.eval_strategy, state.eval_steps) and self._at >= args.eval_delay
            control.should_save = due(args.save_strategy, state.save_steps)
        self._stand_by(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Prepare for an evaluation, a save or the end of training, one of which may follow. Training ends if no shared
        data is left."""
        control.should_training_stop |= self._part.data_is_used
        self._part.show_own()
        self._stand_by(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: dict[str, float], **others: Any) -> None:
        """Report the held-out loss."""
        if self._part.inside:
            self.peer.report(held_out_loss=metrics.get("eval_loss"))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, float], **others: Any) -> None:
        """Report the loss, and add the run's step and epoch to what is logged."""
        if not self._part.begun:  # an evaluation before training
            return
        if self._part.inside and "loss" in logs:
            self.peer.report(loss=logs["loss"])
        place = {"run_step": self.peer.global_step, "run_epoch": self.peer.epoch}
        for shown in (logs, *state.log_history[-1:]):
            shown.update(place)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the run, unless the last step has already done so. Nothing stays on the model."""
        self._part.leave()
        self._counting.close()

    def _stand_by(self, control: Any) -> None:
        """Prepare for Trainer's next action: leave the run if training is over; pause if an evaluation or a save
        follows. This happens before Trainer loads its best checkpoint into the model, because the loaded values must
        not be treated as progress."""
        if control.should_training_stop:
            self._part.leave()
        elif control.should_evaluate or control.should_save:
            self._part.show_global()


class SampleCounter:
    """Counts the samples of the model's forward passes in training: the length of the first input. Without such an
    input, they are unknown.

    Holds nothing but a number, because a copy of the model, or a file with the whole model, contains it.
    """

    def __init__(self) -> None:
        self._samples: int | None = 0

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if model.training:
            sizes = (value.size(0) for value in (*inputs, *named.values()) if isinstance(value, Tensor) and value.ndim)
            size = next(sizes, None)
            self._samples = None if size is None or self._samples is None else self._samples + size

    def taken(self) -> int | None:
        """The number of samples since the last call; None if it is unknown."""
        samples, self._samples = self._samples, 0
        return samples
