"""Imports the parts of Hivemind that this package uses: its DHT, and its client of p2pd.

Law: the only file that imports Hivemind; it leaves this process's logging as it was, and loads neither torch nor numpy.

Importing Hivemind as a whole loads its averager, its optimizers and torch, which takes seconds and 200 MB. So its
package, and the modules in `_LATER`, are loaded only once somebody asks for one of their names. Nobody does in this
package; other code in this process gets the whole library as usual.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType

_LATER = {
    "hivemind.utils": {
        "MPFuture": "mpfuture",
        "TensorDescriptor": "tensor_descr",
        "BatchTensorDescriptor": "tensor_descr",
    },
    "hivemind.dht": {"DHT": "dht"},
}
"""By package: its names that are loaded later, each with the module that defines it."""


def _package_without_its_content() -> None:
    """Make Hivemind's package known, so that its modules can be imported. Its own file runs at the first question for
    one of its names."""
    spec = find_spec("hivemind")
    if spec is None or spec.loader is None:
        return  # the import below says that Hivemind is missing
    loader, package = spec.loader, module_from_spec(spec)

    def load(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module 'hivemind' has no attribute {name!r}")
        if (module := sys.modules.get(f"hivemind.{name}")) is not None:
            return module  # while it is imported, it is no attribute yet
        vars(package).pop("__getattr__", None)
        loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__getattr__"] = load
    sys.modules["hivemind"] = package


def _stand_ins() -> dict[str, ModuleType]:
    """Modules, by name, in place of those in `_LATER`."""
    found: dict[str, ModuleType] = {}
    for package, names in _LATER.items():
        for name, home in names.items():
            module = found.setdefault(f"{package}.{home}", ModuleType(f"{package}.{home}"))
            setattr(module, name, None)
    return found


def _ask_later(package: ModuleType, homes: dict[str, str]) -> None:
    """Have a package load these names at the first question for one."""

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{package.__name__}.{homes[name]}"), name)

    for name in homes:
        vars(package).pop(name, None)
    vars(package)["__getattr__"] = load


# Hivemind makes a lock on import, which nobody here takes. One for several processes needs /dev/shm, which containers
# may lack, and from Python 3.14 on a process that watches it.
_lock_of_processes, multiprocessing.Lock = multiprocessing.Lock, threading.Lock  # type: ignore[assignment]
_IS_FIRST = "hivemind" not in sys.modules
if _IS_FIRST:
    _package_without_its_content()
    sys.modules.update(_stand_ins())
from hivemind.dht import DHTNode  # noqa: E402
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue  # noqa: E402
from hivemind.dht.validation import DHTRecord  # noqa: E402
from hivemind.p2p import P2P, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils.logging import use_hivemind_log_handler  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402

multiprocessing.Lock = _lock_of_processes
if _IS_FIRST:
    for _name in _stand_ins():
        del sys.modules[_name]
    for _package, _homes in _LATER.items():
        _ask_later(sys.modules[_package], _homes)

__all__ = [
    "DHTID", "P2P", "DHTLocalStorage", "DHTNode", "DHTProtocol", "DHTRecord", "DictionaryDHTValue", "Multiaddr",
    "P2PDaemonError", "PeerID", "StreamInfo", "dht_pb2",
]  # fmt: skip

log = logging.getLogger(__name__)


class _Relay(logging.Handler):
    """Passes Hivemind's warnings on to this package's log. What its daemon says of its own sockets when it is asked to
    end is no fault."""

    def emit(self, record: logging.LogRecord) -> None:
        ends = "use of closed network connection" in record.getMessage()
        log.log(logging.DEBUG if ends else record.levelno, "hivemind: %s", record.getMessage())


def _restore_logging() -> None:
    """Undo the changes that importing Hivemind makes to this process's logging."""
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    theirs = logging.getLogger("hivemind")
    theirs.setLevel(logging.WARNING)
    theirs.propagate = False
    theirs.addHandler(_Relay())


_restore_logging()
