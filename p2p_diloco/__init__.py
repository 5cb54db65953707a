"""Decentralised DiLoCo: peers train one model on their own data and agree on an outer step now and then.

Law: this file only lists the public names and their modules. Importing the package imports neither torch nor hivemind;
each name is imported when it is first used, so that `p2p-diloco --help` answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2p_diloco.config import PeerConfig as PeerConfig
    from p2p_diloco.config import RunConfig as RunConfig
    from p2p_diloco.peer import Peer as Peer
    from p2p_diloco.tensors.layout import FragmentPlan as FragmentPlan

__version__ = "0.1.0"

_ERRORS = (
    "AddressError", "CheckpointError", "ConfigError", "ConfigMismatch", "GaveUpWaiting", "ModelMismatch",
    "NoBootstrapReached", "NodeDied", "P2PDilocoError", "RankDied", "Refused", "UsageError",
)  # fmt: skip
_HOME = {
    "Peer": "p2p_diloco.peer",
    "RunConfig": "p2p_diloco.config",
    "PeerConfig": "p2p_diloco.config",
    "FragmentPlan": "p2p_diloco.tensors.layout",
    **dict.fromkeys(_ERRORS, "p2p_diloco.errors"),
}
"""Each public name and the module that defines it."""

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first used (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        from p2p_diloco.errors import left_out

        if (missing := left_out(error)) is None:
            raise
        raise missing from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, for tools that complete names."""
    return sorted(__all__)
