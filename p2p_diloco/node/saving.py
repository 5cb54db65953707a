"""Writes checkpoints of a replica's outer state, and reads them.

Law: a checkpoint is a snapshot between two events, written by a thread of its own. Versions say nothing of tensors: a
checkpoint's tensors are those of its versions because they were copied at a moment when both agree, and a slice whose
memory has changed since its step is not saved. A checkpoint is used only if its tensors have the digests that it names.

    theta      the global parameters and buffers, by name and shape, fp32
    outer      the outer optimizer's state, as <slice>.<name>
    manifest   `Manifest`
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core.events import Damaged
from p2p_diloco.core.revision import STOPS, Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.state import State, final, founded_by
from p2p_diloco.core.version import ModelVersion, Version, model_version
from p2p_diloco.errors import CheckpointError, ConfigError, P2PDilocoError
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.common import Common
from p2p_diloco.node.fields import decoded, encoded, planned
from p2p_diloco.node.run import Run
from p2p_diloco.node.run_record import cut_of
from p2p_diloco.node.shared import SAVE_S_MAX
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.tensors import checkpoint, limits
from p2p_diloco.tensors.layout import PARAMETER, Layout
from p2p_diloco.tensors.outer_state import digest

Wrong = tuple[int, Damaged]
"""A damaged slice, and the event that tells the replica of it."""

log = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint's manifest tells of the run. `founded`: by whom, and when. `fragments`: the replicated state of
    each, as `fields` encodes it. `digests`: of each slice's tensors. `card`: the model's packed card; may be empty.
    `end`: the record of the run's end, if this is its last state."""

    run_id: str
    generation: int
    samples: int
    config: dict[str, Any]
    layout: dict[str, Any]
    fragments: list[bytes]
    digests: list[str]
    founded: tuple[str, float] | None = None
    card: bytes = b""
    end: bytes = b""


