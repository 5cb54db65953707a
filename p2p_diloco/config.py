"""What all peers of a run agree on (`RunConfig`), and what each chooses for itself (`PeerConfig`).

Law: values, their units, their limits, and nothing else: no file, clock, environment or network is touched
here, and only pydantic and the standard library are imported. Every field is documented with unit and
default, because flags, environment variables, TOML keys and help are all made from it. A setting that this
version doesn't have is refused, never ignored.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from typing_extensions import Self

from p2p_diloco.addresses import check_listen_address, check_peer_address, split_addresses
from p2p_diloco.errors import ConfigError, P2PDilocoError, Refused, shown

Codec = Literal["bf16", "fp32", "fp16", "int8", "int4", "e3m0", "topk"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

LIVE_KEYS = frozenset({"outer_lr", "outer_momentum", "stop_after_epochs", "stop_after_samples"})
"""No part of a run's fingerprint, and no ground for refusing a joiner: the run's value is used. The outer rates may be
changed in a run that is going on (`core/revision.py`); changing the others comes in a later version.
"""

THIS_VERSION_HAS: Mapping[str, tuple[object, ...]] = {"role": ("worker", "aggregator")}
"""The values that this version carries out, where they are fewer than what the settings name."""

ONLY_IN: Mapping[str, tuple[str, ...]] = {
    "sync": ("pace", "round_timeout", "pause_timeout", "carry_rounds"),
    "async": ("successors", "dn_buffer_size", "dn_variant", "dylu", "async_grace", "max_staleness"),
}
"""The settings that mean something in one mode alone; in the other they have their defaults."""


MOMENTUM_OF_EACH_MAX = 0.5
"""An outer momentum beyond this is doubted where every submission of the asynchronous mode moves it."""


class Settings(BaseModel):
    """What all settings share: frozen, nothing unknown, and errors of one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    @field_validator("*", mode="before")
    @classmethod
    def _read_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Read what flags, the environment and files can only write as text: nothing, lists and tables."""
        annotation = cls.model_fields[cast(str, info.field_name)].annotation
        if not isinstance(value, str):
            return value
        if is_optional(annotation) and value.strip().lower() in ("", "none", "unset"):
            return None
        match bare_type(annotation):
            case t if t is tuple:
                return split_addresses(value)
            case t if t is dict:
                return _table(cast(str, info.field_name), value)
            case t if t is Path:
                return Path(value.strip()).expanduser()
            case _:
                return value.strip()

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_sentence(cls, values: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return read(values)
        except ValidationError as error:
            raise _explained(cls, error.errors()[0]) from None

    def _is_in_this_version(self) -> None:
        for key in THIS_VERSION_HAS.keys() & type(self).model_fields.keys():
            value, had = getattr(self, key), THIS_VERSION_HAS[key]
            if value not in had:
                mend = "choose " + " or ".join(shown(choice) for choice in had)
                raise ConfigError("is not in this version yet", key=key, value=value, mend=mend)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were set explicitly, and their values; all others are defaults."""
        return {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}


