"""The settings that all peers of a run agree on (`RunConfig`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator
from typing_extensions import Self

from p2p_diloco.config.base import Seconds, Settings
from p2p_diloco.errors import ConfigError, Refused

Codec = Literal["bf16", "fp32", "fp16", "int8", "int4", "e3m0", "topk"]

LIVE_KEYS = frozenset({"outer", "outer_lr", "outer_momentum", "stop_after_epochs", "stop_after_samples"})
"""Settings that are not in a run's fingerprint: a joiner with other values is accepted and uses the run's. All of them
but `outer`, and also sync_every and min_peers, may change while the run goes on (`core/revision.py`)."""

FIXES = frozenset({"outer_lr", "outer_momentum", "outer_optimizer"})
"""Settings of which each makes `outer` "fixed", unless `outer` is set itself."""

ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "sync": ("pace", "round_timeout", "pause_timeout", "carry_rounds"),
    "async": ("successors", "dn_buffer_size", "dn_variant", "dylu", "async_grace", "max_staleness"),
}
"""The settings that one mode alone uses; in the other mode they must have their defaults."""

MOMENTUM_OF_EACH_MAX = 0.5
"""In asynchronous mode, a higher outer momentum causes a warning if every submission updates the momentum."""
OVERLAP_MAX = 4
"""With a high momentum, overlaps up to H divided by this number were measured, and an overlap of all of H."""
MOMENTUM_HIGH = 0.9
ROUNDS_FEW, MOMENTS = 20, 5
"""A run should have at least ROUNDS_FEW outer steps, and at least MOMENTS times as many as momentum averages over,
which are 1 / (1 - momentum)."""
EPOCH_LATE = 10**6
"""An epoch at which the rates don't rise any more."""

Rates = tuple[float, float]
"""The learning rate and the momentum of an outer step."""

ROUNDS_HALF, STEPS_HALF = 5, 100
"""The momentum of the outer step after epoch e is e / (e + ROUNDS_HALF + STEPS_HALF / H), until it is the run's own:
one half after 5 rounds and 100 inner steps (docs/decisions/0079-rates-that-begin-as-averaging.md)."""

EACH_ALONE: Rates = (0.5, 0.0)
"""The rates in asynchronous mode if every submission is an outer step of its own."""
BUFFERED_MOMENTUM_MAX = 0.5
"""The highest momentum with Delayed Nesterov: a buffer holds less work than a synchronous round, and some is stale."""


def rising(epoch: float, sync_every: int, full: Rates) -> Rates:
    """The rates of the outer step that follows `epoch` outer steps, which begin as plain averaging. `full`: those that
    are reached in the end.

    Each result is a few sums, products and quotients of doubles, which every machine rounds alike, so all peers compute
    the same bits and no commit has to carry them."""
    lr, momentum = full
    risen = min(momentum, epoch / (epoch + ROUNDS_HALF + STEPS_HALF / sync_every))
    share = risen / momentum if momentum else 1.0
    return 1.0 + share * (lr - 1.0), risen


