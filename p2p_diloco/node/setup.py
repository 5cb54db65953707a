"""The first message of a peer to its node: its settings, and its model's parameters and buffers.

Law: holds plain values that cross the channel, and answers only questions that follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.tensors.layout import ParamSpec

SAVE_S_MAX = 30.0
"""Seconds that a departing peer waits for a checkpoint that is being written. It is here, and not in `saving`, because
the trainer uses it too, and would load the whole protocol with `saving`."""

Specs = tuple[ParamSpec, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a peer tells its node at the start. `asked`: the run settings that the peer was given. `local`: the peer's
    own settings. `specs`: the model's parameters; None for a peer without a model. `frozen`: the fingerprint of the
    model's frozen values; empty if it has none. `card`: the model's packed card; empty if it has none. `buffers`: the
    model's buffers that are exchanged (`tensors.buffers`), unless the run keeps them local."""

    asked: RunConfig
    local: PeerConfig
    specs: Specs | None
    frozen: str = ""
    card: bytes = b""
    buffers: Specs = ()

    @property
    def numel(self) -> int:
        """The number of elements of the model's parameters and buffers."""
        return sum(spec.numel for spec in (*(self.specs or ()), *self.buffers))

    @property
    def can_found(self) -> bool:
        """Whether this peer has what a founder needs: a model."""
        return self.specs is not None and self.local.role == "worker"

    def is_told_to_found(self, settings: RunConfig) -> bool:
        """Whether this peer founds the run if there is none. `settings`: the run settings that this peer was given, or
        those of its checkpoint. A peer with initial peers and none of these waits for another founder: otherwise it
        might found the run with the defaults just before the peer that has the settings."""
        local = self.local
        return local.found or bool(settings.given) or local.from_checkpoint is not None or not local.initial_peers

    def to_wire(self) -> dict[str, Any]:
        return {
            "asked": self.asked.model_dump(mode="json", exclude_unset=True),
            "local": self.local.model_dump(mode="json", exclude_unset=True),
            "frozen": self.frozen,
            "card": self.card,
            "specs": self.specs,
            "buffers": self.buffers,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Setup:
        settings = {"asked": RunConfig(**wire["asked"]), "local": PeerConfig(**wire["local"])}
        specs = msgspec.convert([wire["specs"], wire["buffers"]], tuple[Specs | None, Specs])
        return cls(**{**wire, **settings, "specs": specs[0], "buffers": specs[1]})
