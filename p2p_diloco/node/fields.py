"""The fields of messages in headers: by name, how each is written and what is accepted.

Law: one table for all messages, so a field of one name is the same everywhere; where it is not, a message says so in
`written`. Payloads and their hashes, and roots, are not written: who receives the payload computes them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from p2p_diloco.core import leases
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.version import ContributionId, ModelVersion, Version
from p2p_diloco.fragments.messages import Summary, What
from p2p_diloco.fragments.state import LINKS_MAX
from p2p_diloco.net.signing import SIGNATURE_BYTES
from p2p_diloco.node import forms as f

CHAIN_BYTES, HASH_BYTES = 16, 32
"""Lengths of the hashes of versions, choices and tensors; and of payloads."""
SLICES_MAX, FRAGMENTS_MAX = 4096, 4096
BANDWIDTH_MAX, SPEED_MAX, WEIGHT_MAX, RATE_MAX = 2.0**50, 2.0**40, 2.0**40, 1e9
LEFT_OUT = ("payload", "hash", "root")

COUNT, LIFE, POSITION = f.whole(), f.whole(2**62), f.whole(leases.POSITION_MAX)
CHAIN, KEY, HASHES = f.digest(CHAIN_BYTES), f.digest(CHAIN_BYTES, may_lack=True), f.digests(HASH_BYTES)
DIGESTS, SEAL, PEERS = f.digests(CHAIN_BYTES), f.octets(0, SIGNATURE_BYTES), f.several(f.PEER)
LINK, RATE, MAYBE = f.number(BANDWIDTH_MAX), f.maybe(f.number(RATE_MAX)), f.maybe(COUNT)
LINKS, HEADS = (f.several(f.pair(COUNT, CHAIN), most) for most in (LINKS_MAX, FRAGMENTS_MAX))

_BY_FORM = (
    ("fragment term attempt number epoch sequence samples generation candidates buffered led since saves", COUNT),
    ("incarnation life", LIFE),
    ("start stop next", POSITION),
    ("sync_every min_peers stop_after_epochs stop_after_samples", MAYBE),
    ("outer_lr outer_momentum", RATE),
    ("bandwidth link", LINK),
    ("eligible idle paused died fresh reachable", f.FLAG),
    ("holder leader author owner by peer", f.PEER),
    ("name fingerprint proof", f.text()),
    ("gone late successors", PEERS),
)
FIELDS: dict[str, f.Form] = {
    **{name: form for names, form in _BY_FORM for name in names.split()},
    "weight": f.number(WEIGHT_MAX), "speed": f.number(SPEED_MAX), "role": f.text(16), "grant": f.NAMED,
    "owners": f.several(f.PEER, SLICES_MAX),
    "key": CHAIN, "digest": CHAIN, "hashes": HASHES, "digests": DIGESTS, "seal": SEAL,
    "numbers": f.several(f.whole(SLICES_MAX), SLICES_MAX), "what": f.Form(What, f.same, f.same),
    "missing": f.several(f.pair(COUNT, PEERS), SLICES_MAX), "links": LINKS, "heads": HEADS,
    "sent": f.several(f.whole(least=-1), FRAGMENTS_MAX), "paced": f.pair(COUNT, COUNT),
    "awaits": f.several(f.pair(f.whole(FRAGMENTS_MAX), f.several(f.PEER, 64)), FRAGMENTS_MAX),
    "used": f.several(f.pair(POSITION, POSITION), leases.SPANS_MAX), "wants": f.whole(leases.WANTS_MAX),
    "length": f.whole(leases.LENGTH_MAX),
}  # fmt: skip


def written(kind: type[Any], tag: int | None = None, **own: f.Form) -> f.Form:
    """The form of a dataclass: its fields by `FIELDS`, but for its `own` ones."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in LEFT_OUT]
    return f.row(kind, {name: own.get(name) or FIELDS[name] for name in names}, tag)


VERSION = written(Version, samples=f.whole(2**48))
REVISION = written(Revision, number=COUNT)
FIELDS |= {"version": VERSION, "base": VERSION, "revision": REVISION}
FIELDS |= {"id": written(ContributionId), "oldest": written(ContributionId)}
FIELDS["data"] = written(leases.DataSet, epochs=f.whole(leases.EPOCHS_MAX))
FIELDS["uses"] = f.several(written(leases.Use), leases.TABLES_MAX)
FIELDS |= dict.fromkeys(("leases", "freed"), f.several(written(leases.Lease), 2 * leases.ENTRIES_MAX))
FIELDS["tables"] = f.several(written(leases.Table), leases.TABLES_MAX)
FIELDS["model"] = written(ModelVersion, generation=f.whole(least=-1), samples=LIFE, epochs=LIFE, digest=KEY)
FIELDS["summary"] = written(Summary, digests=f.several(f.several(f.pair(COUNT, CHAIN), 16), FRAGMENTS_MAX))
