"""Writes checkpoints of the outer state of a replica of `p2p_diloco.fragments`, and reads them.

Law: as `saving`, but the manifest has the replicated state of each fragment (`fragments`, as `headers` writes it, in
base64). Versions say nothing of tensors: a checkpoint's tensors are those of its versions because they were copied at a
moment when both agree, and a slice whose memory has changed since its step is not saved.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from p2p_diloco.core.events import Event
from p2p_diloco.core.messages import State as OfShard
from p2p_diloco.core.rules import Rules
from p2p_diloco.core.version import ContributionId, digest_of
from p2p_diloco.fragments.events import Damaged
from p2p_diloco.fragments.plan import Member, Plan
from p2p_diloco.fragments.replica import Replica
from p2p_diloco.fragments.state import State, final, founded_by, settled
from p2p_diloco.node.fields import STATE
from p2p_diloco.node.forms import NOBODY, About, Unfit
from p2p_diloco.node.run import Run
from p2p_diloco.node.saving import Checkpoint, Saving, Snapshot, Wrong
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.node.tensor_work import TensorWork
from p2p_diloco.tensors.digest import digest
from p2p_diloco.tensors.layout import Layout


class FragmentSaving(Saving):
    """Writes a checkpoint when one is due."""

    def _snapshot(self) -> Snapshot:
        work = cast(SliceWork, self._work)
        states = [log.held for log in cast(Replica, self._replica).logs]
        # copied, because the tensors change while the checkpoint is written
        theta = torch.cat([held.theta for held in work.state.slices])
        outer = [{name: values.clone() for name, values in held.state.items()} for held in work.state.slices]
        known = [work.known_digests(state.fragment) for state in states]
        return FragmentSnapshot(self._run, theta, outer, states, self._founded, self._describing.card, known)


@dataclass(frozen=True)
class FragmentSnapshot(Snapshot):
    """`known`: by fragment, the digests of its slices after their last step; empty if they are not computed yet."""

    known: Sequence[Sequence[str]] = ()

    def damaged(self) -> Sequence[Wrong]:
        wrong, digests = [], _digests(self.run.layout, self.theta, self.outer)
        for state, known in zip(self.states, self.known, strict=True):
            for number, place in enumerate(self.run.layout.shards_of(state.fragment)):
                if known and digests[place.index] != known[number]:
                    event = Damaged(state.fragment, state.version, (number,))
                    wrong.append((place.index, cast(Event, event)))
        return wrong

    def manifest(self) -> dict[str, object]:
        rules = self.run.rules
        versions = [state.version for state in self.states]
        sizes = map(len, rules.fragments)  # so it compares with that of a checkpoint with a version for each shard
        return super().manifest() | {
            "samples": sum(version.samples * size for version, size in zip(versions, sizes, strict=True)),
            "fragments": [_packed(state, rules) for state in self.states],
            "digests": _digests(self.run.layout, self.theta, self.outer),
        }

    def _listed(self) -> dict[str, object]:
        return {}


class FragmentCheckpoint(Checkpoint):
    """A checkpoint that was read from disk."""

    def _read_states(self, manifest: Mapping[str, object]) -> Sequence[Any]:
        packed, rules = manifest.get("fragments"), Run(self.run_id, self.run_config, self.layout).rules
        self._told = []
        if "states" in manifest:  # of a version of this package that had a log for each shard
            of_shards = super()._read_states(manifest)
            return [_joined(fragment, of_shards, rules) for fragment in range(len(rules.fragments))]
        self._told = digests if isinstance(digests := manifest.get("digests"), list) else []
        if (
            not isinstance(packed, list)
            or len(self._told) != len(self.layout.shards)
            or len(packed) != len(rules.fragments)
        ):
            raise ValueError("it has no states of fragments")
        return [_unpacked(fragment, text, rules) for fragment, text in enumerate(packed)]

    def _check(self) -> None:
        found = _digests(self.layout, self.theta, self._outer)
        if wrong := [shard for shard, told in enumerate(self._told) if told != found[shard]]:
            raise ValueError(f"shard {wrong[0]} doesn't have the digest that it names")

    def has_ended(self, rules: Rules) -> bool:
        return all(final(state, rules) for state in self._states)

    def restore(self, run: Run, work: TensorWork, founder: str) -> tuple[Any, ...]:
        slices, outers, of = cast(SliceWork, work).state, self._restored(run), self._founder(run, founder)
        try:
            for shard, payload in enumerate(self._payloads(run, outers)):
                slices.stage(shard, payload, in_place=True)
        except (KeyError, ValueError) as error:
            raise self._unusable(f"its tensors are not what the run needs ({error})") from None
        return tuple(state if of is None else founded_by(of, state, run.rules) for state in self._states)


def _digests(layout: Layout, theta: Tensor, outer: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """The digest of each shard's tensors."""
    pairs = zip(layout.shards, outer, strict=True)
    return [digest(theta[place.start : place.stop], state, b"") for place, state in pairs]


def _joined(fragment: int, states: Sequence[Any], rules: Rules) -> State:
    """The state of a fragment whose shards had logs of their own. Raises ValueError unless they are at one version."""
    shards: list[OfShard] = [states[shard] for shard in rules.fragments[fragment]]
    first = shards[0]
    if len({(s.version.generation, s.version.samples, s.version.epoch) for s in shards}) > 1:
        raise ValueError(f"the shards of fragment {fragment} are at unlike versions; choose an older checkpoint")
    epoch, group = first.version.epoch, set(first.plan.group) & first.counted.keys()
    roll = {
        peer: Member(min(s.counted.get(peer, id) for s in shards), epoch - (peer not in group), epoch)
        for peer, id in first.counted.items()
        if group or epoch == 0
    }
    roll = roll or {first.plan.succession[0]: Member(ContributionId(0, 0), epoch, epoch)}
    version = replace(first.version, digest=digest_of(s.version.digest for s in shards))
    more = first.buffered, first.revision, first.paced, states[rules.ledger].tables if fragment == 0 else ()
    return settled(State(fragment, version, roll, Plan((), ()), (), *more), rules)


def _packed(state: State, rules: Rules) -> str:
    return base64.b64encode(msgspec.msgpack.encode(STATE.write(state, About("", rules, NOBODY)))).decode()


def _unpacked(fragment: int, text: object, rules: Rules) -> State:
    """Raises ValueError if the text is no state of this fragment."""
    try:
        struct = msgspec.msgpack.decode(base64.b64decode(str(text)), type=STATE.type)
        state: State = STATE.read(struct, replace(About("", rules), fragment=fragment))
    except (binascii.Error, msgspec.MsgspecError, Unfit) as error:
        raise ValueError(f"the state of fragment {fragment} can't be read ({error})") from None
    return state
