"""All that a run's peers agree on, in one object: the settings, the model layout, and what follows from both.

Law: derived once, when a run is found or founded, and never changed. Nothing is sent or received here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b

from p2p_diloco.config import RunConfig
from p2p_diloco.config.run import Rates
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.rules import Rules
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.interface import Limits
from p2p_diloco.node.wire import TOKEN_BYTES
from p2p_diloco.tensors import buffers, outer_state
from p2p_diloco.tensors import codec as codecs
from p2p_diloco.tensors.delayed import DelayedNesterov
from p2p_diloco.tensors.layout import PARAMETER, Layout, ParamSpec, SliceSpec
from p2p_diloco.tensors.outer import OuterOptimizer

KEPT_BYTES, KEPT_MIN, KEPT_MAX = 256 * 2**20, 4, 1024
"""Limits on the commits that a newcomer keeps while it fetches states: the bytes for all fragments together, and the
least and the greatest number of commits for each fragment."""

FETCH_BYTES, FETCH_MIN = 4 * 2**20, 2
"""At a time, a newcomer asks each donor for slices whose states have FETCH_BYTES together, but for at least FETCH_MIN
slices: few enough to divide the work evenly among donors, and enough to use a link of long delay."""

STEPS_OVER, STEPS_LEAST, SAMPLES_PER_STEP = 16, 100, 2**20
"""Limits of a contribution. Inner steps: at most STEPS_OVER times `sync_every`, or times STEPS_LEAST if that is more.
Samples: at most SAMPLES_PER_STEP for each of these steps. Weight: as samples if it is in samples, else as steps. Honest
contributions are far smaller."""

VERSION_BYTES = 64
"""The most bytes that one slice takes in a header, with its version."""


@dataclass(frozen=True)
class Run:
    """What a peer knows about its run. `config` holds the run's settings, which may differ from the settings that this
    peer was given."""

    run_id: str
    config: RunConfig
    layout: Layout
    salt: bytes = b""
    """A secret of a private run's members, which goes into the token; empty in an open run."""

    @cached_property
    def token(self) -> bytes:
        """The token that identifies the run, its settings and its model in every message."""
        return token(self.run_id, self.config.fingerprint(), self.layout.fingerprint(), self.salt)

    @cached_property
    def rules(self) -> Rules:
        """The core's rules for this run: its settings of the same names, and what follows from settings and layout."""
        config, layout = self.config, self.layout
        same = {rule.name for rule in fields(Rules)} & type(config).model_fields.keys()
        return Rules(
            run=self.run_id,
            fragments=tuple(
                tuple(place.index for place in layout.slices_of(fragment)) for fragment in range(len(layout.fragments))
            ),
            **{name: getattr(config, name) for name in same},
            weight_max=self._steps_max * (SAMPLES_PER_STEP if config.weighting == "samples" else 1),
            samples_max=self._steps_max * SAMPLES_PER_STEP,
            commits_kept=self._commits_kept,
            fetch_window=max(FETCH_MIN, FETCH_BYTES // self._state_nbytes),
        )

    @property
    def _steps_max(self) -> int:
        """The most inner steps that a contribution may claim."""
        return STEPS_OVER * max(self.config.sync_every, STEPS_LEAST)

    @property
    def _state_nbytes(self) -> int:
        """The length in bytes of the longest slice's state, counting only its tensors."""
        return max(
            (4 * (place.numel + sum(self.state_lengths(place).values())) for place in self.layout.slices), default=0
        )

    def state_lengths(self, place: SliceSpec) -> dict[str, int]:
        """The number of elements of each state tensor of a slice, by name, in the order of storage."""
        return outer_state.state_lengths(place, self.outer, self.config.step_limit)

    @property
    def _commits_kept(self) -> int:
        """The number of commits that a newcomer keeps for each fragment while it fetches states."""
        epoch_nbytes = max(
            1, sum(codecs.nbytes(self.codecs(place.index)[1], place.numel) for place in self.layout.slices)
        )
        return min(max(KEPT_BYTES // epoch_nbytes, KEPT_MIN), KEPT_MAX)

    @cached_property
    def outer(self) -> OuterOptimizer | DelayedNesterov:
        """The run's outer optimizer. It is wrapped in Delayed Nesterov if the buffer is larger than one submission."""
        config = self.config
        outer = OuterOptimizer(
            config.outer_optimizer,
            config.outer_lr,
            config.outer_momentum,
            config.nesterov,
            config.outer_options,
        )
        size = config.dn_buffer_size
        return DelayedNesterov(outer, size, config.dn_variant) if size > 1 else outer

    def rates_at(self, revision: Revision, epoch: int) -> Rates:
        """The rates of the outer step that follows this epoch of a fragment. A rate that the revision names replaces
        the run's own at once."""
        lr, momentum = self.config.rates(epoch)
        revised_lr, revised_momentum = revision.rates or (None, None)
        return lr if revised_lr is None else revised_lr, momentum if revised_momentum is None else revised_momentum

    def timed(self, limits: Limits) -> Limits:
        """Copy the limits, with the run's timeouts in place of the default ones."""
        answer_s, dial_s = self.rules.answers_within, self.rules.dials_within
        return replace(limits, connect_timeout_s=dial_s, read_timeout_s=answer_s, write_timeout_s=answer_s)

    def check(self, limits: Limits) -> None:
        """Check that no slice's state is too long for one message, and that one message can list all slices.

        Raises:
            ConfigError: one of them doesn't fit.
        """
        slices, value = self.layout.slices, self.config.slice_elements
        if (longest := self._state_nbytes) > limits.payload_bytes_max:
            wrong = f"makes a slice's state {longest} bytes long; a message has at most {limits.payload_bytes_max}"
            raise ConfigError(wrong, key="slice_elements", value=value, mend="choose a smaller one")
        if VERSION_BYTES * (len(slices) + 2) > limits.header_bytes_max:
            wrong = f"makes {len(slices)} slices, more than one message can list"
            raise ConfigError(wrong, key="slice_elements", value=value, mend="choose a larger one")

    @cached_property
    def round_nbytes(self) -> int:
        """The bytes of a contribution and a mean together, for one fragment of average length."""
        layout = self.layout
        nbytes = sum(codecs.nbytes(codec, s.numel) for s in layout.slices for codec in self.codecs(s.index))
        return nbytes // len(layout.fragments)

    def codecs(self, index: int) -> tuple[str, str]:
        """The codecs of contributions to this slice, and of its means. Buffers are sent without loss."""
        if self.layout.slices[index].kind != PARAMETER:
            return buffers.CODEC, buffers.CODEC
        return self.config.codec, reply_codec_of(self.config)


def layout_of(config: RunConfig, specs: Sequence[ParamSpec], buffers: Sequence[ParamSpec] = ()) -> Layout:
    """The layout of a model's parameters and buffers by these settings."""
    cut = config.num_fragments, config.fragment_layout, config.slice_elements
    return Layout.build(specs, *cut, buffers if config.buffers == "average" else ())


def reply_codec_of(config: RunConfig) -> str:
    """The codec in which means are sent: `reply_codec` if it is set. If not, it is the codec of contributions, or bf16
    if that codec has error feedback: the slice may have another owner in the next round, which doesn't know the
    rounding errors of this round's mean."""
    return config.reply_codec or ("bf16" if codecs.feeds_back(config.codec) else config.codec)


def token(run_id: str, settings: str, model: str, salt: bytes = b"") -> bytes:
    """Hash a run's name, the fingerprints of its settings and its model, and its salt (if any) to the run's token."""
    return blake2b("\0".join((run_id, settings, model)).encode(), digest_size=TOKEN_BYTES, key=salt).digest()