class RunConfig(Settings):
    """What all peers of a run agree on. Whoever starts the run publishes it, and joiners read it from the
    run.

    Only the fields that are set explicitly bind a joiner: ``RunConfig()`` takes all of the run's, and
    ``RunConfig(sync_every=100)`` is refused by a run with another `sync_every`.

    Raises:
        ConfigError: a value that can't be used, with the key, the value and the mend.
    """

    mode: Literal["sync", "async"] = Field(
        default="sync", description="sync: an outer step waits for its averaging group; async: for nobody."
    )
    sync_every: int = Field(default=500, ge=1, description="H: inner steps between two exchanges of the whole model.")
    pace: Literal["steps", "time"] = Field(
        default="steps",
        description="steps: every peer makes sync_every inner steps; time: the fastest does, and the others as many as "
        "they can in that time, at least one. For mode=sync.",
    )
    num_fragments: int = Field(
        default=1,
        ge=1,
        description="Fragments that the model is sent in, one every sync_every/num_fragments steps.",
    )
    fragment_layout: Literal["contiguous", "strided"] = Field(
        default="contiguous",
        description="How fragments lie over the layers: one after another, or interleaved.",
    )
    shard_elements: int = Field(
        default=2**20,
        ge=1,
        description="Elements of a shard, the unit of aggregation; a fragment is cut into these.",
    )
    overlap_steps: int = Field(
        default=0,
        ge=0,
        description="Inner steps that go on between sending a fragment and merging its result.",
    )
    merge: Literal["mix", "rebase"] = Field(
        default="mix",
        description="mix: weigh global and local values; rebase: keep the steps made since sending.",
    )
    merge_alpha: float | None = Field(
        default=None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="Share of the local value in merge=mix: 0 takes the global one, 1 keeps the local one; unset: "
        "0.5 with overlap_steps, else 0.",
    )
    codec: Codec = Field(default="bf16", description="How pseudo-gradients are written on the wire.")
    reply_codec: Codec | None = Field(
        default=None,
        description="How the averaged result is written on the wire, not as topk; unset: as codec where "
        "that is fp32, bf16 or fp16, else bf16.",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest",
        description="How pseudo-gradients are rounded; stochastic: at random, right on average. For codec=bf16.",
    )
    outer_optimizer: Annotated[str, StringConstraints(min_length=1)] = Field(
        default="sgd",
        description="The outer optimizer: sgd, or the name of an element-wise class of torch.optim.",
    )
    outer_options: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of an outer optimizer other than sgd, as JSON."
    )
    outer_lr: float = Field(default=0.7, ge=0, allow_inf_nan=False, description="Learning rate of the outer optimizer.")
    outer_momentum: float = Field(
        default=0.9, ge=0, lt=1, allow_inf_nan=False, description="Momentum of the outer optimizer."
    )
    nesterov: bool = Field(default=True, description="Whether the outer momentum is Nesterov's.")
    weighting: Literal["steps", "samples", "uniform"] = Field(
        default="steps",
        description="What a pseudo-gradient weighs: its inner steps, its reported samples, or 1. For mode=sync; in "
        "mode=async each counts one.",
    )
    min_peers: int = Field(
        default=1,
        ge=1,
        description="Contributions that an outer step needs at least, whoever is there. A floor: of those that take "
        "part it needs half anyway, and two.",
    )
    start_peers: int = Field(
        default=1, ge=1, description="Contributions that the first outer step of a run needs at least."
    )
    round_timeout: Seconds = Field(
        default=600.0,
        description="Seconds that an outer step waits for contributions before it goes on with a quorum. For "
        "mode=sync.",
    )
    pause_timeout: Seconds = Field(
        default=60.0,
        description="Seconds that the others wait for a peer that pauses, to evaluate or to save. For mode=sync.",
    )
    heartbeat_interval: Seconds = Field(default=1.0, description="Seconds between two probes of other peers.")
    heartbeat_timeout: Seconds = Field(
        default=10.0, description="Seconds of silence after which a peer is taken for dead."
    )
    successors: int = Field(
        default=1,
        ge=0,
        description="Peers that hold a commit before its submitter is answered, and take over when the aggregator "
        "fails. For mode=async.",
    )
    dn_buffer_size: int = Field(
        default=0,
        ge=0,
        description="Submissions in the Delayed Nesterov buffer; 0 or 1: no delay. For mode=async.",
    )
    dn_variant: Literal["paper", "buffered"] = Field(
        default="paper",
        description="Which form of Delayed Nesterov: spread over submissions, or on the last one. For mode=async.",
    )
    dylu: bool = Field(
        default=False,
        description="Dynamic local updates: slower peers make fewer inner steps. For mode=async.",
    )
    async_grace: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a submission waits to be averaged with others; 0: none. For mode=async.",
    )
    max_staleness: int | None = Field(
        default=None, ge=0, description="Epochs that a submission may be behind; unset: any. For mode=async."
    )
    carry_rounds: int = Field(
        default=2,
        ge=0,
        description="Rounds that a peer's progress may miss, riding in each next contribution, before it is dropped. "
        "For mode=sync.",
    )
    stop_after_epochs: int | None = Field(
        default=None, ge=1, description="Outer steps after which the run ends for all; unset: never."
    )
    stop_after_samples: int | None = Field(
        default=None,
        ge=1,
        description="Samples over the whole run after which it ends for all; unset: never.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._is_in_this_version()
        if self.sync_every % self.num_fragments:
            below = self.sync_every - self.sync_every % self.num_fragments or self.num_fragments
            raise ConfigError(
                f"is not a multiple of num_fragments={self.num_fragments}",
                key="sync_every",
                value=self.sync_every,
                mend=f"choose e.g. sync_every={below}",
            )
        interval = self.sync_every // self.num_fragments
        if self.overlap_steps > interval:
            raise ConfigError(
                f"is more than the {interval} steps between two fragments (sync_every / num_fragments)",
                key="overlap_steps",
                value=self.overlap_steps,
                mend=f"choose at most {interval}",
            )
        if self.merge == "rebase" and self.merge_alpha:
            raise ConfigError(
                "has no meaning for merge=rebase", key="merge_alpha", value=self.merge_alpha, mend="leave it out"
            )
        if self.heartbeat_timeout <= self.heartbeat_interval:
            raise ConfigError(
                f"leaves no time for a probe every heartbeat_interval={self.heartbeat_interval} seconds",
                key="heartbeat_timeout",
                value=self.heartbeat_timeout,
                mend="choose several times the interval",
            )
        if self.reply_codec == "topk":
            raise ConfigError(
                "leaves most of an averaged result out, for good: nobody keeps it for the next",
                key="reply_codec",
                value=self.reply_codec,
                mend="choose bf16, or leave it out",
            )
        if self.rounding == "stochastic" and self.codec != "bf16":
            raise ConfigError(
                f"is for codec=bf16, and codec is {self.codec}",
                key="rounding",
                value=self.rounding,
                mend="choose codec=bf16, or leave it out",
            )
        self._fits_the_mode()
        return self

    def _fits_the_mode(self) -> None:
        """Refuse what would be left unused without a word, and what Delayed Nesterov is not defined for."""
        for mode, keys in ONLY_IN.items():
            for key in keys if mode != self.mode else ():
                value = getattr(self, key)
                if value != type(self).model_fields[key].default:
                    mend = f"choose mode={mode}, or leave it out"
                    raise ConfigError(f"is for mode={mode}, and mode is {self.mode}", key=key, value=value, mend=mend)
        if self.mode == "async" and self.weighting == "samples":
            raise ConfigError(
                "has no meaning for mode=async: each submission counts one",
                key="weighting",
                value=self.weighting,
                mend="choose mode=sync, or leave it out (dylu evens unlike speeds out)",
            )
        if self.dn_buffer_size > 1 and (self.outer_optimizer != "sgd" or not self.nesterov):
            raise ConfigError(
                "is for outer_optimizer=sgd with nesterov",
                key="dn_buffer_size",
                value=self.dn_buffer_size,
                mend="use those, or dn_buffer_size=0",
            )
        if self.dn_variant != "paper" and self.dn_buffer_size < 2:
            raise ConfigError(
                f"needs a buffer of 2 or more, and dn_buffer_size is {self.dn_buffer_size}",
                key="dn_variant",
                value=self.dn_variant,
                mend="set dn_buffer_size to the number of peers, or leave it out",
            )

    @property
    def local_share(self) -> float:
        """`merge_alpha`, or what it is where that is unset; docs/decisions/0013-alpha-follows-overlap.md has why."""
        if self.merge_alpha is not None:
            return self.merge_alpha
        return 0.5 if self.overlap_steps and self.merge == "mix" else 0.0

    def doubts(self) -> list[str]:
        """What trained worse than one peer alone where it was measured (docs/results.md): a sentence each, with the
        mend.
        """
        found = []
        if self.overlap_steps == self.sync_every:
            found.append(
                f"overlap_steps={self.overlap_steps} merges the whole model as late as its next sending, which was "
                "measured to train worse than one peer alone; use at most a quarter of sync_every, or more "
                "fragments"
            )
        if self.codec == "topk":
            found.append(
                "codec=topk sends a 64th of the elements, which was measured to train worse than one peer alone in "
                "short runs, most of all with outer momentum; use int4 or e3m0, or a long run with outer_momentum=0"
            )
        momentum = self.outer_momentum if self.outer_optimizer == "sgd" else 0.0
        if self.mode == "async" and momentum > MOMENTUM_OF_EACH_MAX and self.dn_buffer_size < 2:
            found.append(
                f"mode=async moves outer_momentum={momentum:g} with every submission, each of another age, which was "
                "measured to carry the model of three peers away; use dn_buffer_size with the number of peers, or a "
                "lower momentum"
            )
        return found

    def to_wire(self) -> dict[str, Any]:
        """Every field as plain values that msgpack and JSON carry."""
        return self.model_dump(mode="json")

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The settings that `to_wire` wrote, on this peer or another; all of its fields count as given.

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
        """32 hex digits that are equal where all that may not change while running is equal.

        The first 128 bits of SHA-256 over the canonical JSON (sorted keys, no spaces) of all fields but
        `LIVE_KEYS`.
        """
        lasting = {key: value for key, value in self.to_wire().items() if key not in LIVE_KEYS}
        canonical = json.dumps(lasting, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    def difference(self, other: RunConfig, keys: Collection[str] | None = None) -> list[tuple[str, object, object]]:
        """(key, the other's value, this one's) wherever the two differ in what may not change while running.

        A joiner asks for its given `keys` alone: ``mine.difference(runs, mine.given)``; None compares all.
        """
        theirs, mine = other.to_wire(), self.to_wire()
        asked = [key for key in mine if key not in LIVE_KEYS and (keys is None or key in keys)]
        return [(key, theirs[key], mine[key]) for key in asked if theirs[key] != mine[key]]


class PeerConfig(Settings):
    """What each peer chooses for itself; no two peers of a run need to have the same.

    Raises:
        ConfigError: a value that can't be used, with the key, the value and the mend.
        AddressError: an address that can't be read.
    """

    run_id: Label = Field(default="main", description="The run to join; whoever comes first founds it.")
    initial_peers: tuple[str, ...] = Field(
        default=(),
        description="Addresses of bootstraps or peers to join through, as their join line has them.",
    )
    name: Label | None = Field(
        default=None, description="How this peer is called in status and logs; unset: the host's name."
    )
    role: Literal["worker", "aggregator", "observer"] = Field(
        default="worker",
        description="worker: trains and aggregates; aggregator: trains nothing; observer: only looks.",
    )
    host_maddrs: tuple[str, ...] = Field(
        default=(),
        description="Addresses to listen on; unset: loopback if all initial peers are, else every interface.",
    )
    announce_maddrs: tuple[str, ...] = Field(
        default=(), description="Addresses that others are told to dial; unset: the ones listened on."
    )
    identity_path: Path | None = Field(
        default=None,
        description="File that keeps this peer's identity across restarts; unset: a new one each time.",
    )
    client_mode: bool = Field(
        default=False,
        description="Take no incoming connections: such a peer contributes but never aggregates.",
    )
    direct: bool = Field(
        default=True,
        description="Send payloads over TLS connections of our own where one can be made; else all goes over libp2p.",
    )
    direct_port: int = Field(
        default=0, ge=0, le=65535, description="TCP port for direct connections; 0: the system chooses one."
    )
    checkpoint_dir: Path | None = Field(default=None, description="Folder for checkpoints; unset: none are kept.")
    save_every: int = Field(default=10, ge=1, description="Outer steps between two checkpoints.")
    keep: int = Field(default=2, ge=1, description="Checkpoints to keep; older ones are deleted.")
    from_checkpoint: Path | None = Field(default=None, description="Checkpoint folder to start from.")
    new_generation: bool = Field(
        default=False,
        description="Found the run anew from from_checkpoint, even if the run has gone further.",
    )
    restart_wait: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=30.0,
        description="Seconds to wait, after a start from a checkpoint, for as many peers as the last round had.",
    )
    wait_timeout: Seconds = Field(
        default=300.0, description="Seconds to wait for the run to be founded, for its state, and for start_peers."
    )

    @field_validator("initial_peers")
    @classmethod
    def _can_be_dialled(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_peer_address(address) for address in split_addresses(addresses))

    @field_validator("host_maddrs", "announce_maddrs")
    @classmethod
    def _can_be_listened_on(cls, addresses: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        key = cast(str, info.field_name)
        return tuple(check_listen_address(address, key=key) for address in split_addresses(addresses))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._is_in_this_version()
        if self.new_generation and self.from_checkpoint is None:
            raise ConfigError(
                "needs a checkpoint to start from",
                key="new_generation",
                value=self.new_generation,
                mend="give from_checkpoint too",
            )
        return self


def is_optional(annotation: object) -> bool:
    """Whether a field may be unset (its type allows None)."""
    return type(None) in get_args(annotation)


def bare_type(annotation: object) -> object:
    """A field's type without its limits and without None: tuple, dict, bool, int, float, str, Path or
    Literal.
    """
    if get_origin(annotation) in (Union, types.UnionType):
        return bare_type(next(arg for arg in get_args(annotation) if arg is not type(None)))
    if get_origin(annotation) is Annotated:
        return bare_type(get_args(annotation)[0])
    return get_origin(annotation) or annotation


def unknown_setting(
    key: str, value: object, known: Collection[str], spelled: Callable[[str], str] = str
) -> ConfigError:
    """The error for a key that is no setting, with the one that was probably meant, both `spelled` as the
    user would."""
    close = get_close_matches(key, known, n=1)
    mend = f"did you mean {spelled(close[0])}?" if close else "leave it out"
    return ConfigError("is not a setting", key=spelled(key), value=value, mend=mend)


def _table(key: str, text: str) -> object:
    """A table written as JSON, as flags and environment variables have it."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        mend = 'write it like {"betas": [0.9, 0.95]}'
        raise ConfigError("is not JSON", key=key, value=text, mend=mend) from None


def _explained(model: type[BaseModel], error: ErrorDetails) -> P2PDilocoError:
    """One of pydantic's errors as a sentence that names the key, the value and the mend."""
    key = str(error["loc"][0]) if error["loc"] else ""
    value, limits = error["input"], error.get("ctx", {})
    if error["type"] == "extra_forbidden":
        return unknown_setting(key, value, tuple(model.model_fields))
    default = model.model_fields[key].get_default(call_default_factory=True) if key else None
    mend = (
        f"choose e.g. the default, {shown(default)}" if default not in (None, (), {}) else "leave it out or correct it"
    )
    match error["type"]:
        case "greater_than_equal":
            wrong = f"must be at least {limits['ge']}"
        case "greater_than":
            wrong = f"must be more than {limits['gt']}"
        case "less_than_equal":
            wrong = f"must be at most {limits['le']}"
        case "less_than":
            wrong = f"must be less than {limits['lt']}"
        case "literal_error":
            wrong, mend = "is not known", f"choose {limits['expected']}".replace("'", "")
        case "int_parsing" | "int_from_float" | "int_type":
            wrong = "is not a whole number"
        case "float_parsing" | "float_type":
            wrong = "is not a number"
        case "finite_number":
            wrong = "is not a finite number"
        case "bool_parsing" | "bool_type":
            wrong, mend = "is neither on nor off", "choose true or false"
        case "string_pattern_mismatch":
            wrong = "is not a name that can be used"
            mend = "use up to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit"
        case _:
            wrong = f"can't be used ({error['msg'].lower()})"
    return ConfigError(wrong, key=key, value=value, mend=mend)
