"""What all peers of a run agree on (`RunConfig`), and what each chooses for itself (`PeerConfig`).

Law: values, their units, their limits, and nothing else. Every field is documented with unit and default, because
flags, environment variables, TOML keys and help are all made from it. An unknown setting is refused, never ignored.
"""

from p2p_diloco.config.base import Settings, bare_type, is_optional, unknown_setting
from p2p_diloco.config.peer import PeerConfig
from p2p_diloco.config.run import LIVE_KEYS, RunConfig

__all__ = ["LIVE_KEYS", "PeerConfig", "RunConfig", "Settings", "bare_type", "is_optional", "unknown_setting"]