class Saving:
    """Writes a checkpoint every `save_every` epochs of the whole model, at the run's end, and once all fragments
    have adopted a revision that asks for one.

    The `save_every` epochs are counted from the last checkpoint. At the start, and when a greater lineage with a lower
    epoch is adopted, they are counted from the highest multiple of `save_every` that is not above the present epoch.
    """

    def __init__(self, common: Common, end: Callable[[], bytes] = bytes) -> None:
        """`end`: returns the record of the run's end, empty until this peer has reached it."""
        local, founding = common.local, common.founding
        self._run, self._replica, self._work, self._events = common.run, common.replica, common.work, common.events
        self._common, self._founded, self._end = common, (founding.founder, founding.time), end
        self._root, self._every, self._keep = local.checkpoint_dir, local.save_every, local.keep
        self.epoch = 0
        """The epoch of the newest checkpoint that is written or begun; 0: none."""
        self.failed = ""
        """Why that one couldn't be written; empty if it could, or is being written."""
        self._counted_from: int | None = None
        self._saved: ModelVersion | None = None
        self._asked: int | None = None  # how many checkpoints the state's revision had asked for at the last look
        self._spoilt = False  # the last copy was damaged and not saved
        self._leaving = False
        self._writing: asyncio.Future[Sequence[Wrong]] | None = None

    def settled(self) -> None:
        """Start writing a checkpoint if one is due. Call this when versions and tensors agree."""
        if self._root is None or not self._replica.has_state:
            return
        epoch, model = self._replica.epoch, self._replica.roster.mine.model
        if self._counted_from is None or epoch < self._counted_from:
            self._counted_from = epoch - epoch % self._every
        asked, self._asked = self._asked, max(self._asked or 0, self._replica.revision.saves)
        if asked is not None and self._asked > asked:
            # due now, or when the checkpoint that is being written is complete
            self._counted_from = epoch - self._every
        busy = self._writing is not None and not self._writing.done()
        ended = (self._replica.finished or (self._leaving and epoch > 0)) and model != self._saved
        if ended:
            self.epoch = epoch  # if not now, then in `finish`
        if not busy and (ended or epoch >= self._counted_from + self._every):
            self.epoch, self._counted_from, self._saved = epoch, epoch, model
            self._start(self._root, epoch)

    async def finish(self) -> None:
        """Save the state of a peer that leaves, in bounded time: it may be the last that has the newest commits."""
        self._leaving = True
        await self.written()

    async def written(self) -> None:
        """Wait, in bounded time, until the checkpoint that is being written is complete. Then write another one if one
        is due."""
        give_up_at = asyncio.get_running_loop().time() + SAVE_S_MAX
        if self._spoilt:
            self._saved = None  # damaged memory may have been repaired since
        for _ in range(2):
            if self._writing is not None:
                await asyncio.wait([self._writing], timeout=give_up_at - asyncio.get_running_loop().time())
            self.settled()

    def _start(self, root: Path, epoch: int) -> None:
        """Copy the outer state, because it changes while the checkpoint is written, and write it in a thread."""
        run, work, states = self._run, self._work, [log.held for log in self._replica.logs]
        versions = [state.version for state in states]
        told = Manifest(
            run.run_id,
            generation=max(version.generation for version in versions),
            samples=sum(version.samples for version in versions),
            config=run.config.to_wire(),
            layout=run.layout.to_wire(),
            fragments=[encoded(state) for state in states],
            digests=[],
            founded=self._founded,
            card=self._common.described.card,
            end=self._end(),
        )
        theta = torch.cat([one.theta for one in work.state.slices])
        outer = [{name: values.clone() for name, values in one.state.items()} for one in work.state.slices]
        known = [
            (index, digest, Damaged(state.fragment, (number,)))
            for state in states
            for number, (index, digest) in enumerate(
                zip(run.rules.fragments[state.fragment], work.known_digests(state.fragment), strict=False)
            )
        ]
        writing = partial(self._write, root, epoch, told, theta, outer, known)
        self.failed = ""
        self._writing = asyncio.get_running_loop().run_in_executor(None, writing)
        self._writing.add_done_callback(self._written)

    def _write(
        self,
        root: Path,
        epoch: int,
        told: Manifest,
        theta: Tensor,
        outer: Sequence[Mapping[str, Tensor]],
        known: Sequence[tuple[int, str, Damaged]],
    ) -> Sequence[Wrong]:
        """Write a copy of the outer state, unless slices of it have changed in memory since their last step; returns
        these. `known`: the slices whose digests after that step are known, each with the event for its damage."""
        layout = self._run.layout
        digests = _digests(layout, theta, outer)
        if damaged := [(index, event) for index, digest, event in known if digests[index] != digest]:
            return damaged
        by_name = {spec.name: theta[start : start + spec.numel].view(spec.shape) for spec, start in layout.places}
        states = {f"{index}.{name}": tensor for index, state in enumerate(outer) for name, tensor in state.items()}
        manifest = msgspec.to_builtins(msgspec.structs.replace(told, digests=digests))  # bytes are in base64
        try:
            path = checkpoint.save(root, epoch, {"theta": by_name, "outer": states}, manifest, self._keep)
        except P2PDilocoError as error:
            self.failed = f"a checkpoint {error.wrong}"  # its path is this machine's own matter
            log.error("%s", error)
        else:
            log.info("saved the checkpoint %s", path)
        return ()

    def _written(self, writing: asyncio.Future[Sequence[Wrong]]) -> None:
        """If a checkpoint was not written because slices are damaged, report these to the replica. They are logged
        only once, because they may stay damaged for long."""
        damaged = writing.result()
        if damaged:
            slices = ", ".join(str(index) for index, _ in damaged)
            self.failed = f"no checkpoint was written: slices {slices} are corrupted in memory; older checkpoints stay"
            if not self._spoilt:
                log.error("%s", self.failed)
        self._spoilt = bool(damaged)
        for _, event in damaged:
            self._events.post(event)


