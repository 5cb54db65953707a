"""A run's record in the DHT: its settings, and what identifies its model.

Law: bytes and values only. It loads no torch, so that a run can be looked at and changed without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgpack

from p2p_diloco.errors import ConfigError
from p2p_diloco.net.interface import CONTENT_BYTES_MAX
from p2p_diloco.node.board import Board, Count, Measure, packed, read
from p2p_diloco.node.board import pack as pack_record
from p2p_diloco.node.board import unpack as unpack_record

if TYPE_CHECKING:
    from p2p_diloco.node.run import Run
    from p2p_diloco.tensors.layout import Layout

Config = Mapping[str, Any]
"""The run's settings, as `RunConfig.to_wire` encodes them."""
BOARD = Board("config", ttl_s=60.0)
LEVELS_MAX = 8
"""The most lists and maps in each other that a run's settings may have."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run's DHT record, `cut` is the hash of the layout with its fragments and slices, and
    `model` the hash of the parameters alone. `time` is the time of the run's founding, in seconds since 1970."""

    config: Config
    model: str
    cut: str
    slices: Count
    numel: Count
    params: Count
    founder: str
    time: Measure
    frozen: str = ""
    """The fingerprint of the founder's frozen values; empty if it has none."""

    def __post_init__(self) -> None:
        if not _is_shallow(self.config, LEVELS_MAX):
            raise ValueError("its settings are nested too deeply")

    @classmethod
    def founding(cls, run: Run, founder: str, time: float, frozen: str = "") -> RunRecord:
        """Make the record of a run that is being founded."""
        layout = run.layout
        slices, params = len(layout.slices), len(layout.params)
        return cls(
            run.config.to_wire(),
            layout.fingerprint(),
            cut_of(layout),
            slices,
            layout.numel,
            params,
            founder,
            time,
            frozen,
        )

    def pack(self, sign: Callable[[bytes], bytes] | None = None) -> bytes:
        """Encode the record. The hash of these bytes is the record's name. `sign`: signs them; None in an open run.

        Raises:
            ConfigError: the settings don't fit into a record.
        """
        value = pack_record(self)
        if len(value) > CONTENT_BYTES_MAX:
            options = self.config.get("outer_options")
            raise ConfigError("is too long for a run's record", key="outer_options", value=options, mend="shorten it")
        return packed([value, b"" if sign is None else sign(value)])

    @classmethod
    def unpack(cls, value: bytes) -> RunRecord:
        """Decode a record that `pack` encoded. Raises ValueError for anything else."""
        try:
            return unpack_record(cls, signature_of(value)[0])
        except ValueError as error:
            raise ValueError(f"these bytes are not a run's record: {error}") from None


def signature_of(value: bytes) -> tuple[bytes, bytes]:
    """Split a run's record into its content and the signature of that; empty if the record has none.

    Raises:
        ValueError: the bytes are no record.
    """
    return read(tuple[bytes, bytes], value)


def cut_of(layout: Layout) -> str:
    """Hash a layout to 32 hex digits. Layouts with the same parameters, buffers, fragments and slices have the same
    hash, even if their dtypes differ."""
    bare = {
        "params": [[spec.name, list(spec.shape)] for spec in layout.params],
        "buffers": [[spec.name, list(spec.shape)] for spec in layout.buffers],
    }
    cut = {**layout.to_wire(), **bare}
    return blake2b(msgpack.packb(cut), digest_size=16).hexdigest()


def _is_shallow(value: object, levels: int) -> bool:
    """Whether a value has at most so many lists and maps in each other. Python can't print a thousand of them."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is None or (levels > 0 and all(_is_shallow(one, levels - 1) for one in inner))
