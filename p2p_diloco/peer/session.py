"""Makes the session of a peer in its run, when a process enters the run. The only process of a peer, or its rank 0,
starts a node; other ranks have none.

Law: starts all parts in order, and each is complete when it is made. The caller's `ExitStack` ends them in reverse
order, also if a later step fails.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from p2p_diloco import errors
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core.version import Version, model_version
from p2p_diloco.errors import NodeDied, UsageError
from p2p_diloco.node.channel import Message
from p2p_diloco.node.shared import SAVE_S_MAX, Setup, SharedMemory
from p2p_diloco.peer.extents import Rank
from p2p_diloco.peer.fitness import Watch
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.inner import InnerState, restore
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.metrics import Metrics, Standing, of_node
from p2p_diloco.peer.node_client import NodeClient, NodeProcess
from p2p_diloco.peer.progress import Blend
from p2p_diloco.peer.rank_hooks import FarModel, OtherRanks, Rank0Client, Rank0Hook, Rank0Model, RankNHook
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors.buffers import fingerprint
from p2p_diloco.tensors.card import card_of
from p2p_diloco.tensors.codec import written_in
from p2p_diloco.tensors.layout import FragmentPlan, Layout, plain_name, specs_of, trainable

START_S = 90.0
"""Seconds that a node has to start, besides `wait_timeout`, which is for its waits for other peers."""
LEAVE_S = 5.0
"""Seconds that a node has to leave the run. The node's `leave_s`, and the time for a checkpoint, are added."""

log = logging.getLogger("p2p_diloco")


@dataclass(frozen=True)
class Trainee:
    """The arguments of a peer: its settings, its model and the model's optimizers. An aggregator has no model and no
    optimizer, an observer no optimizer. `wrappers`: those of the last optimizer, from the outermost."""

    asked: RunConfig
    local: PeerConfig
    model: nn.Module | None
    optimizers: Sequence[Optimizer]
    rank: Rank
    wrappers: Sequence[object] = ()


class Following:
    """The trainer's side of an observer: what it has read of its run. The model changes only in `refresh` and when the
    peer enters, in the calling thread."""

    def __init__(
        self, node: NodeClient, parameters: LocalModel, sync_every: int, first: Message, within_s: float
    ) -> None:
        """`first`: the node's message that the first state is in the shared memory. `within_s`: deadline for the node's
        answer; the node answers when it has a state, or has given up."""
        self._node, self._parameters, self._within_s, self._sync_every = node, parameters, within_s, sync_every
        self._load(first)

    @property
    def standing(self) -> Standing:
        """The epoch and the digest of the state that was read last, and whether it is the run's last one."""
        metrics = Metrics(sync_every=self._sync_every, **of_node(self._node.memory))
        return Standing(self._read["epoch"], self._read["digest"], self._read["finished"], metrics=metrics)

    def refresh(self) -> bool:
        """Read the newest complete state into the model. Returns whether it is newer than the state that was read
        before.

        Raises:
            GaveUpWaiting: no peer sent a state in time. Refused: the run has ended, and no peer has its last state. A
                later call may succeed.
        """
        answer = self._node.ask("refresh", "refreshed", within_s=self._within_s)
        if (error := answer.get("error")) is not None:
            raise errors.from_wire(error)
        self._load(answer)
        return bool(answer["came"])

    def global_values(self) -> dict[str, Tensor]:
        """A copy of the global parameters that were read last, by name."""
        return self._parameters.global_values()

    def keep_values(self) -> None:
        """Keep a copy of the global parameters, which stays after the node's end."""
        self._parameters.keep_values()

    def _load(self, told: Message) -> None:
        self._parameters.merge(dict.fromkeys(self._parameters.slices, Blend.NONE))
        self._read = told


AnyHook = Hook | Rank0Hook | RankNHook
"""The kinds of hooks, which all have the same methods."""