def _digests(layout: Layout, theta: Tensor, outer: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """The digest of each slice's tensors."""
    pairs = zip(layout.slices, outer, strict=True)
    return [digest(theta[place.start : place.stop], state) for place, state in pairs]


def read_checkpoint(local: PeerConfig) -> Checkpoint | None:
    """Read the checkpoint that this peer starts from: the one that its settings name, or the newest usable one of its
    own. If there are both, the newer one of this run, unless a new generation begins from the named one: a command that
    founded the run may be given again when the run has gone on. None if there is none.

    Raises:
        CheckpointError: the named one can't be used; or no other is named, and of the peer's own none can be used.
        ConfigError: the peer's folder has checkpoints of another run, which this one's would replace.
    """
    named = _named(local)
    try:
        own = _own(local)
    except CheckpointError:  # its reasons are logged
        if named is None:
            raise
        return named
    if own is not None and own.run_id != local.run_id:
        wrong, mend = f"holds checkpoints of the run {own.run_id}", f"name another folder, or run_id={own.run_id}"
        raise ConfigError(wrong, key="checkpoint_dir", value=local.checkpoint_dir, mend=mend)
    if named is None or own is None or local.new_generation:
        return named or own
    if named.run_id == own.run_id and model_version(own.versions) <= model_version(named.versions):
        return named
    log.info(
        "the run has gone on since the checkpoint %s: starting from this peer's newer one, %s; "
        "to begin again from the former, add new_generation (--new-generation)", named.path, own.path,
    )  # fmt: skip
    return own


def _named(local: PeerConfig) -> Checkpoint | None:
    """Read the checkpoint that the settings name."""
    named = local.from_checkpoint
    if named is None:
        return None
    path = named if (named / checkpoint.MANIFEST).is_file() else checkpoint.latest(named)
    if path is None:
        mend = "name a folder that holds a checkpoint, or leave from_checkpoint out"
        raise CheckpointError("holds no complete checkpoint", key="from_checkpoint", value=named, mend=mend)
    return Checkpoint(path)


def _own(local: PeerConfig) -> Checkpoint | None:
    """Read the newest usable one of this peer's own checkpoints."""
    unusable = None
    for path in checkpoint.whole(local.checkpoint_dir) if local.checkpoint_dir is not None else ():
        try:
            return Checkpoint(path)
        except CheckpointError as error:
            log.warning("a checkpoint can't be used, so an older one is tried if there is one: %s", error)
            unusable = unusable or error
    if unusable is not None:
        raise unusable
    return None


class Checkpoint:
    """A checkpoint that was read from disk. Its settings, its `layout`, the global parameters `theta` [layout.numel]
    and the model's packed `card` are known at once; `restore` loads its outer state once the run is known."""

    def __init__(self, path: Path) -> None:
        """Read a checkpoint; raises `CheckpointError` unless it is complete, written by this package, and matches its
        digests."""
        self.path = path
        tensors, content = checkpoint.load(path)
        try:
            told = msgspec.convert(content, Manifest)
            self.run_id, self.generation, self.config = told.run_id, told.generation, told.config
            self.founded, self.card, self.end = told.founded, told.card, told.end
            self.layout = Layout.from_wire(told.layout)
            self._states = self._read_states(told.fragments)
            self.theta = torch.cat([tensors["theta"][spec.name].reshape(-1) for spec, _ in self.layout.places])
            self._outer: list[dict[str, Tensor]] = [{} for _ in self.layout.slices]
            for key, tensor in tensors["outer"].items():
                index, _, name = key.partition(".")
                self._outer[int(index)][name] = tensor
            self._check(told.digests)
        except (KeyError, IndexError) as error:
            raise self._unusable(f"its tensors are not what its model needs ({error})") from None
        except ValueError as error:
            raise self._unusable(str(error)) from None

    def _read_states(self, packed: Sequence[bytes]) -> Sequence[State]:
        """Read the replicated state of each fragment. Raises ValueError if they can't be used."""
        rules = Run(self.run_id, self.run_config, self.layout).rules
        if len(packed) != len(rules.fragments):
            raise ValueError("it has no states of fragments")
        try:
            return [planned(decoded(state, State), fragment, rules) for fragment, state in enumerate(packed)]
        except Refusal as refusal:
            raise ValueError(refusal.reason) from None

    def _check(self, named: Sequence[str]) -> None:
        """Raises ValueError unless the tensors have the digests that the manifest names."""
        if len(named) != len(self.layout.slices):
            raise ValueError("it has no digests")
        found = _digests(self.layout, self.theta, self._outer)
        if wrong := [index for index, one in enumerate(named) if one != found[index]]:
            raise ValueError(f"slice {wrong[0]} doesn't have the digest that it names")

    @property
    def run_config(self) -> RunConfig:
        """The settings of the run in which the checkpoint was made."""
        return RunConfig.from_wire(self.config)

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(state.version for state in self._states)

    @property
    def revision(self) -> Revision:
        """The highest revision in the checkpoint's fragments."""
        return max(state.revision for state in self._states)

    def has_ended(self, rules: Rules) -> bool:
        """Whether the run had ended when the checkpoint was made."""
        return all(final(state, rules) for state in self._states)

    def config_for(self, run_id: str) -> dict[str, Any]:
        """The settings for the run `run_id`, which starts from this checkpoint. A revision is not valid in a new run,
        so there the revised values become settings. Its stops do not, because they were meant for the old run."""
        if run_id == self.run_id:
            return self.config
        return {**self.config, **{key: value for key, value in self.revision.changed.items() if key not in STOPS}}

    def restore(self, run: Run, work: SliceWork, founded: tuple[str, float]) -> tuple[State, ...]:
        """Load the checkpoint's tensors; returns the replicated state of every fragment. The lengths of earlier means
        stay only if the run and its settings are the checkpoint's, because other settings make means of other lengths.
        `founded`: who founded the run, and when. If it is another run than the checkpoint's, or was founded anew since,
        its first round is the founder's, no peer of the old run is left, and the revision is gone: that founder has not
        signed it.

        Raises:
            CheckpointError: the checkpoint is of another model or another outer optimizer.
        """
        outers = self._restored(run)
        try:
            for index, payload in enumerate(self._payloads(run, outers)):
                work.state.stage(index, payload, in_place=True)
        except (KeyError, ValueError) as error:
            raise self._unusable(f"its tensors are not what the run needs ({error})") from None
        if (run.run_id, founded) == (self.run_id, self.founded):
            return tuple(self._states)
        return tuple(founded_by(founded[0], state, run.rules) for state in self._states)

    def _restored(self, run: Run) -> list[Mapping[str, Tensor]]:
        """The outer optimizer's state of each slice for this run. Raises CheckpointError if the model is another."""
        layout = self.layout
        if cut_of(layout) != cut_of(run.layout):
            raise self._unusable("its model, or the way it is cut, is not the run's")
        forget = run.run_id != self.run_id or run.config.fingerprint() != self.run_config.fingerprint()
        times = [run.config.step_limit if place.kind == PARAMETER else 0.0 for place in layout.slices]
        return [limits.restored(*pair, forget=forget) for pair in zip(self._outer, times, strict=True)]

    def _payloads(self, run: Run, outers: Sequence[Mapping[str, Tensor]]) -> Iterator[memoryview]:
        """Encode each slice's state as a payload."""
        for place, outer in zip(self.layout.slices, outers, strict=True):
            ordered = (outer[name] for name in run.state_lengths(place))
            pieces = [self.theta[place.start : place.stop], *ordered]
            yield memoryview(b"".join(piece.numpy().tobytes() for piece in pieces))

    def _unusable(self, why: str) -> CheckpointError:
        return CheckpointError(f"can't be used: {why}", key="checkpoint", value=self.path, mend="choose another")
