"""Carries out the effects of `p2p_diloco.core` on tensors: means, outer steps, fetched slices, digests; and encodes
contributions.

Law: a version says nothing of tensors, so nothing is proposed or compared. `apply` changes the present tensors in
place, slice by slice, and returns when all are done; the node calls it only while the replica still waits for this
step, and feeds its result at once. So at any other time the tensors of a fragment are those of one version: `versions`.
Fetched slices are staged beside the present ones, which only `accept` replaces.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from p2p_diloco.core import events as e
from p2p_diloco.core.messages import Commit, Mean, Message, Part, Slice
from p2p_diloco.core.state import is_empty
from p2p_diloco.core.version import ContributionId, Version
from p2p_diloco.net.interface import Refusal
from p2p_diloco.node.run import Run
from p2p_diloco.node.signatures import hash_of
from p2p_diloco.tensors import buffers
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.feedback import Feedback
from p2p_diloco.tensors.flat import ALONE, Threads
from p2p_diloco.tensors.layout import PARAMETER, Layout
from p2p_diloco.tensors.mean import MAGNITUDE_MAX, Given, weighted_mean
from p2p_diloco.tensors.outer_state import OuterState, SliceState, joined

LOOK_AGAIN_S = 10.0
"""Seconds after which a slice's memory is compared with its digest again, before a pseudo-gradient is measured from it
and before a step. A comparison reads all of it."""

FINITE_MAX = torch.finfo(torch.float32).max

SealMean = Callable[[int, Version, str, int, str], bytes]
"""Signs the mean of (fragment, base, key, number, hash)."""

log = logging.getLogger(__name__)


class SliceWork:
    """The outer state of one replica, and the slices that it fetches."""

    def __init__(
        self,
        run: Run,
        theta: Tensor,
        seal: SealMean,
        base: Tensor | None = None,
        threads: Threads = ALONE,
    ) -> None:
        """`theta` [numel] fp32 is used in place, as θ. `base` [numel] fp32 is memory for the bases of a trainer; None
        if there is no trainer. `threads` compute."""
        self._run, self._seal, self.threads = run, seal, threads
        self.bases = Bases(run.layout, theta, theta if base is None else base)
        self.state = OuterState(run.layout, run.outer, theta, run.config.step_limit, threads)
        self.versions: dict[int, Version] = {}
        """The version of each fragment's present tensors; a fragment without a state is missing."""
        self._indices = run.rules.fragments  # by fragment and number: a slice's index in the layout
        self._staged: dict[tuple[int, int], SliceState] = {}  # by fragment and number
        self.is_own = True
        """Whether no fetch has written over θ, which was this peer's own model at the start."""
        self._digests: dict[int, tuple[Version, tuple[str, ...]]] = {}
        self._looked: dict[int, list[float]] = {}  # by fragment: when each slice was last as its digest says
        self._changes = [0] * len(self._indices)  # how often each fragment's tensors were changed
        self._feedback: dict[int, Feedback] = {}  # by slice; made when a contribution first needs it

    # -- contributions

    def encode(self, index: int, delta: Tensor, id: ContributionId, *, weighs: bool = True) -> memoryview:
        """Encode a slice's pseudo-gradient, or the values of buffers, from `delta` [numel], for the contribution `id`.
        The result shares no memory with `delta`, which is written again for the next exchange.

        With error feedback the rounding error is added to the next contribution, unless `weighs` is False. If every
        peer would refuse the values that a codec makes, no progress is sent: a refused contribution would be sent again
        for ever.
        """
        place, (codec, _) = self._run.layout.slices[index], self._run.codecs(index)
        values, feedback = delta[place.start : place.stop], None
        if codecs.shares(values, codec):  # sent as the trainer has written it, which has checked it
            return memoryview(bytes(codecs.encode(values, codec)))
        if codecs.feeds_back(codec):
            feedback = self._feedback[index] = self._feedback.get(index) or Feedback(place.numel)
            values = feedback.added(values) if weighs else values
        payload = self._encoded(values, index, id)
        try:
            check_values(payload, codec, place.numel, MAGNITUDE_MAX)
        except Refusal as refusal:
            log.error("this peer's contribution to slice %d is sent without progress: %s", index, refusal.reason)
            payload = memoryview(bytearray(codecs.encode(self._neutral(index), codec)))
            if feedback is not None:
                feedback.sent_nothing(id)
        else:
            if feedback is not None and weighs:
                feedback.sent(id, codecs.decode_blocks(payload, codec, place.numel))
            elif feedback is not None:
                feedback.sent_apart(id)
        return payload

    def merge(self, loaded: e.Loaded) -> None:
        """Update the error feedback of a fragment that the trainer merges."""
        for index in self._run.rules.fragments[loaded.fragment]:
            if (feedback := self._feedback.get(index)) is not None:
                feedback.merge(loaded.outcome, loaded.counted)

    def _encoded(self, values: Tensor, index: int, id: ContributionId) -> memoryview:
        """Encode values with the run's codec and rounding. The unique id of the contribution is the seed of its random
        rounding."""
        codec, _ = self._run.codecs(index)
        if self._run.config.rounding == "nearest" or codec == buffers.CODEC:
            return codecs.encode(values, codec)
        drawn = blake2b(repr((id.incarnation, id.sequence, index)).encode(), digest_size=8).digest()
        return codecs.encode_stochastically(values, int.from_bytes(drawn, "little", signed=True))

    # -- rounds

    def average(self, effect: e.Average) -> e.Averaged:
        """Compute, encode, hash and sign the mean of one slice."""
        index = self._indices[effect.fragment][effect.number]
        given = [(part.author, weight, part.payload) for weight, part in effect.slices]
        try:
            payload = self.mean_of(index, given)
        except ValueError as error:  # what is received is checked, so this is a fault of our own
            log.error("the contributions to slice %d can't be averaged, and are ignored: %s", index, error)
            payload = codecs.encode(self._neutral(index), self._run.codecs(index)[1])
        of = effect.fragment, effect.base, effect.key, effect.number, hash_of(payload)
        return e.Averaged(*of, payload, self._seal(*of))

    def mean_of(self, index: int, given: Sequence[Given]) -> memoryview:
        """Compute the encoded mean of these contributions to a slice. Raises ValueError if they can't be averaged."""
        place, aggregation = self._run.layout.slices[index], self._run.config.aggregation
        codec, reply = self._run.codecs(index)
        if place.kind == PARAMETER:
            dtype = codecs.written_in(reply, "nearest")
            mean = weighted_mean(given, codec, place.numel, dtype, aggregation, self.threads)
        else:
            mean = buffers.together(place.kind, given, place.numel, aggregation)
        return codecs.encode(mean, reply)

    def apply(self, effect: e.Apply, damaged: Sequence[int] = ()) -> e.Applied:
        """Make the outer step of a commit, in place. If a slice's step would lead to values that are not finite, its
        tensors stay as they are: all replicas decide this alike. `damaged`: slices that have changed in memory, which
        are no base of the trainer's progress."""
        commit, fragment = effect.commit, effect.commit.fragment
        assert self.versions.get(fragment) == commit.base, "the tensors are not those of the commit's base"
        if submissions := submissions_of(commit):
            self._changes[fragment] += 1
            for number, (index, mean) in enumerate(zip(self._indices[fragment], effect.means, strict=True)):
                self.bases.keep(index, damaged=number in damaged)
                self._step(index, self.state.slices[index], effect, mean, submissions)
        self.versions[fragment] = commit.version
        return e.Applied(fragment, commit.base, commit.version)

    def _step(self, index: int, held: SliceState, of: e.Apply | e.Roll, mean: Mean, submissions: int) -> None:
        run, commit = self._run, of.commit
        try:
            if run.layout.slices[index].kind == PARAMETER:
                rates = run.rates_at(commit.choice.revision, commit.base.epoch)
                codec = run.codecs(index)[1]
                self.state.step(index, held, mean.payload, codec, submissions, of.buffered, rates)
            else:
                share = min(1.0, submissions / max(1, of.peers)) if run.rules.asynchronous else 1.0
                self.state.step_buffers(index, held, mean.payload, share)
        except ValueError as error:
            mend = "if this goes on, start the run again from a checkpoint, with a lower outer_lr"
            log.error("slice %d makes no outer step to epoch %d: %s; %s", index, commit.version.epoch, error, mend)

    def _neutral(self, index: int) -> Tensor:
        """A contribution without progress: zeros, or the present values of buffers."""
        place = self._run.layout.slices[index]
        theta = self.state.slices[index].theta
        return torch.zeros(place.numel, device="cpu") if place.kind == PARAMETER else theta.clone()

    # -- fetched slices

    def fill(self, effect: e.Fill) -> e.Filled:
        """Stage a fetched slice. A replica that holds no state of the fragment needs no second memory for it."""
        index = self._indices[effect.fragment][effect.number]
        in_place = effect.fragment not in self.versions
        staged = self.state.stage(index, effect.payload, in_place=in_place)
        self.is_own = self.is_own and not in_place
        self._staged[effect.fragment, effect.number] = staged
        return e.Filled(effect.fragment, effect.version, effect.number, staged.digest())

    def roll(self, effect: e.Roll) -> e.Rolled:
        """Make the outer step of a commit in a staged slice."""
        commit, number = effect.commit, effect.mean.number
        if submissions := submissions_of(commit):
            index, staged = self._indices[commit.fragment][number], self._staged[commit.fragment, number]
            self._step(index, staged, effect, effect.mean, submissions)
        return e.Rolled(commit.fragment, commit.version, number)

    def accept(self, effect: e.Accept) -> None:
        """Make staged slices the present ones. After a step of `apply` nothing is left to do."""
        for fragment, version in effect.versions if effect.staged else ():
            self._changes[fragment] += 1
            for number in range(len(self._indices[fragment])) if effect.numbers is None else effect.numbers:
                index = self._indices[fragment][number]
                if effect.numbers is None:
                    self.bases.keep(index)
                self.state.adopt(index, self._staged.pop((fragment, number)))
            self.hold(fragment, version)
            self._digests.pop(fragment, None)
            self._staged = {place: staged for place, staged in self._staged.items() if place[0] != fragment}

    def hold(self, fragment: int, version: Version) -> None:
        """Record that a fragment's present tensors are those of this version: founded, restored or adopted."""
        self.versions[fragment] = version

    # -- digests

    def digest(self, fragment: int) -> e.Digested | None:
        """Compute the digests of a fragment's tensors. A thread may call this while all else goes on: if the tensors
        change meanwhile, nothing is returned."""
        version, changes, found = self.versions[fragment], self._changes[fragment], list[str]()
        for index in self._indices[fragment]:
            found.append(self.state.slices[index].digest())
            if self._changes[fragment] != changes:
                return None
        self._digests[fragment] = version, tuple(found)
        self._looked[fragment] = [time.monotonic()] * len(found)
        return e.Digested(fragment, version, tuple(found))

    def damaged(self, fragment: int, numbers: Sequence[int] | None = None) -> e.Damaged | None:
        """Compare a fragment's slices, all or these, with their digests. Returns those whose memory has changed; None
        if there are none, or if the digests of this version are not computed yet."""
        digests, indices = self.known_digests(fragment), self._indices[fragment]
        if not digests:
            return None
        looked = range(len(indices)) if numbers is None else numbers
        wrong = tuple(n for n in looked if self.state.slices[indices[n]].digest() != digests[n])
        for number in set(looked) - set(wrong):
            self._looked[fragment][number] = time.monotonic()
        return e.Damaged(fragment, wrong) if wrong else None

    def unseen(self, fragment: int) -> list[int]:
        """The slices of a fragment whose memory was not compared with its digest in the last `LOOK_AGAIN_S`."""
        looked = self._looked.get(fragment) or [-math.inf] * len(self._indices[fragment])
        return [number for number, at in enumerate(looked) if time.monotonic() - at >= LOOK_AGAIN_S]

    def known_digests(self, fragment: int) -> tuple[str, ...]:
        """The digests of a fragment's slices after their last step; empty if they are not computed yet."""
        known, digests = self._digests.get(fragment, (None, ()))
        return digests if known == self.versions.get(fragment) else ()

    def keep(self, effect: e.Keep) -> None:
        """Take damaged slices as they are: `digest` computes their digests anew. They are no base of the trainer's
        progress, which was made from what they were."""
        self._changes[effect.fragment] += 1
        self._digests.pop(effect.fragment, None)
        slices = [self._indices[effect.fragment][number] for number in effect.numbers]
        self.bases.lost |= self.bases.read & set(slices)
        log.warning("slices %s were corrupted in memory, and no peer can repair them: going on with them", slices)

    # -- payloads

    def nbytes(self, message: Message) -> int:
        """The length in bytes that the payload of this message must have; 0 if the message has none."""
        if not isinstance(message, Slice | Mean | Part):
            return 0
        index = self._indices[message.fragment][message.number]
        if isinstance(message, Part):
            return self.state.nbytes(index, first=message.version.is_first)
        sent, reply = self._run.codecs(index)
        codec = sent if isinstance(message, Slice) else reply
        return codecs.nbytes(codec, self._run.layout.slices[index].numel)

    def nbytes_of_contribution(self, index: int) -> int:
        """The length in bytes of an encoded contribution to the slice with this index in the layout."""
        return codecs.nbytes(self._run.codecs(index)[0], self._run.layout.slices[index].numel)

    def part(self, fragment: int, number: int) -> Part:
        """The present tensors of one slice, with the version that they have now. Before the first commit only θ is
        sent: so peers that begin together begin in half the time."""
        held, version = self.state.slices[self._indices[fragment][number]], self.versions[fragment]
        return Part(fragment, version, number, joined(held.export(first=version.is_first)))


