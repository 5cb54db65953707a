"""A peer's access to a private run: its membership, and the run key if this machine has the key's file.

Law: works on keys and bytes only. The run key signs the run's record, so that no member can replace the record with
one of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.membership import Membership
from p2p_diloco.node.run_record import RunRecord, signature_of

_KIND = b"run record"


@dataclass(frozen=True, slots=True)
class Access:
    """A private run's membership, and its run key. `key`: None on all machines but the founder's."""

    member: Membership
    key: RunKey | None = None

    def signed(self, run_id: str, record: RunRecord) -> bytes:
        """Encode a run's record, signed with the run key."""
        assert self.key is not None, "only a peer that has the run key founds the run"
        key = self.key
        return record.pack(lambda content: key.sign(_KIND, _statement(run_id, content)))

    def founded_by_the_key(self, run_id: str, value: bytes) -> bool:
        """Whether the run key signed this record of the run. `value` may be any bytes."""
        try:
            content, signature = signature_of(value)
        except ValueError:
            return False
        return self.member.by_the_run_key(_KIND, _statement(run_id, content), signature)


def _statement(run_id: str, content: bytes) -> bytes:
    return run_id.encode() + b"\0" + content
