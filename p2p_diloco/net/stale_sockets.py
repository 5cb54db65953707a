"""The folder of the daemons' control sockets, /tmp: checks it, and removes the sockets that killed daemons have left.

Law: removes a socket only if nothing listens on it. A daemon that is killed can't remove its own, so a machine on which
peers die would collect them without end.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

from p2p_diloco.errors import P2PDilocoError, reason

FOLDER = Path("/tmp")  # noqa: S108
"""Where Hivemind has p2pd make its sockets, whatever TMPDIR says."""
DAEMONS, CLIENTS = "hivemind-p2pd-", "hivemind-p2pclient-"
"""How the names of the two sockets of one daemon begin; both end with the same letters."""
YOUNG_S = 60.0
"""A younger socket is left alone: its daemon may not listen yet."""
LOOKED_AT_MAX = 1000
"""The most sockets that one call looks at."""


def check_writable(folder: Path = FOLDER) -> None:
    """Raise P2PDilocoError if this user can't make a file in the folder: no daemon would start."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            what, mend = (
                f"no further file can be opened ({reason(error)})",
                "allow more open files, e.g. ulimit -n 1024",
            )
            raise P2PDilocoError(what, mend=mend) from None
        mend = "let this user write there (docker run --tmpfs /tmp; in Kubernetes an emptyDir at /tmp)"
        what = f"{folder} can't be written ({reason(error)}), and libp2p's daemon has its sockets there"
        raise P2PDilocoError(what, mend=mend) from None


def sweep(folder: Path = FOLDER) -> int:
    """Remove this user's sockets of daemons that are gone, and return how many daemons these were."""
    removed = 0
    for path in islice(folder.glob(f"{DAEMONS}*.sock"), LOOKED_AT_MAX):
        if is_stale(path):
            for name in (path.name, CLIENTS + path.name.removeprefix(DAEMONS)):
                with suppress(OSError):
                    (folder / name).unlink()
            removed += 1
    return removed


def is_stale(path: Path) -> bool:
    """Whether nothing listens on this socket of this user, which is old enough to be judged."""
    try:
        found = path.lstat()
    except OSError:  # its daemon has just removed it
        return False
    mine = stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()
    if not mine or time.time() - found.st_mtime < YOUNG_S:
        return False
    with socket.socket(socket.AF_UNIX) as end:
        end.setblocking(False)
        try:
            end.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it listens, and is busy
            return False
    return False