def submissions_of(commit: Commit) -> int:
    """How many contributions with progress a commit counts. If there are none, its step changes no tensor."""
    return sum(ready.weight > 0 and not is_empty(ready) for _, ready in commit.choice.entries)


def check_values(payload: memoryview, codec: str, numel: int, magnitude_max: float = FINITE_MAX) -> None:
    """Raises Refusal if the values in a payload can't be used."""
    try:
        if codecs.peak(payload, codec, numel) <= magnitude_max:  # NaN compares as false
            return
    except ValueError as error:
        raise Refusal(f"its payload can't be decoded: {error}") from None
    raise Refusal("its payload has values that are not finite or too large")


# -- bases of pseudo-gradients


class Bases:
    """Keeps the base of each slice: its global values as the trainer has loaded them. The base is θ itself (`theta`),
    or a copy in `base`. Both tensors have `layout.numel` values, in fp32. Before its first load the trainer has no
    progress, so no base is kept.

    While θ equals the values that the trainer has loaded, no copy is made. Before θ changes, the base is copied to
    `base`, unless the trainer stands still after sending: then it has no progress beyond what was sent, and needs no
    base. A base that fails its checksum is never used, and the progress since that base is lost."""

    def __init__(self, layout: Layout, theta: Tensor, base: Tensor) -> None:
        self._layout, self._theta, self._base = layout, theta, base
        self.kept: set[int] = set()
        """Slices whose base was copied to `base`."""
        self.gone = set(range(len(layout.slices)))
        """Slices without a base, because θ changed while all of their progress had been sent."""
        self.lost: set[int] = set()
        """Slices without a base, because it was corrupted in memory: their progress is unknown."""
        self._sent: frozenset[int] = frozenset()

    @property
    def read(self) -> set[int]:
        """The slices whose base is θ itself."""
        return set(range(len(self._layout.slices))) - self.kept - self.gone - self.lost

    def stand(self, slices: Collection[int]) -> None:
        """Record that these slices' pseudo-gradients were sent, and that training stands still until the result is
        loaded."""
        self._sent = frozenset(slices)

    def keep(self, index: int, *, damaged: bool = False) -> None:
        """Copy a slice's base if the trainer still needs it. Called before the slice's θ changes. `damaged`: θ has
        changed in memory since it was accepted."""
        if index not in self.read:
            return
        if index in self._sent:
            self.gone.add(index)
        elif damaged:
            self.lost.add(index)
        else:
            place = self._layout.slices[index]
            self._base[place.start : place.stop] = self._theta[place.start : place.stop]
            self.kept.add(index)

    def loaded(self, slices: Collection[int]) -> None:
        """Record that the trainer has loaded the θ of these slices, and goes on training."""
        for those in (self.kept, self.gone, self.lost):
            those.difference_update(slices)
        self._sent = frozenset()
