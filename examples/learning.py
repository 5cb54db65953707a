"""How much several peers gain over one: the built-in model, trained by several replicas in this one process.

No network and no node: each replica makes its inner steps, then the mean pseudo-gradient of the fragment that
is due takes one outer step, and is merged some steps later if asked, as in a run without faults. Prints
rows of docs/results.md; 3 x 400 steps take about a minute a seed.

python examples/learning.py --peers 3 --steps 400 --sync-every 20 --warm-start 100 --seeds 0 1 2
python examples/learning.py --peers 3 --codec e3m0 --reply-codec bf16 --seeds 0 1 2
python examples/learning.py --peers 3 --fragments 2 --overlap-steps 1 --merge-alpha 0.5 --seeds 0 1 2
python examples/learning.py --peers 1 --steps 400 --warm-start 100 --seeds 0 1 2
"""

import argparse
import statistics
import sys
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from p2p_diloco.core.events import Carry
from p2p_diloco.core.version import ContributionId
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.feedback import Feedback
from p2p_diloco.tensors.flat import BLOCK
from p2p_diloco.tensors.layout import FragmentPlan, Layout, specs_of
from p2p_diloco.tensors.outer import OuterOptimizer
from p2p_diloco.trainer.blocks import load_text
from p2p_diloco.trainer.config import TrainerConfig
from p2p_diloco.trainer.gpt import GPT, GPTConfig
from p2p_diloco.trainer.schedule import learning_rate
from p2p_diloco.trainer.text import Batches, held_out_batches, training_part
from p2p_diloco.trainer.train import mean_loss, new_optimizer, warm_start

TRAINER = TrainerConfig()
TEXT = load_text()
TRAINING = training_part(TEXT)  # uint8 [bytes]
HELD_OUT = list(held_out_batches(TEXT, count=8, batch_size=64, context=TRAINER.context))


def draw(seed: int, key: str) -> Batches:
    """Random batches of one replica, from all of the training text."""
    return Batches(TRAINING, batch_size=TRAINER.batch_size, context=TRAINER.context, seed=seed, key=key)


def flat(model: GPT) -> Tensor:
    """The parameters in one vector, a tied one once: fp32 [parameters]."""
    return parameters_to_vector(model.parameters()).detach()


def load(model: GPT, theta: Tensor) -> None:
    """Copy the global parameters into a replica (a copy, because the parameters become views of the given tensor)."""
    vector_to_parameters(theta.clone(), model.parameters())


def warmed(seed: int, steps: int) -> Tensor:
    """The warm-started model from which all replicas of a seed begin."""
    model = GPT(GPTConfig(seed=seed))
    warm_start(model, draw(seed, "warm"), steps, TRAINER)
    return flat(model)


def inner_steps(model: GPT, batches: Batches, steps: int, horizon: int) -> Iterator[None]:
    """Train one replica; a generator that yields after each step."""
    optimizer = new_optimizer(model, TRAINER)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step,
                horizon=horizon,
                peak=TRAINER.lr,
                warmup_steps=TRAINER.warmup_steps,
                min_ratio=TRAINER.min_lr_ratio,
            )
        tokens, targets = next(batches)  # int64 [batch, context] each
        torch.autograd.backward(model(tokens, targets))
        clip_grad_norm_(model.parameters(), TRAINER.clip)
        optimizer.step()
        optimizer.zero_grad()
        yield


class Sender:
    """Encodes one replica's contributions to a fragment, and keeps the residual."""

    def __init__(self, numel: int, codec: str, *, residual: bool) -> None:
        self._codec, self._sent = codec, 0
        self._feedback = Feedback(numel) if residual and codecs.feeds_back(codec) else None

    def decoded(self, gradient: Tensor) -> Tensor:
        """A pseudo-gradient [parameters] that is counted, as other peers decode it."""
        if self._feedback is not None:
            gradient = self._feedback.added(gradient)
        sent = through(gradient, self._codec)
        if self._feedback is not None:
            self._sent += 1
            self._feedback.sent(id := ContributionId(1, self._sent), sent.split(BLOCK))
            self._feedback.merge(Carry.SUBTRACT, id)
        return sent


def through(flat: Tensor, codec: str) -> Tensor:
    """The vector after encoding and decoding."""
    return codecs.decode(bytes(codecs.encode(flat, codec)), codec, len(flat))


