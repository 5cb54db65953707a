"""The values of a report: findings, links to peers, and the report that holds both.

Law: values only; nothing is checked or drawn here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

SCHEMA_VERSION = 1

Verdict = Literal["ok", "warn", "bad"]
"""ok: as it should be; warn: a run works, but perhaps not as wished; bad: must be mended."""

ORDER = (
    "versions",
    "p2pd",
    "memory",
    "disk",
    "port",
    "initial peer",
    "clock",
    "transfer",
    "NAT",
    "reachable",
    "peers",
    "direct",
    "doctor",
)
"""The names of all findings, in the order in which findings of the same verdict are shown. Bad findings come first, ok
ones last."""
_RANK = {"bad": 0, "warn": 1, "ok": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check: what was found and, if something is wrong, what to do about it."""

    name: str
    verdict: Verdict
    text: str
    mend: str = ""

    def __post_init__(self) -> None:
        assert self.name in ORDER
        assert bool(self.mend) == (self.verdict != "ok"), "what is wrong has a mend, and what is well needs none"


@dataclass(frozen=True, slots=True)
class Link:
    """The link to one peer, as measured. `rtt_s`: seconds until a small message was answered. A value is None if it was
    not measured."""

    peer_id: str
    name: str
    """The peer's name in its run; "initial peer" if it has none."""
    address: str
    """The multiaddr at which the peer was reached, without its peer id."""
    rtt_s: float | None = None
    rate: float | None = None
    """Bytes a second to the peer, in one transfer over libp2p."""
    way: str | None = None
    """The path that payloads to the peer take: "direct", "libp2p" or "relayed"."""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings and links. Bad findings come first, then warnings, then those that are ok. `took_s`: how long the
    checks took."""

    findings: tuple[Finding, ...]
    links: tuple[Link, ...]
    took_s: float

    @classmethod
    def of(cls, findings: Iterable[Finding], links: Iterable[Link], took_s: float) -> Report:
        """Make a report from findings and links, and put them in order."""
        ordered = sorted(findings, key=lambda finding: (_RANK[finding.verdict], ORDER.index(finding.name)))
        return cls(tuple(ordered), tuple(sorted(links, key=lambda link: (link.name, link.peer_id))), took_s)

    def count(self, verdict: Verdict) -> int:
        return sum(finding.verdict == verdict for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 if something must be mended, else 0."""
        return int(self.count("bad") > 0)

    def to_json(self) -> str:
        content = {
            "schema_version": SCHEMA_VERSION,
            "well": self.exit_code == 0,
            "took_s": round(self.took_s, 3),
            "findings": [asdict(finding) for finding in self.findings],
            "links": [asdict(link) for link in self.links],
        }
        return json.dumps(content, ensure_ascii=False, indent=2)
