"""`Peer`: what training code sees of a run.

Law: the surface alone. What happens at a step is `hook`'s, what happens to parameters `local`'s, and the
swarm is the node's; this file starts them in order, and ends them whatever happens. Of several processes that are one
peer, each has this surface: rank 0 the node and `rank0`, the others `rank_n`.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core.version import ModelVersion, Version, model_version
from p2p_diloco.errors import NodeDied, UsageError
from p2p_diloco.node.channel import Message
from p2p_diloco.node.saving import SAVE_S_MAX
from p2p_diloco.node.setup import Setup
from p2p_diloco.node.shared import SharedMemory
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.extents import ALONE, Rank
from p2p_diloco.peer.hook import Hook, Stepping
from p2p_diloco.peer.inner import InnerState, restore
from p2p_diloco.peer.local import LocalModel, with_global_values
from p2p_diloco.peer.metrics import Metrics
from p2p_diloco.peer.process import NodeProcess
from p2p_diloco.peer.rank0 import OtherRanks, Rank0Hook, Rank0Model
from p2p_diloco.peer.rank_n import Rank0Client, RankNHook
from p2p_diloco.peer.ranks import Group, bare, group_of, meeting
from p2p_diloco.settings import from_environment, refuse_further_ranks
from p2p_diloco.tensors.codec import written_in
from p2p_diloco.tensors.layout import FragmentPlan, Layout, specs_of

START_S = 90.0
"""How long a node may take to start, beside what it waits for others."""
LEAVE_S = 5.0
"""How long a node may take to leave; a finished run's longer, until all have its end."""
COUNTERS = ("sync_count", "sent_count", "local_step")
"""Of `Metrics`, what goes on after a restart, beside times and what was dropped."""
OF_NODE = (
    "peers", "bytes_sent", "bytes_received", "retries", "reconnections", "revision", "outer_lr", "outer_momentum",
)  # fmt: skip
"""Of `Metrics`, what the node writes into the shared memory, under the same names."""
RUN_KEYS = ("config", "layout", "checkpoint", "peer_id", "addresses")
"""What the other ranks are told of the run."""

log = logging.getLogger("p2p_diloco")

OptimizerOrWrapper = Any
"""A torch optimizer, or a wrapper that holds one as `.optimizer` (Accelerate's)."""