class Outer:
    """The global parameters, and the fragment that is being exchanged with the replicas."""

    def __init__(self, asked: argparse.Namespace, models: list[GPT], theta: Tensor) -> None:
        layout = Layout.build(specs_of(models[0]), asked.fragments)
        self.theta, self.models, self.asked = theta, models, asked
        self.bases = [theta.clone() for _ in models]
        self.plan = FragmentPlan.of(layout, asked.sync_every)
        self.optimizer = OuterOptimizer(lr=asked.outer_lr, momentum=asked.outer_momentum)
        fragments = (layout.shards_of(number) for number in range(asked.fragments))
        self.places = [slice(shards[0].start, shards[-1].stop) for shards in fragments]
        self.senders = [
            [Sender(len(theta[place]), asked.codec, residual=asked.residual) for _ in models] for place in self.places
        ]
        self.states = [self.optimizer.init_state(len(theta[place])) for place in self.places]
        # step of merging, fragment, local values at sending
        self.under_way: tuple[int, slice, list[Tensor]] | None = None

    def stepped(self, step: int) -> None:
        """Called after each inner step of all replicas: merge what is due to merge, send what is due to send."""
        self.land(step)
        if (fragment := self.plan.due(step)) is None:
            return
        place = self.places[fragment]
        sent = [flat(model)[place].clone() for model in self.models]
        decoded = [
            sender.decoded(base[place] - local)
            for sender, base, local in zip(self.senders[fragment], self.bases, sent, strict=True)
        ]
        mean = through(torch.stack(decoded).mean(0), self.asked.reply_codec)
        new, self.states[fragment] = self.optimizer.step(self.theta[place], self.states[fragment], mean)
        self.theta[place] = new
        self.under_way = step + self.asked.overlap_steps, place, sent
        self.land(step)

    def land(self, step: int) -> None:
        """Merge the fragment under way if its time has come."""
        if self.under_way is None or self.under_way[0] > step:
            return
        _, place, sent = self.under_way
        self.under_way = None
        for model, base, then in zip(self.models, self.bases, sent, strict=True):
            local = flat(model).clone()
            if self.asked.merge == "mix":
                local[place] = torch.lerp(self.theta[place], local[place], self.asked.merge_alpha)
            else:
                local[place] = self.theta[place] + (local[place] - then)
            base[place] = self.theta[place]
            load(model, local)


def held_out_loss(asked: argparse.Namespace, seed: int) -> float:
    """Held-out loss at the end, nats a byte: of the global parameters, or of a replica alone."""
    theta = warmed(seed, asked.warm_start)
    models = [GPT(GPTConfig(seed=seed)) for _ in range(asked.peers)]
    for model in models:
        load(model, theta)
    outer = Outer(asked, models, theta)
    training = [
        inner_steps(model, draw(seed, f"peer{index}"), asked.steps, asked.steps) for index, model in enumerate(models)
    ]
    for step in range(1, asked.steps + 1):
        for replica in training:
            next(replica)
        if asked.peers > 1:
            outer.stepped(step)
    if asked.peers > 1:
        load(models[0], outer.theta)
    return mean_loss(models[0], HELD_OUT)


def main() -> None:
    """Print a row: the setting, the mean over the seeds, and their standard deviation."""
    parser = argparse.ArgumentParser(description="How much several peers gain over one, in one process.")
    parser.add_argument("--peers", type=int, default=3, help="replicas; 1: no outer step at all")
    parser.add_argument("--steps", type=int, default=400, help="inner steps of each replica")
    parser.add_argument("--sync-every", type=int, default=20, help="inner steps between two outer steps")
    parser.add_argument("--fragments", type=int, default=1, help="fragments of the model, exchanged in turn")
    parser.add_argument("--overlap-steps", type=int, default=0, help="inner steps between sending and merging")
    parser.add_argument("--merge", choices=("mix", "rebase"), default="mix")
    parser.add_argument("--merge-alpha", type=float, default=0.0, help="share of the local values with --merge mix")
    parser.add_argument("--warm-start", type=int, default=100, help="inner steps before all replicas start")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--codec", default="fp32", choices=codecs.CODECS, help="of pseudo-gradients")
    parser.add_argument("--reply-codec", default="fp32", choices=codecs.CODECS, help="codec of the mean")
    parser.add_argument(
        "--no-residual", dest="residual", action="store_false", help="do not feed the encoding error back"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    losses = [held_out_loss(asked, seed) for seed in asked.seeds]
    spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
    how = f"H={asked.sync_every}, {asked.outer_lr}/{asked.outer_momentum}" if asked.peers > 1 else "alone"
    if asked.fragments > 1:
        how += f", {asked.fragments} fragments"
    if asked.overlap_steps:
        way = "rebase" if asked.merge == "rebase" else f"mix {asked.merge_alpha}"
        how += f", merged {asked.overlap_steps} steps later by {way}"
    if asked.codec != "fp32" or asked.reply_codec != "fp32":
        how += f", {asked.codec}{'' if asked.residual else ' without residual'}, reply {asked.reply_codec}"
    who = f"{asked.peers} peers" if asked.peers > 1 else "one peer"
    row = (f"{who}, {how}", asked.warm_start, asked.steps, f"{statistics.mean(losses):.3f}{spread}")
    sys.stdout.write(f"| {' | '.join(map(str, row))} |\n")


if __name__ == "__main__":
    main()
