"""`Peer`: the public API for training code.

Law: only the API. Entering makes a `session`, and leaving always ends it. Each process of a peer with several ranks
uses this API.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from types import TracebackType
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import P2PDilocoError, UsageError
from p2p_diloco.interrupts import unwound_by_signals
from p2p_diloco.net.invitation_used import with_invitation
from p2p_diloco.peer.absent import AbsentPeer
from p2p_diloco.peer.extents import ALONE
from p2p_diloco.peer.fitness import check, claimed, refuse_claimed
from p2p_diloco.peer.leaving import broken_off, leave, stay
from p2p_diloco.peer.local import with_global_values
from p2p_diloco.peer.metrics import Metrics
from p2p_diloco.peer.node_client import NodeProcess
from p2p_diloco.peer.ranks import bare, group_of, meeting
from p2p_diloco.peer.refill import open_shard
from p2p_diloco.peer.reported import Sinks, number, samples_of
from p2p_diloco.peer.session import AnyHook, Following, Left, Session, Trainee, enter_through_rank0, enter_with_node
from p2p_diloco.peer.shard import Shard, data_set
from p2p_diloco.peer.slices import Slices, open_slices
from p2p_diloco.settings import from_environment, refuse_further_ranks, settings_of_join
from p2p_diloco.standard_streams import keep_taken, show_log, tell_joined
from p2p_diloco.tensors.layout import FragmentPlan

_NOT_LEFT = "the program ended inside the run; end the `with` block before, or call close()"
"""The reason that is logged if the interpreter ends before the peer has left: then no last exchange is made."""

log = logging.getLogger("p2p_diloco")

OptimizerOrWrapper = Any
"""A torch optimizer, or a wrapper that holds one as `.optimizer` (Accelerate's)."""


class Peer:
    """One peer of a run: a context manager around a training loop.

    Entering joins the run (or founds it), loads the global parameters into the model and hooks the optimizer: from then
    on exchanges happen inside `optimizer.step()`. Leaving the context leaves the run, also on an exception. With model
    and optimizer None the peer trains nothing, and aggregates for the others. With a model, no optimizer and the role
    "observer" it only reads: entering and `refresh` load the run's newest global parameters into the model.

    If `fully_shard` has sharded the model over torch.distributed, or DistributedDataParallel has copied it, all ranks
    together are one peer: each rank makes a `Peer`, and calls the same methods in the same order. Each rank exchanges
    its own rows through memory that it shares with rank 0, or over TCP from another host. Only rank 0 communicates with
    the run.

    Raises:
        ConfigError, UsageError: a setting or an argument is wrong.
        NoBootstrapReached: on entering: no initial peer answers. ConfigMismatch, ModelMismatch, Refused: on entering:
            this peer doesn't fit into the run.
        GaveUpWaiting: a wait for other peers lasted longer than `wait_timeout`.
        NodeDied: in `optimizer.step()`: the node's process has ended. No other peer is harmed.
        RankDied: in any call: another rank of this peer has ended, or calls other methods than this rank.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: OptimizerOrWrapper | Sequence[OptimizerOrWrapper] | None,
        *,
        run_id: str | None = None,
        initial_peers: Sequence[str] | str | None = None,
        invite: str | os.PathLike[str] | None = None,
        open: bool | None = None,
        config: RunConfig | Mapping[str, Any] | None = None,
        local: PeerConfig | Mapping[str, Any] | None = None,
    ) -> None:
        """`optimizer`: if there are several, a step of the last one is an inner step. `config`: the given settings must
        match the run's; all others are taken from the run. `local`: this peer's own settings. `run_id`,
        `initial_peers`, `invite`, `open`: if given, they replace the values in `local`.

        In a command of `p2p-diloco join`, the settings that `join` was given count where these arguments give none.

        Raises:
            UsageError: the peer would be in another run than the one that `join` was given; or a worker process, such
                as a DataLoader's, imports the script and would start a second peer.
        """
        show_log()
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
            wrong = "a worker process has imported this script, which would start a second peer"
            raise UsageError(wrong, mend='put what the script does below `if __name__ == "__main__":`')
        of_join = settings_of_join()
        given = {} if of_join is None else of_join[1].given
        given |= local.given if isinstance(local, PeerConfig) else local or {}
        if run_id is not None:
            given["run_id"] = run_id
        if initial_peers is not None:
            given["initial_peers"] = initial_peers
        if invite is not None:
            given["invite"] = os.fspath(invite)
        if open is not None:
            given["open"] = open
        given["role"] = _role(given.get("role"), model, optimizer)
        self._local_config = with_invitation(PeerConfig(**given))
        if self._local_config.role == "observer" and not self._local_config.initial_peers:
            mend = "give an address of a peer or a bootstrap, or an invitation"
            raise UsageError("an observer needs a run to read", key="initial_peers", value="unset", mend=mend)
        asked = config.given if isinstance(config, RunConfig) else config or {}
        self._asked = RunConfig(**{**({} if of_join is None else of_join[0].given), **asked})
        if of_join is not None and self._local_config.run_id != of_join[1].run_id:
            mend = "leave it out, or start this program without join"
            wrong = f"is another run than {of_join[1].run_id}, for which `p2p-diloco join` started this program"
            raise UsageError(wrong, key="run_id", value=self._local_config.run_id, mend=mend)
        self._given, self._model = model, bare(model)
        chains = [] if optimizer is None else _unwrapped(optimizer)
        self._optimizers, self._wrappers = (
            [chain[-1] for chain in chains],
            [one for chain in chains[-1:] for one in chain[:-1]],
        )
        refuse_claimed(self._model, self._optimizers)  # now, while the variable may still hold the other peer
        self._owner = os.getpid()
        self._session: Session | None = None
        self._left: Left | None = None
        self._stack = ExitStack()  # ends everything that entering has started
        self._sinks = Sinks()
        self.sinks = self._sinks.all
        """The sinks (`p2p_diloco.integrations.sinks`) that also get each report. Add them before the first report."""
        self.peer_id = ""
        """The id of this peer. No other peer has the same. Empty until this peer has entered the run."""
        self.seed = 0
        """A number of 32 bits that follows from `peer_id`: a seed for this peer's own data or shuffling. It is the same
        on all ranks of a peer, and after a restart with the same identity file. 0 until this peer has entered the
        run."""
        self.addresses: tuple[str, ...] = ()
        """The addresses at which other peers reach this peer. Empty until this peer has entered the run."""

    @classmethod
    def from_env(cls, model: nn.Module | None, optimizer: OptimizerOrWrapper) -> Peer | AbsentPeer:
        """Make the peer that the `P2P_DILOCO_*` variables describe. If they name no run, make a peer that only counts
        steps."""
        settings = from_environment()
        if settings is None:
            return AbsentPeer(bare(model), None if optimizer is None else _unwrapped(optimizer)[-1][-1])
        return cls(model, optimizer, config=settings[0], local=settings[1])

    def __deepcopy__(self, memo: object) -> Peer:
        """A copy of a model or a trainer that holds this peer holds the same peer."""
        return self

    def __reduce__(self) -> NoReturn:
        mend = "keep it out of what is pickled or sent to another process, or hand on the value that is needed there"
        raise UsageError("a peer takes part in its run from this process alone", mend=mend)

    # -- entering and leaving

    def __enter__(self) -> Peer:
        if self._session is not None:
            raise UsageError("this peer is in its run already", mend="close() it, then make another Peer")
        if self._model is not None and self._optimizers:
            check(self._model, self._optimizers)
        group = group_of(self._given)
        if group is not None and self._local_config.role == "observer":
            mend = "give each process that observes a model of its own that is not sharded"
            raise UsageError("reads into a model of one process", key="role", value="observer", mend=mend)
        if group is None:
            refuse_further_ranks(os.environ)
        rank = ALONE if group is None else group.rank
        trainee = Trainee(self._asked, self._local_config, self._model, self._optimizers, rank, self._wrappers)
        keep_taken()  # before there are sockets to other processes
        atexit.register(self._end, _NOT_LEFT)
        try:
            self._stack.enter_context(unwound_by_signals())
            self._stack.enter_context(claimed(self._model, self._optimizers))
            with meeting(group) as sockets:
                if rank.index == 0:
                    session = enter_with_node(trainee, sockets, self._stack)
                else:
                    session = enter_through_rank0(trainee, sockets[0], self._stack)
        except BaseException:
            self._end("")
            raise
        self._session, self.peer_id, self.addresses = session, session.peer_id, session.addresses
        self.seed = seed_of(session.peer_id)
        tell_joined()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(broken_off(error))

    def close(self) -> None:
        """Leave the run, and end the node's process. Before that, inner steps that no commit counts are exchanged, as
        `on_exit` says. To enter again, make a new Peer."""
        self._end("")

    def _end(self, why: str) -> None:
        """Leave the run. `why`: the reason if training ended abnormally; empty after a normal end."""
        session, self._session = self._session, None
        if os.getpid() != self._owner:  # a forked process inherits the object, but must not end the node
            return
        try:
            if session is not None and session.watch is not None:
                session.watch.tell_unstepped()
            if session is None or session.hook is None:
                return
            if isinstance(session.hook, Following):
                session.hook.keep_values()
                self._left = Left.after(session)
                return
            leave(session.hook, self._local_config, why)
            if session.save_inner is not None:
                with suppress(P2PDilocoError):  # the node has ended; what it saved stays
                    session.save_inner()
            self._left = Left.after(session)
            # who trained alone would take the run's state with it
            local, standing = self._local_config, self._left.standing
            others_may_come = local.initial_peers and standing.epoch and not standing.finished
            if session.node is not None and not why and others_may_come and local.on_exit == "sync":
                stay(session.node.client, local.run_id, local.exit_timeout)
        except KeyboardInterrupt:
            if why and session is not None and session.node is not None:  # the second interrupt, so leave at once
                session.node.kill()
            raise
        finally:
            atexit.unregister(self._end)
            self._stack.close()

    # -- while training

    def report(
        self, *, loss: float | None = None, samples: int | None = None, held_out_loss: float | None = None
    ) -> None:
        """Report the loss and the samples of the next step. Call this before `optimizer.step()`.

        `held_out_loss`: the loss of the global parameters on data that no peer trains on. It may have been measured at
        any earlier step. On several ranks only rank 0's is used. The values may be numbers of NumPy, or tensors of one
        element.

        Raises:
            ConfigError: a loss is not one number, or the samples are no whole number.
        """
        loss, held_out_loss = number("loss", loss), number("held_out_loss", held_out_loss)
        samples = samples_of(samples)
        self._hook.report(loss, samples, held_out_loss)
        self._watch_for_steps()
        if self.sinks:
            self._sinks.write(self.global_step, self.epoch, loss=loss, samples=samples, held_out_loss=held_out_loss)

    def refresh(self) -> bool:
        """For an observer: read the run's newest global parameters and averaged buffers into the model. Returns whether
        they are newer than those that were read before."""
        following = self._entered.hook
        if not isinstance(following, Following):
            raise UsageError("only an observer reads at its own times", mend="use role=observer, without an optimizer")
        return following.refresh()

    def shard(
        self,
        dataset: Dataset[Any] | Iterable[Any] | Callable[..., Iterable[Any]] | int,
        *,
        name: str = "train",
        epochs: int | None = None,
        fingerprint: str = "",
        length: int | None = None,
    ) -> Shard:
        """This peer's part of a data set that all peers have: each sample of an epoch is used by one peer, even if
        peers come and go. `dataset`: the data set, the number of its samples, or a stream: an iterable, or a function
        that returns one. `epochs`: the number of epochs after which the data set ends; None: it never ends. `length`:
        how many samples of a stream an epoch has, if the stream has no length. All peers must give the same length,
        `epochs` and `fingerprint` for a `name`."""
        data, found = data_set(dataset, name, epochs, fingerprint, length)
        return open_shard(self._entered, data, found, self._local_config.run_id)

    def slices(self, name: str, *, fingerprint: str = "") -> Slices:
        """The data set that data nodes of the run serve under this name, as a sequence of slices: `slices[i]` is the
        path of a file with the checked bytes of slice i, and `slices.samples` is the sequence of their samples. Give
        `slices` or `slices.samples` to `shard`. Waits until a data node answers, for `wait_timeout` at most.
        `fingerprint`: the identity that the data set must have, as a data node tells it; empty: any."""
        _ = self._hook  # raises UsageError: only peers that train read data
        door = _running(self._entered).client.ask("door", "door")["path"]
        return open_slices(door, name, fingerprint, self._local_config.wait_timeout)

    def force_sync(self) -> None:
        """Exchange the whole model now, between two steps. The other peers contribute their progress at their next
        step."""
        self._hook.synchronise()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block without inner steps, such as an evaluation. In synchronous mode the other peers wait for this peer
        during the block, but at most for `pause_timeout`."""
        with self._hook.pause():
            yield

    def global_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state_dict in which the global parameters and averaged buffers take the place of the
        model's own. For a sharded model each rank gets its part, sharded like the model. In synchronous mode
        these are the parameters of `epoch`; in asynchronous mode the newest. After the `with` block these are the
        parameters that were merged last."""
        known, standing = self._known, self._known.standing
        if not standing.epoch and (steps := standing.metrics.local_step):
            mend = "call force_sync() before it, or call it after the `with` block"
            if isinstance(known, Left):
                mend = "they were not exchanged; model.state_dict() has them"
            log.warning(
                "global_state_dict() at epoch 0 has the parameters that the run began with, without this peer's %d "
                "inner steps; %s",
                steps,
                mend,
            )
        values = known.global_values()
        assert self._model is not None, "a peer that has global values has a model"
        return with_global_values(self._model, values)

    def state_dict(self) -> dict[str, Any]:
        """The counters of this peer, for `load_state_dict` after a restart. The run's state is not included."""
        return self._known.standing.metrics.totals()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from the counters of a `state_dict`."""
        self._hook.count_on(state)

    # -- what there is to know

    @property
    def config(self) -> RunConfig:
        """The run's settings."""
        return self._known.config

    @property
    def plan(self) -> FragmentPlan:
        """Which parameters are sent together, and when."""
        return self._known.plan

    @property
    def epoch(self) -> int:
        """The number of outer steps that every part of the model has made. In synchronous mode `epoch`, `digest` and
        `global_state_dict()` belong to one state of the run: the one that was merged last. They change only inside
        `optimizer.step()`."""
        return self._known.standing.epoch

    @property
    def global_step(self) -> int:
        """The inner steps of the run, per peer: `sync_every` for each epoch, plus this peer's own steps since its last
        exchange. In asynchronous mode the first summand is the number of inner steps that commits have counted for all
        peers together, divided by the number of live peers that train."""
        return self._known.standing.global_step

    @property
    def finished(self) -> bool:
        """Whether the run has ended for all. A forked process may ask, too."""
        over, session = self._known.standing.finished, self._session
        if session is not None and os.getpid() != self._owner:  # the node is no child of a data loader's worker
            return over or bool(session.memory.finished)
        self._watch_for_steps()
        node = None if session is None else session.node
        if not over and node is not None and not node.alive:
            raise node.client.why_it_ended()
        return over

    @property
    def digest(self) -> str:
        """A hash of the versions of all fragments, which are chains of all that was committed. It is equal on two peers
        that hold the same commits. With one fragment, two peers at the same `epoch` do; with several fragments, only if
        the same fragments are one outer step ahead on both peers. Tensors are compared beside the rounds: a peer of
        which most others have other tensors fetches theirs, and says so."""
        session, is_async = self._session, self.config.mode == "async"
        if session is not None and (session.hook is None or (is_async and not isinstance(session.hook, Following))):
            return str(_running(session).client.ask("ask", "told")["digest"])
        return self._known.standing.digest

    @property
    def peers(self) -> tuple[str, ...]:
        """The ids of the live peers that this peer knows, its own id included."""
        return tuple(sorted(_running(self._entered).client.ask("ask", "told")["peers"]))

    @property
    def metrics(self) -> Metrics:
        """The counters of this peer at this moment."""
        return self._known.standing.metrics

    def _watch_for_steps(self) -> None:
        if self._session is not None and self._session.watch is not None:
            self._session.watch.asked()

    @property
    def _known(self) -> Session | Left:
        return self._left if self._session is None and self._left is not None else self._entered

    @property
    def _entered(self) -> Session:
        if self._session is None:
            raise UsageError("this peer is not in its run", mend="use `with Peer(...) as peer`")
        return self._session

    @property
    def _hook(self) -> AnyHook:
        hook = self._entered.hook
        if hook is None or isinstance(hook, Following):
            mend = "give it a model and an optimizer; an observer calls refresh()"
            raise UsageError("this peer trains nothing", mend=mend)
        return hook


def seed_of(peer_id: str) -> int:
    """The seed of the peer with this id."""
    return int.from_bytes(blake2b(peer_id.encode(), digest_size=4).digest(), "big")


def _running(session: Session) -> NodeProcess:
    if session.node is None:
        mend = "ask for it on rank 0"
        raise UsageError("only rank 0, which communicates with the run, knows this value", mend=mend)
    return session.node


def _role(role: str | None, model: object, optimizer: object) -> str:
    """The role of a peer with this model and this optimizer.

    Raises:
        UsageError: the role does not fit the model and the optimizer that were given.
    """
    match role, model is not None, optimizer is not None:
        case (None | "worker", True, True) | ("observer", True, False):
            return role or "worker"
        case (None | "worker" | "aggregator", False, False):
            return "aggregator"
        case "observer", _, _:
            mend = "give a model to read the parameters into, and None for the optimizer"
            raise UsageError("needs a model, and trains nothing", key="role", value=role, mend=mend)
        case "aggregator", _, _:
            mend = "give None for model and optimizer, or leave role out"
            raise UsageError("brings no model", key="role", value=role, mend=mend)
    mend = "give both, or None for both; with role=observer give a model alone"
    raise UsageError("a peer needs a model and its optimizer, or neither", mend=mend)


def _unwrapped(optimizer: OptimizerOrWrapper | Sequence[OptimizerOrWrapper]) -> list[list[Any]]:
    """For each optimizer its wrappers, from the outermost, and in the end torch's own. Each step of the last optimizer
    is an inner step."""
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not found:
        raise UsageError("no optimizer is given", key="optimizer", value="[]", mend="give at least one")
    chains = [[one] for one in found]
    for chain in chains:
        while (inner := getattr(chain[-1], "optimizer", None)) is not None:
            chain.append(inner)
        if not isinstance(chain[-1], Optimizer):
            mend = "give a torch.optim.Optimizer, Accelerate's wrapper of one, or a list of them"
            raise UsageError("is no optimizer of torch", key="optimizer", value=type(chain[-1]).__name__, mend=mend)
    return chains