@dataclass(frozen=True)
class Session:
    """The parts of a peer while it is in its run. `node` is None on ranks other than 0. `hook` and `parameters`
    are None without a model. `watch`: None unless this process is a peer that trains, or its rank 0."""

    peer_id: str
    addresses: tuple[str, ...]
    config: RunConfig
    layout: Layout
    memory: SharedMemory
    node: NodeProcess | None = None
    hook: AnyHook | Following | None = None
    parameters: LocalModel | None = None
    watch: Watch | None = None
    save_inner: Callable[[], None] | None = None
    """Saves the inner state beside the checkpoint that the node writes when this peer leaves; None: there is none to
    save, or another rank saves it."""

    @classmethod
    def begun(cls, run: Message, memory: SharedMemory, node: NodeProcess | None = None) -> Session:
        """The session of a peer in this run, of which the node has told; it has no model yet."""
        config, layout = RunConfig.from_wire(run["config"]), Layout.from_wire(run["layout"])
        return cls(run["peer_id"], tuple(run["addresses"]), config, layout, memory, node)

    @property
    def plan(self) -> FragmentPlan:
        """Which parameters are sent together, and when."""
        return FragmentPlan.of(self.layout, self.config.sync_every)

    @property
    def delta(self) -> Tensor:
        """The shared memory of the pseudo-gradient."""
        return self.memory.delta_in(written_in(self.config.codec, self.config.rounding))

    @property
    def standing(self) -> Standing:
        """The position of this peer in the run. For an aggregator, it is read from the memory shared with the node."""
        if self.hook is not None:
            return self.hook.standing
        metrics = Metrics(sync_every=self.config.sync_every, **of_node(self.memory))
        return Standing(max(0, self.memory.epoch), finished=bool(self.memory.finished), metrics=metrics)

    def global_values(self) -> dict[str, Tensor]:
        """The global parameters that were merged or read last, by name.

        Raises:
            UsageError: this peer has no model.
        """
        if self.hook is None:
            raise UsageError("this peer has no model", mend="give it a model and an optimizer, or role=observer")
        return self.hook.global_values()


@dataclass(frozen=True)
class Left:
    """What a peer with a model still knows of its run after it has left."""

    config: RunConfig
    plan: FragmentPlan
    standing: Standing
    parameters: LocalModel

    @classmethod
    def after(cls, session: Session) -> Left:
        """Keep what a peer needs of its session after it has left. Call this before the session's parts end."""
        assert session.parameters is not None, "a peer without a model keeps nothing"
        return cls(session.config, session.plan, session.standing, session.parameters)

    def global_values(self) -> dict[str, Tensor]:
        """The global parameters that were merged last, by name.

        Raises:
            UsageError: they could not be read when this peer left.
        """
        if not self.parameters.has_values:
            mend = "call global_state_dict() before the `with` block ends"
            raise UsageError("this peer has left its run without a copy of the global parameters", mend=mend)
        return self.parameters.global_values()


def enter_with_node(trainee: Trainee, sockets: Sequence[socket.socket], stack: ExitStack) -> Session:
    """Enter the run as the only process of a peer, or as its rank 0 with `sockets` to the other ranks.

    Raises:
        P2PDilocoError: this peer can't take part.
    """
    model = trainee.model
    setup = Setup(trainee.asked, trainee.local, None)
    if model is not None:
        of_model = specs_of(model), fingerprint(model), _card(model), buffers.specs_of(model)
        setup = Setup(trainee.asked, trainee.local, *of_model)
    node = NodeProcess(setup, sockets)
    memory = node.client.memory
    stack.callback(lambda: node.end(LEAVE_S + memory.leave_s + (SAVE_S_MAX if trainee.local.checkpoint_dir else 0.0)))
    if trainee.rank.count == 1:
        return _joined(trainee, node, None, stack)
    ranks = OtherRanks(sockets)
    stack.callback(ranks.close)
    with ranks.told_of_errors():
        session = _joined(trainee, node, ranks, stack)
        assert session.hook is not None, "a group has a model"
        ranks.tell("go on", standing=session.hook.standing)
    return session


