"""Imports the parts of Hivemind that this package uses. That loads torch, which takes seconds, so import this file only
where the network is needed.

Law: the only file that imports Hivemind; it leaves this process's logging as it was.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

# Hivemind's averager imports scipy.optimize, which is not used here and costs a sixth of the import's time and 36 MB of
# memory. So Hivemind gets an empty module. Code that imports scipy.optimize later gets the real one.
_EMPTY = ModuleType("scipy.optimize")
sys.modules.setdefault(_EMPTY.__name__, _EMPTY)
try:
    from hivemind.dht import DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.dht.validation import DHTRecord
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.proto import dht_pb2
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
finally:
    if sys.modules.get(_EMPTY.__name__) is _EMPTY:
        del sys.modules[_EMPTY.__name__]

__all__ = [
    "P2P", "DHTLocalStorage", "DHTNode", "DHTProtocol", "DHTRecord", "DictionaryDHTValue", "Multiaddr",
    "P2PDaemonError", "PeerID", "StreamInfo", "dht_pb2",
]  # fmt: skip

log = logging.getLogger(__name__)


class _Relay(logging.Handler):
    """Passes Hivemind's warnings on to this package's log."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, "hivemind: %s", record.getMessage())


def _restore_logging() -> None:
    """Undo the changes that importing Hivemind makes to this process's logging."""
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    theirs = logging.getLogger("hivemind")
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False
    theirs.addHandler(_Relay())


_restore_logging()
