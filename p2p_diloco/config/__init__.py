"""The settings: those that all peers of a run agree on (`RunConfig`), and those of each peer (`PeerConfig`).

Law: values, their units and their limits; nothing else. Every field has a description with its unit and a default,
because flags, environment variables, TOML keys and help are made from the fields. An unknown setting is refused, never
ignored.
"""

from p2p_diloco.config.base import Settings, bare_type, is_optional, meanings, unknown_setting
from p2p_diloco.config.peer import PeerConfig
from p2p_diloco.config.run import LIVE_KEYS, RunConfig

__all__ = [
    "LIVE_KEYS",
    "PeerConfig",
    "RunConfig",
    "Settings",
    "bare_type",
    "is_optional",
    "meanings",
    "unknown_setting",
]
