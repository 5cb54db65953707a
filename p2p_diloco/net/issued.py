"""The list of a run's invitations and revocations, kept in a file beside the run key.

Law: one file, which only the owner of the run key needs. The list shows which grants were given under a name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from p2p_diloco.errors import ConfigError
from p2p_diloco.net import private_files
from p2p_diloco.net.grants import Grant, RunKey

UNKNOWN = "unknown"
"""The name of a grant that was revoked by its id and is not in this file, but in another one."""
_NEVER = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One invitation. `id`: the grant's id, in hex; `expires`: seconds since 1970; `peer`: the only peer that may use
    the grant, None: any peer; `revoked`: the number of the first list of revocations with this grant, None: valid."""

    id: str
    name: str
    role: str
    expires: int
    peer: str | None = None
    revoked: int | None = None


class Issued:
    """The list in a file; `save` writes it."""

    def __init__(self, path: Path, entries: Iterable[Entry] = ()) -> None:
        self.path, self.entries = path, list(entries)

    @classmethod
    def beside(cls, key_file: Path) -> Issued:
        """Read the list beside a run key; an empty one if there is none.

        Raises:
            ConfigError: the file can't be read.
        """
        path = key_file.with_suffix(".issued")
        if not path.exists():
            return cls(path)
        names = {field.name for field in fields(Entry)}
        try:
            found = json.loads(private_files.read(path, key="issued"))
            return cls(path, [Entry(**{name: entry[name] for name in names & entry.keys()}) for entry in found])
        except (TypeError, ValueError, AttributeError, RecursionError):
            mend = "move it away: `p2p-diloco revoke` takes the ids of grants, too"
            raise ConfigError("is no list of invitations", key="issued", value=path, mend=mend) from None

    def add(self, grant: Grant) -> None:
        self.entries.append(Entry(grant.id.hex(), grant.name, grant.role, grant.expires, grant.peer))

    def valid(self, name: str, now: float) -> bool:
        """Whether an invitation of this name is neither revoked nor expired."""
        return any(entry.name == name and entry.revoked is None and entry.expires > now for entry in self.entries)

    def ids_of(self, name: str) -> list[bytes]:
        return [bytes.fromhex(entry.id) for entry in self.entries if entry.name == name]

    def revoke(self, ids: Iterable[bytes], number: int) -> None:
        """Mark grants as revoked by the list with this number. A grant that isn't in this file is added."""
        gone = {id.hex() for id in ids}
        for id in gone - {entry.id for entry in self.entries}:
            self.entries.append(Entry(id, UNKNOWN, "", _NEVER))
        self.entries = [
            replace(entry, revoked=number) if entry.id in gone and entry.revoked is None else entry
            for entry in self.entries
        ]

    def revocations(self, key: RunKey, banned: Iterable[bytes], now: float) -> tuple[int, bytes] | None:
        """The newest list of revocations, with its number. It has the grants revoked in this file and those that an
        earlier list has `banned`, except expired ones. None: nothing was revoked here.

        Raises:
            ConfigError: the list is too long.
        """
        revoked = [(entry.revoked, bytes.fromhex(entry.id)) for entry in self.entries if entry.revoked is not None]
        if not revoked:
            return None
        expired = {bytes.fromhex(entry.id) for entry in self.entries if entry.expires <= now}
        number = max(number for number, _ in revoked)
        return number, key.sign_revocations(number, {*banned, *(id for _, id in revoked)} - expired)

    def save(self) -> None:
        """Write the list, completely or not at all.

        Raises:
            ConfigError: it can't be written.
        """
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        private_files.write_new(
            part, json.dumps([asdict(entry) for entry in self.entries], indent=1) + "\n", key="issued"
        )
        part.replace(self.path)