class Peer:
    """One peer of a run: a context manager around a training loop.

    Entering joins the run (or founds it), loads the global parameters into the model and hooks the
    optimizer: from then on exchanges happen inside `optimizer.step()`. Leaving leaves the run, also on an
    exception. With model and optimizer None the peer trains nothing, and aggregates for the others.

    A model that `fully_shard` has sharded over torch.distributed, or DistributedDataParallel copied, is one peer of all
    its ranks: each makes a `Peer`, and the same calls of it. Each exchanges its own rows through memory that the ranks
    share, and rank 0 speaks.

    Raises:
        ConfigError, UsageError: something is put wrongly.
        NoBootstrapReached: on entering: no initial peer answers.
        ConfigMismatch, ModelMismatch, Refused: on entering: this peer doesn't fit into the run.
        GaveUpWaiting: nobody came in `wait_timeout`.
        NodeDied: in `optimizer.step()`: the node's process has ended. No other peer is harmed.
        RankDied: likewise: another rank of this peer has ended, or makes other calls than this one.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: OptimizerOrWrapper | Sequence[OptimizerOrWrapper] | None,
        *,
        run_id: str | None = None,
        initial_peers: Sequence[str] | str | None = None,
        config: RunConfig | Mapping[str, Any] | None = None,
        local: PeerConfig | None = None,
    ) -> None:
        """`optimizer`: of several, the last one's step counts as an inner step. `config`: only what is
        given binds this peer; the rest is read from the run. `run_id`, `initial_peers`: in place of those
        in `local`.
        """
        given = {} if local is None else local.given
        if run_id is not None:
            given["run_id"] = run_id
        if initial_peers is not None:
            given["initial_peers"] = initial_peers
        if (model is None) != (optimizer is None):
            raise UsageError("a peer needs a model and its optimizer, or neither", mend="give both, or None for both")
        if model is None:
            given["role"] = "aggregator"
        self._local_config = PeerConfig(**given)
        if model is not None and self._local_config.role != "worker":
            mend = "give None for model and optimizer, or leave role out"
            raise UsageError("brings no model", key="role", value=self._local_config.role, mend=mend)
        self._asked = config if isinstance(config, RunConfig) else RunConfig(**(config or {}))
        self._given, self._model = model, bare(model)
        self._optimizers = [] if optimizer is None else _unwrapped(optimizer)
        self._owner = os.getpid()
        self._node: NodeProcess | None = None
        self._memory: SharedMemory | None = None
        self._group: Group | None = None
        self._ranks: OtherRanks | None = None
        self._rank0: Rank0Client | None = None
        self._hook: Stepping | None = None
        self._inner: InnerState | None = None
        self._handle: Any = None
        self._config: RunConfig | None = None
        self._before: Mapping[str, Any] = {}
        self.peer_id = ""
        """What tells this peer from all others; known once entered."""
        self.addresses: tuple[str, ...] = ()
        """Where others reach it; known once entered."""

    @classmethod
    def from_env(cls, model: nn.Module | None, optimizer: OptimizerOrWrapper) -> Peer | AbsentPeer:
        """The peer that the `P2P_DILOCO_*` variables describe; one that does nothing when they name no
        run.
        """
        settings = from_environment()
        if settings is None:
            return AbsentPeer(bare(model), None if optimizer is None else _unwrapped(optimizer)[-1])
        return cls(model, optimizer, config=settings[0], local=settings[1])

    # -- entering and leaving

    def __enter__(self) -> Peer:
        if self._memory is not None:
            raise UsageError("this peer is in its run already", mend="make another Peer")
        self._group = group_of(self._given)
        if self._group is None:
            refuse_further_ranks(os.environ)
        atexit.register(self.close)
        try:
            with meeting(self._group) as sockets:
                if self._rank.index == 0:
                    self._enter_as_rank0(sockets)
                else:
                    self._enter_as_rank_n(sockets[0])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the run, and end the node's process. Entering again takes a new Peer."""
        memory, self._memory = self._memory, None
        node, self._node = self._node, None
        if os.getpid() != self._owner:  # a forked process inherits the object, not the duty
            return
        atexit.unregister(self.close)
        if self._handle is not None:
            self._handle.remove()
        for others in (self._ranks, self._rank0):
            if others is not None:
                others.close()
        if node is None or memory is None:
            return
        within_s = LEAVE_S
        if self._config is not None and memory.finished:
            within_s += self._config.heartbeat_timeout
        if self._local_config.checkpoint_dir is not None:
            within_s += SAVE_S_MAX
        node.end(within_s)

    def _enter_as_rank0(self, sockets: Sequence[socket.socket]) -> None:
        """As the one process of this peer, or the first of them."""
        specs = None if self._model is None else specs_of(self._model)
        self._node = node = NodeProcess(Setup(self._asked, self._local_config, specs), sockets)
        self._memory = node.client.memory
        if self._group is None:
            self._join(node)
            return
        self._ranks = ranks = OtherRanks(sockets)
        with ranks.told_of_errors():
            self._join(node)
            ranks.tell("go on", standing=asdict(self._hooked.standing))

    def _join(self, node: NodeProcess) -> None:
        within_s = START_S + self._local_config.wait_timeout
        transport = self._awaited(node, "transport", within_s)
        run = self._awaited(node, "run", within_s)
        run |= {"peer_id": transport["peer_id"], "addresses": transport["addresses"]}
        layout = self._known(run)
        for doubt in self.config.doubts():
            log.warning("%s", doubt)
        local: LocalModel | Rank0Model
        if self._model is not None:
            local = self._local = self._parameters(layout)
            if self._ranks is not None:
                self._ranks.tell("run", **{key: run[key] for key in RUN_KEYS})
                local = Rank0Model(self._local, self._ranks)
            local.write_theta()
            node.client.tell("theta")
        self._awaited(node, "ready", within_s)
        if self._optimizers:
            hook = Hook(node.client, local, self.config, layout, self._local_config.wait_timeout)
            hook.merge()
            self._hook = hook if self._ranks is None else Rank0Hook(hook, self._ranks, self._keep_inner)
            self._inner = self._trains(run["checkpoint"])

    def _enter_as_rank_n(self, sock: socket.socket) -> None:
        """As another process of a peer than its first."""
        assert self._model is not None
        self._rank0 = rank0 = Rank0Client(self._rank.index, sock)
        self._memory = rank0.memory(sum(spec.numel for spec in specs_of(self._model)))
        run = rank0.next()
        layout = self._known(run)
        self._local = self._parameters(layout)
        self._hook = hook = RankNHook(rank0, self._local, self._keep_told)
        hook.serve()
        self._inner = self._trains(run["checkpoint"])

    def _known(self, run: Message) -> Layout:
        """Take up what is known of the run; its layout."""
        self.peer_id, self.addresses = run["peer_id"], tuple(run["addresses"])
        self._config = RunConfig.from_wire(run["config"])
        layout = Layout.from_wire(run["layout"])
        self._plan = FragmentPlan.of(layout, self._config.sync_every)
        return layout

    def _parameters(self, layout: Layout) -> LocalModel:
        assert self._model is not None
        memory, config = self._shared, self.config
        delta = memory.delta_in(written_in(config.codec, config.rounding))
        return LocalModel(self._model, layout, memory.theta, memory.base, delta, config.local_share, self._rank)

    def _trains(self, checkpoint: str | None) -> InnerState | None:
        """From now on the optimizer's steps are this peer's. Where its state is kept, if it is."""
        if checkpoint is not None:
            self._before = restore(self._optimizers, Path(checkpoint), self._rank)
        folder, keep = self._local_config.checkpoint_dir, self._local_config.keep
        self._handle = self._optimizers[-1].register_step_post_hook(self._stepped)
        if folder is None:
            return None
        return InnerState(self._optimizers, folder, keep, self._version, self._rank)

    def _awaited(self, node: NodeProcess, kind: str, within_s: float) -> Message:
        message = node.client.wait_for(kind, timeout_s=within_s)
        if message is None:
            raise NodeDied(f"the node (process {node.pid}) did not start in {within_s:g} s", mend="see its log above")
        return message

    def _stepped(self, *_: object) -> None:
        if self._hook is not None and self._memory is not None and os.getpid() == self._owner:
            self._hook.step()
            if self._group is None:
                self._keep_inner()

    def _keep_inner(self) -> None:
        """After a step: where the node has begun a checkpoint, save beside it what is this peer's own, of all ranks."""
        inner, epoch = self._inner, self._shared.saved
        if inner is None or not inner.is_due(epoch):
            return
        with self._hooked.beside():
            aged = inner.aged(epoch, self.state_dict())
            if self._ranks is None:
                inner.save(**aged)
            else:
                self._ranks.together("save", lambda: inner.save(**aged), **aged)

    def _keep_told(self, told: Message) -> None:
        """Save this rank's part."""
        if self._inner is not None:
            self._inner.save(told["epoch"], told["generation"], told["samples"], told["counters"])

    # -- while training

    def report(self, *, loss: float | None = None, samples: int | None = None) -> None:
        """Tell the loss and the samples of the step that is about to be made."""
        self._hooked.report(loss, samples)

    def force_sync(self) -> None:
        """Exchange the whole model now, between two steps; the others contribute what they have at their
        next step.
        """
        self._hooked.synchronise()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While this lasts (an evaluation, say) no inner step is made. In synchronous mode the others wait for this
        peer, for `pause_timeout` at most.
        """
        hook, node = self._hooked, self._node
        if node is not None:
            node.client.tell("pause", on=True)
        hook.rest()
        try:
            with hook.beside():
                yield
        finally:
            if node is not None and self._node is not None:
                node.client.tell("pause", on=False)

    def global_state_dict(self) -> dict[str, Tensor]:
        """A copy of the model's state_dict with the global parameters in place of its own; buffers are the
        model's. Of a sharded model, each rank's part, sharded as the model is. In synchronous mode these are the
        parameters of `epoch`; in asynchronous mode the newest.
        """
        hook = self._hooked
        assert self._model is not None
        if isinstance(hook, RankNHook):
            return with_global_values(self._model, hook.global_values())
        if self._ranks is None:
            return with_global_values(self._model, self._read())
        with self._ranks.call("global_state_dict()", lambda: hook.standing):
            values = self._read()
        return with_global_values(self._model, values)

    def _read(self) -> dict[str, Tensor]:
        """The global parameters, while nobody writes them."""
        client = self._running.client
        kept = client.ask("read", "readable")["kept"]
        try:
            if self._ranks is not None:
                self._ranks.tell("read", kept=kept)
            values = self._local.global_values(kept)
            if self._ranks is not None:
                self._ranks.answers()
        finally:
            client.tell("have read", loaded=[])
        return values

    def state_dict(self) -> dict[str, Any]:
        """The counters of this peer, to go on counting after a restart. What the run holds is no part of
        it.
        """
        metrics = self.metrics
        times = ("total_sync_time_s", "waiting_time_s", "hidden_time_s", *self._hooked.standing.times)
        return {name: getattr(metrics, name) for name in (*COUNTERS, *times, "dropped_samples")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from what `state_dict` gave."""
        self._before = dict(state)

    # -- what there is to know

    @property
    def config(self) -> RunConfig:
        """The run's settings."""
        if self._config is None:
            raise UsageError("the run's settings are known once the peer is in it", mend="use `with Peer(...) as peer`")
        return self._config

    @property
    def plan(self) -> FragmentPlan:
        """Which parameters are sent together, and when."""
        assert self.config is not None
        return self._plan

    @property
    def epoch(self) -> int:
        """Outer steps that every part of the model has made. In synchronous mode this, `digest` and
        `global_state_dict()` are of one state of the run, the one that was merged last: they change inside
        `optimizer.step()` alone.
        """
        memory = self._shared
        return max(0, memory.epoch) if self._hook is None else self._hook.standing.epoch

    @property
    def global_step(self) -> int:
        """Inner steps of the run, by one peer's share: `sync_every` for each epoch, and this peer's own
        since; in asynchronous mode the inner steps that are counted by the live peers that train, in place of the
        first.
        """
        return self._hooked.standing.global_step

    @property
    def finished(self) -> bool:
        """Whether the run has ended for all."""
        memory, node = self._shared, self._node
        over = bool(memory.finished) if self._hook is None else self._hook.standing.finished
        if not over and node is not None and not node.alive:
            raise NodeDied(node.how_it_ended(), mend="see its log above, and start this peer again")
        return over

    @property
    def digest(self) -> str:
        """The digest of the shards' digests, in order: equal where the whole outer state is. With one fragment two
        peers at one `epoch` have the same; with several, if the same of them are ahead. Empty in the rare case that
        what was merged last is of no single epoch: one shard's commit stayed out for two heartbeats.
        """
        if self._hook is None or self.config.mode == "async":
            return str(self._running.client.ask("ask", "told")["digest"])
        return self._hook.standing.digest

    @property
    def peers(self) -> tuple[str, ...]:
        """The ids of the live peers as this one sees them, this one included."""
        return tuple(sorted(self._running.client.ask("ask", "told")["peers"]))

    @property
    def metrics(self) -> Metrics:
        """The counters of this peer at this moment."""
        memory, hook, before = self._shared, self._hook, self._before
        node: dict[str, Any] = {name: getattr(memory, name) for name in OF_NODE}
        if hook is None:
            return Metrics(sync_every=self.config.sync_every, **node)
        now = hook.standing
        return Metrics(
            sync_count=now.sync_count + before.get("sync_count", 0),
            sent_count=now.sent_count + before.get("sent_count", 0),
            local_step=now.steps + before.get("local_step", 0),
            sync_every=now.sync_every,
            staleness=now.staleness,
            refused_submissions=now.refused_submissions,
            last_sync_time_s=now.last_sync_time_s,
            total_sync_time_s=now.total_sync_time_s + before.get("total_sync_time_s", 0.0),
            waiting_time_s=now.waiting_time_s + before.get("waiting_time_s", 0.0),
            hidden_time_s=now.hidden_time_s + before.get("hidden_time_s", 0.0),
            steps_per_second=1 / now.step_time_s if now.step_time_s else 0.0,
            dropped_samples=now.dropped_samples + before.get("dropped_samples", 0),
            **{name: seconds + before.get(name, 0.0) for name, seconds in now.times.items()},
            **node,
        )

    def _version(self) -> ModelVersion:
        versions = self._running.client.ask("ask", "told")["versions"]
        return model_version([Version(*version) for version in versions])

    @property
    def _rank(self) -> Rank:
        return ALONE if self._group is None else self._group.rank

    @property
    def _shared(self) -> SharedMemory:
        if self._memory is None:
            raise UsageError("this peer is not in its run", mend="use `with Peer(...) as peer`")
        return self._memory

    @property
    def _running(self) -> NodeProcess:
        assert self._shared is not None
        if self._node is None:
            raise UsageError("only rank 0 speaks with the run, and knows this", mend="ask for it on rank 0")
        return self._node

    @property
    def _hooked(self) -> Stepping:
        assert self._shared is not None
        if self._hook is None:
            raise UsageError("this peer trains nothing", mend="give it a model and an optimizer")
        return self._hook


def _unwrapped(optimizer: OptimizerOrWrapper | Sequence[OptimizerOrWrapper]) -> list[Optimizer]:
    """The torch optimizers, out of their wrappers; the last one's steps count."""
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not found:
        raise UsageError("no optimizer is given", key="optimizer", value="[]", mend="give at least one")
    return [_innermost(one) for one in found]


def _innermost(optimizer: OptimizerOrWrapper) -> Optimizer:
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        mend = "give a torch.optim.Optimizer, Accelerate's wrapper of one, or a list of them"
        raise UsageError("is no optimizer of torch", key="optimizer", value=type(optimizer).__name__, mend=mend)
    return optimizer