def enter_through_rank0(trainee: Trainee, sock: socket.socket, stack: ExitStack) -> Session:
    """Enter the run as a rank other than 0, with a socket to the same peer's rank 0.

    Raises:
        RankDied, P2PDilocoError: rank 0 can't go on.
    """
    assert trainee.model is not None, "a group has a model"
    rank0 = Rank0Client(trainee.rank.index, sock)
    stack.callback(rank0.close)
    values = chain(trainable(trainee.model).values(), (buffer for _, buffer in buffers.candidates(trainee.model)))
    memory = rank0.memory(sum(tensor.numel() for tensor in values))
    session = Session.begun(run := rank0.next(), memory)
    _, inner = _inner_state(trainee, run)
    own = _parameters(trainee, session)
    watch = _watch(trainee, own)
    local = own if rank0.is_near else FarModel(own, rank0, memory.theta, memory.base, session.delta)
    hook = RankNHook(rank0, local, inner.save)
    hook.serve()
    _hook_up(trainee, hook.step, watch, stack)
    return replace(session, hook=hook, parameters=own)


def _joined(trainee: Trainee, node: NodeProcess, ranks: OtherRanks | None, stack: ExitStack) -> Session:
    within_s, memory, client = START_S + trainee.local.wait_timeout, node.client.memory, node.client
    run = _awaited(node, "run", within_s)
    session = Session.begun(run, memory, node)
    config, layout = session.config, session.layout
    for doubt in config.doubts():
        log.warning("%s", doubt)
    if trainee.model is None:
        _awaited(node, "ready", within_s)
        return session
    own = _parameters(trainee, session)
    if trainee.local.role == "observer":
        following = Following(client, own, config.sync_every, _awaited(node, "ready", within_s), within_s)
        return replace(session, hook=following, parameters=own)
    watch = _watch(trainee, own)
    if ranks is not None:
        ranks.memory = {"theta": memory.theta, "delta": session.delta}
        ranks.tell(**run)
    local = own if ranks is None else Rank0Model(own, ranks)
    local.write_theta()
    client.tell("theta")
    _awaited(node, "ready", within_s)
    hook = Hook(client, local, config, layout, trainee.local.wait_timeout)
    hook.merge()
    if hook.standing.finished:
        log.warning(
            "the run %s has ended at epoch %d: nothing more is trained in it. To train on, wait a minute after all "
            "have left and give a greater stop_after_epochs, or begin another run (from_checkpoint, a new run_id)",
            trainee.local.run_id,
            hook.standing.epoch,
        )
    counters, inner = _inner_state(trainee, run)
    hook.count_on(counters)

    def save_inner(epoch: int) -> None:
        """Save the inner state beside the checkpoint of this epoch, on all ranks, unless that was done before."""
        if not inner.is_due(epoch):
            return
        with hook.beside():
            versions = client.ask("ask", "told")["versions"]
            version = model_version([Version(*version) for version in versions])
            age: dict[str, Any] = {"epoch": epoch, "generation": version.generation, "samples": version.samples}
            age["counters"] = hook.standing.metrics.totals()
            if ranks is None:
                inner.save(**age)
            else:
                ranks.together("save", lambda: inner.save(**age), **age)

    tell_card = _cards(trainee.model, layout, client)

    def after() -> None:
        tell_card(hook.epoch)
        save_inner(memory.saved)

    hook.after = after
    entered = hook if ranks is None else Rank0Hook(hook, ranks)
    _hook_up(trainee, entered.step, watch, stack)
    session = replace(session, hook=entered, parameters=own, watch=watch)
    return session if ranks is not None else replace(session, save_inner=lambda: save_inner(hook.epoch))


def _card(model: nn.Module, exchanged: Collection[str] = ()) -> bytes:
    """The packed card of the model, without the values of `exchanged` buffers. Empty if the card can't be made, because
    training goes on without a card."""
    try:
        return card_of(model, exchanged).pack()
    except Exception:
        log.warning("this model can't be described, so an export of the run has only its parameters", exc_info=True)
        return b""