class RunConfig(Settings):
    """The settings that all peers of a run agree on. The founder publishes them, and joiners read them from the run.

    Of a joiner's settings only those set explicitly must match the run's. ``RunConfig()`` sets none, so it takes all of
    them from the run. A run with another `sync_every` refuses ``RunConfig(sync_every=100)``.

    Raises:
        ConfigError: a value can't be used; the error names the key, the value and the mend.
    """

    mode: Literal["sync", "async"] = "sync"
    """sync: an outer step waits for the peers that train; async: every submission is an outer step."""
    sync_every: int = Field(default=500, ge=1)
    """H: inner steps between two exchanges of the whole model."""
    pace: Literal["steps", "time"] = "steps"
    """steps: every peer makes sync_every inner steps; time: the fastest peer does, and each other peer makes as many as
    it can in the same time, at least one. For mode=sync."""
    num_fragments: int = Field(default=1, ge=1)
    """Fragments that the model is sent in, one every sync_every/num_fragments steps."""
    fragment_layout: Literal["contiguous", "strided"] = "contiguous"
    """How fragments lie over the layers: one after another, or interleaved."""
    slice_elements: int | None = Field(default=None, ge=1)
    """The most elements of a slice, the unit of aggregation; unset: chosen when the run is founded, so that 2 to 16
    peers share the aggregation evenly."""
    overlap_steps: int = Field(default=0, ge=0)
    """Inner steps that go on between sending a fragment and merging its result."""
    merge: Literal["mix", "rebase"] = "mix"
    """mix: weigh global and local values; rebase: keep the steps made since sending."""
    merge_alpha: float | None = Field(default=None, ge=0, le=1)
    """Share of the local value in merge=mix: 0 takes the global one, 1 keeps the local one; unset: 0.5 with
    overlap_steps, else 0."""
    codec: Codec = "bf16"
    """How pseudo-gradients are written on the wire."""
    reply_codec: Codec | None = None
    """How the averaged result is written on the wire; topk is not allowed. Unset: the same as codec if that is fp32,
    bf16 or fp16, else bf16."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How pseudo-gradients are rounded; stochastic: at random, right on average. For codec=bf16."""
    outer: Literal["auto", "fixed"] = "auto"
    """auto: the run begins with plain averaging, and moves to outer_lr and outer_momentum as rounds are made; fixed:
    these two from the first outer step on. If one of them or outer_optimizer is set: fixed."""
    outer_optimizer: Annotated[str, StringConstraints(min_length=1)] = "sgd"
    """The outer optimizer: sgd, or an element-wise class: the name of one of torch.optim, or package.module:Class,
    which all peers must have, and be given."""
    outer_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an outer optimizer other than sgd, as JSON."""
    outer_lr: float = Field(default=0.7, ge=0)
    """Learning rate of the outer optimizer."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the outer optimizer."""
    nesterov: bool = True
    """Whether the outer momentum is Nesterov's."""
    weighting: Literal["steps", "samples", "uniform"] = "steps"
    """A pseudo-gradient's weight: its inner steps, its reported samples, or 1. For mode=sync; in mode=async each weighs
    1."""
    aggregation: Literal["clip", "mean", "centered_clip"] = "clip"
    """How contributions are averaged. clip: longer ones are shortened to their median length; centered_clip: then also
    to their median distance from their centre; mean: without limits. Limits need three contributions; in mode=async,
    that needs async_grace."""
    step_limit: float = Field(default=1.25, ge=0)
    """The greatest length of a commit's mean, in multiples of the median length of the slice's last nine means; a
    longer mean is shortened to it. 0: no limit."""
    audit_rate: float = Field(default=0.03, ge=0, le=1)
    """The share of means that some peer computes again from the contributions, to find a peer that computes wrong ones;
    more if a fragment has fewer than 24 slices. 0: no mean is audited."""
    buffers: Literal["average", "local"] = "average"
    """What becomes of the model's buffers, such as BatchNorm's running statistics. average: each commit averages them,
    and takes the greatest of integer ones; local: each peer keeps its own."""
    min_peers: int = Field(default=1, ge=1)
    """Contributions that an outer step needs at least. It always needs those of half of the peers that take part, and
    of two if there are two."""
    start_peers: int = Field(default=1, ge=1)
    """Contributions that the first outer step of a run needs at least."""
    round_timeout: Seconds = 600.0
    """Seconds that an outer step waits for contributions before it goes on with a quorum. For mode=sync."""
    pause_timeout: Seconds = 60.0
    """Seconds that the others wait for a peer that pauses, to evaluate or to save. For mode=sync."""
    heartbeat_interval: float = Field(default=1.0, ge=0)
    """Seconds between two probes of other peers; more than 0."""
    heartbeat_timeout: float = Field(default=10.0, ge=0)
    """Seconds of silence after which a peer counts as dead."""
    successors: int = Field(default=1, ge=0)
    """Peers that hold a commit before its submitter is answered, and take over when the leader fails. For
    mode=async."""
    dn_buffer_size: int = Field(default=0, ge=0)
    """Submissions in the Delayed Nesterov buffer; 0 or 1: no delay. For mode=async."""
    dn_variant: Literal["paper", "buffered"] = "paper"
    """Delayed Nesterov over a buffer of N submissions. paper: all together make one Nesterov step; buffered: each makes
    a plain step, but the N-th a Nesterov step on the mean of all. For mode=async."""
    dylu: bool = False
    """Dynamic local updates: slower peers make fewer inner steps. For mode=async."""
    async_grace: float = Field(default=0.0, ge=0)
    """Seconds that a submission waits to be averaged with others; 0: none. For mode=async."""
    max_staleness: int | None = Field(default=None, ge=0)
    """The most epochs that a submission may be behind; unset: any. For mode=async."""
    carry_rounds: int = Field(default=2, ge=0)
    """Rounds that a peer's progress may miss, carried into the next contribution, before it is dropped. For
    mode=sync."""
    stop_after_epochs: int | None = Field(default=None, ge=1)
    """Outer steps after which the run ends for all; unset: never."""
    stop_after_samples: int | None = Field(default=None, ge=1)
    """Samples of all peers after which the run ends for all; unset: never."""

    @field_validator("outer_optimizer", mode="before")
    @classmethod
    def _name_of_a_class(cls, value: Any) -> Any:
        if isinstance(value, type) and value.__module__ != "__main__":
            of_torch = value.__module__.split(".")[:2] == ["torch", "optim"]
            return value.__name__ if of_torch else f"{value.__module__}:{value.__qualname__}"
        if callable(value):
            wrong = "has no name by which the other peers and this peer's node could import it"
            mend = "put a class of optimizers into a module, and give package.module:Class"
            raise ConfigError(wrong, key="outer_optimizer", value=value, mend=mend)
        return value

    @model_validator(mode="before")
    @classmethod
    def _given_rates_are_fixed(cls, values: Any) -> Any:
        if isinstance(values, dict) and "outer" not in values and not FIXES.isdisjoint(values):
            return {**values, "outer": "fixed"}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        interval = self.sync_every // self.num_fragments
        if not interval:
            wrong = f"is less than num_fragments={self.num_fragments}: each fragment needs an inner step of its own"
            self._refuse("sync_every", wrong, f"choose at least {self.num_fragments}")
        if self.overlap_steps > interval:
            wrong = f"is more than the {interval} steps between two fragments (sync_every / num_fragments)"
            self._refuse("overlap_steps", wrong, f"choose at most {interval}")
        if self.merge == "rebase" and self.merge_alpha:
            self._refuse("merge_alpha", "has no meaning for merge=rebase", "leave it out")
        for key, usual in (("heartbeat_interval", "10"), ("heartbeat_timeout", "600")):
            if not getattr(self, key):
                wrong = (
                    "would switch off the detection of dead peers, and every round would wait for a peer that is gone"
                )
                self._refuse(key, wrong, f"choose a long time instead, e.g. {usual}")
        if self.heartbeat_timeout <= self.heartbeat_interval:
            wrong = f"leaves no time for a probe every heartbeat_interval={self.heartbeat_interval} seconds"
            self._refuse("heartbeat_timeout", wrong, "choose several times the interval")
        if self.reply_codec == "topk":
            wrong = "leaves most of an averaged result out, and no peer sends the rest later"
            self._refuse("reply_codec", wrong, "choose bf16, or leave it out")
        if self.rounding == "stochastic" and self.codec != "bf16":
            wrong = f"is for codec=bf16, and codec is {self.codec}"
            self._refuse("rounding", wrong, "choose codec=bf16, or leave it out")
        if self.outer == "auto" and self.outer_optimizer != "sgd":
            self._refuse("outer", f"is for outer_optimizer=sgd, and that is {self.outer_optimizer}", "choose fixed")
        if 0 < self.step_limit < 1:
            self._refuse("step_limit", "would cut means of the usual length", "choose e.g. 1.25, or 0 for no limit")
        self._fits_the_mode()
        return self

    def _fits_the_mode(self) -> None:
        """Refuse settings that this mode doesn't use, and combinations for which Delayed Nesterov is not defined."""
        for mode, keys in ONLY_IN.items():
            for key in keys if mode != self.mode else ():
                if getattr(self, key) != type(self).model_fields[key].default:
                    wrong = f"is for mode={mode}, and mode is {self.mode}"
                    self._refuse(key, wrong, f"choose mode={mode}, or leave it out")
        if self.mode == "async" and self.weighting == "samples":
            wrong = "has no meaning for mode=async: each submission counts one"
            self._refuse("weighting", wrong, "choose mode=sync, or leave it out (dylu evens unlike speeds out)")
        if self.dn_buffer_size > 1 and (self.outer_optimizer != "sgd" or not self.nesterov):
            mend = "use those, or dn_buffer_size=0"
            self._refuse("dn_buffer_size", "is for outer_optimizer=sgd with nesterov", mend)
        if self.dn_variant != "paper" and self.dn_buffer_size < 2:
            wrong = f"needs a buffer of 2 or more, and dn_buffer_size is {self.dn_buffer_size}"
            self._refuse("dn_variant", wrong, "set dn_buffer_size to the number of peers, or leave it out")

    @property
    def local_share(self) -> float:
        """The value of `merge_alpha`. If it is unset, the default for these settings
        (docs/decisions/0013-alpha-follows-overlap.md)."""
        if self.merge_alpha is not None:
            return self.merge_alpha
        return 0.5 if self.overlap_steps and self.merge == "mix" else 0.0

    def rates(self, epoch: int) -> Rates:
        """The learning rate and the momentum of the outer step that follows this epoch, as the run was founded."""
        if self.outer == "fixed":
            return self.outer_lr, self.outer_momentum
        if self.mode == "sync":
            return rising(epoch, self.sync_every, (self.outer_lr, self.outer_momentum))
        if self.dn_buffer_size < 2:
            return EACH_ALONE
        full = (self.outer_lr, min(self.outer_momentum, BUFFERED_MOMENTUM_MAX))
        return rising(epoch / self.dn_buffer_size, self.sync_every, full)

    @property
    def momentum(self) -> float:
        """The highest outer momentum of the run; 0 with an optimizer that has none."""
        return self.rates(EPOCH_LATE)[1] if self.outer_optimizer == "sgd" else 0.0

    @property
    def rounds_wanted(self) -> float:
        """The fewest outer steps of the whole model that a run should have."""
        momentum = self.momentum if self.outer == "fixed" else 0.0  # rates that rise suit a run of any length
        return max(ROUNDS_FEW, round(MOMENTS / (1 - momentum), 9))

    def doubts(self, rounds: float | None = None) -> list[str]:
        """Warnings, each with a mend, for settings with which training was measured to be worse than with others
        (docs/results.md). `rounds`: the outer steps that the run will make; None: its `stop_after_epochs`."""
        found = []
        if rounds is None and self.mode == "sync":
            rounds = self.stop_after_epochs
        if rounds is not None and rounds < ROUNDS_FEW:
            found.append(
                f"only {rounds:.0f} outer steps are to be made with sync_every={self.sync_every}: with 6 two peers "
                "were measured to gain 2 %, with 100 5 %; use a smaller sync_every, or train for longer"
            )
        if rounds is not None and self.outer == "fixed" and self.momentum and rounds < self.rounds_wanted:
            found.append(
                f"outer_momentum={self.momentum:g} averages over {1 / (1 - self.momentum):.0f} outer steps, and there "
                f"are only {rounds:.0f}, which from random weights was measured to train worse than data-parallel "
                "steps; use outer=auto, or a model that has learnt a little (--warm-start or a checkpoint)"
            )
        if self.sync_every / OVERLAP_MAX < self.overlap_steps < self.sync_every and self.momentum >= MOMENTUM_HIGH:
            found.append(
                f"overlap_steps={self.overlap_steps} is more than a quarter of sync_every; with outer_momentum="
                f"{self.momentum:g} that was not measured, and an overlap of all of it made two peers worse than one; "
                "use a shorter overlap, or a momentum of 0.5"
            )
        if self.overlap_steps == self.sync_every:
            found.append(
                f"overlap_steps={self.overlap_steps} merges the whole model only when it is sent again, which was "
                "measured to train worse than one peer alone; use at most a quarter of sync_every, or more "
                "fragments"
            )
        if self.codec == "topk":
            found.append(
                "codec=topk sends a 64th of the elements, which was measured to train worse than one peer alone in "
                "short runs, most of all with outer momentum; use int4 or e3m0, or a long run with outer_momentum=0"
            )
        if self.mode == "async" and self.momentum > MOMENTUM_OF_EACH_MAX and self.dn_buffer_size < 2:
            found.append(
                f"mode=async moves outer_momentum={self.momentum:g} with every submission, each of another staleness, "
                "which was measured to make the model of three peers diverge; use dn_buffer_size with the number of "
                "peers, a lower momentum, or outer=auto"
            )
        return found

    def to_wire(self) -> dict[str, Any]:
        """Encode every field as plain values for msgpack and JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """Decode settings that `to_wire` encoded, here or on another peer. All fields of the result count as explicitly
        set.

        Raises:
            Refused: the run uses settings that this version can't read or carry out.
        """
        try:
            return cls(**{str(key): value for key, value in wire.items()})
        except ConfigError as error:
            raise Refused(
                f"is a setting of the run that this version can't carry out ({error.wrong})",
                key=error.key,
                value=error.value,
                mend="install the version of p2p-diloco that the run's peers use",
            ) from error

    def fingerprint(self) -> str:
        """32 hex digits, which two configs have in common exactly if all their settings but `LIVE_KEYS` are equal.

        The first 128 bits of SHA-256 over the canonical JSON (sorted keys, no spaces) of all fields but
        `LIVE_KEYS`.
        """
        lasting = {key: value for key, value in self.to_wire().items() if key not in LIVE_KEYS}
        canonical = json.dumps(lasting, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    def difference(self, other: RunConfig, keys: Collection[str] | None = None) -> list[tuple[str, object, object]]:
        """List the settings in which this config differs from `other`, except `LIVE_KEYS`. An item is (key, value in
        `other`, value in this config).

        `keys`: the settings to compare; None: all. A joiner compares those that it was given with the run's (`runs`):
        ``mine.difference(runs, mine.given)``.
        """
        theirs, mine = other.to_wire(), self.to_wire()
        asked = [key for key in mine if key not in LIVE_KEYS and (keys is None or key in keys)]
        return [(key, theirs[key], mine[key]) for key in asked if theirs[key] != mine[key]]