def _cards(model: nn.Module, layout: Layout, client: NodeClient) -> Callable[[int], None]:
    """Make the function that is called after each step with the present epoch. At the first step of an epoch, it sends
    the node the model's card again, if the model has buffers that the run doesn't exchange, because they may change in
    training."""
    told = {"epoch": -1}
    exchanged = {spec.name for spec in layout.buffers}
    changes = any(plain_name(name) not in exchanged for name, _ in model.named_buffers())

    def tell(epoch: int) -> None:
        if changes and epoch != told["epoch"]:
            told["epoch"] = epoch
            client.tell("card", card=_card(model, exchanged))

    return tell


def _awaited(node: NodeProcess, kind: str, within_s: float) -> Message:
    """Wait for a message of the node, which bounds its own waits, and tells of them meanwhile."""
    while (message := node.client.wait_for(kind, timeout_s=within_s)) is None:
        if time.monotonic() - node.client.told_at > within_s:
            raise NodeDied(
                f"the node (process {node.pid}) has told nothing for {within_s:g} s", mend="see its log above"
            )
    return message


def _parameters(trainee: Trainee, session: Session) -> LocalModel:
    assert trainee.model is not None, "an aggregator has no parameters"
    memory, share = session.memory, session.config.local_share
    of = session.layout, memory.theta, memory.base, session.delta
    return LocalModel(trainee.model, *of, trainee.rank, memory.delta, share)


def _watch(trainee: Trainee, own: LocalModel) -> Watch:
    """Make the watch of this process, which is told of each merge."""
    assert trainee.model is not None, "a peer with an optimizer has a model"
    watch = Watch(trainee.model, trainee.optimizers[-1], trainee.wrappers)
    own.merging = watch.merging
    return watch


def _inner_state(trainee: Trainee, run: Message) -> tuple[dict[str, float], InnerState]:
    """Restore the inner state from the checkpoint that the peer starts from, if there is one. Returns two values: the
    saved counters, empty if none were found; and the object that saves the inner state from now on."""
    checkpoint, local = run["checkpoint"], trainee.local
    counters = {} if checkpoint is None else restore(trainee.optimizers, Path(checkpoint), trainee.rank)
    return dict(counters), InnerState(trainee.optimizers, local.checkpoint_dir, local.keep, trainee.rank)


def _hook_up(trainee: Trainee, step: Callable[[], object], watch: Watch, stack: ExitStack) -> None:
    """Have torch call `step` after each step of the last optimizer, if the watch lets it pass. In a forked process
    nothing is called."""
    owner = os.getpid()

    def stepped() -> None:
        if os.getpid() == owner:
            watch.step()
            step()

    stack.callback(after_each_step(trainee.optimizers[-1], stepped))


def after_each_step(optimizer: Optimizer, call: Callable[[], None]) -> Callable[[], None]:
    """Have torch make `call` after each step of the optimizer. Returns the function that ends that.

    torch.compile never traces the call. A script may compile `optimizer.step()`; traced, what happens at a step would
    be compiled again and again, because it differs from step to step. Hooks of gradients may step one optimizer for
    each parameter within a backward pass, which still needs the parameters as they are; then `call` is made when that
    pass has ended.
    """

    def stepped(*_: object) -> None:
        try:
            Variable._execution_engine.queue_callback(call)
        except RuntimeError:  # no backward pass is going on
            pass
        else:
            return
        call()

    if not getattr(type(optimizer).step, "hooked", False):  # a wrapper may not have called torch's own __init__
        Optimizer.__setstate__(optimizer, {"defaults": getattr(optimizer, "defaults", {})})
    untraced = torch.compiler.disable(stepped)  # type: ignore[no-untyped-call]
    return optimizer.register_step_post_hook(untraced).remove
