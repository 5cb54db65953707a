"""The values of an examination: what was seen, what was found, and the report, as a table or as JSON.

Law: values and their text; nothing is checked here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from p2p_diloco.addresses import host, is_loopback, peer_of, without_peer
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.observe.figures import UNKNOWN, bytes_of, figure

if TYPE_CHECKING:
    from p2p_diloco.net.reach import DialBack

SCHEMA_VERSION = 1
INITIAL = "initial peer"
"""The name of a peer that is not known in the run."""
PIPE_WIDTH = 10_000
"""Columns of the tables if the output is no terminal: each text is one line."""

Verdict = Literal["ok", "warn", "bad"]
"""ok: as it should be; warn: a run works, but perhaps not as wished; bad: must be mended."""
COLOURS: dict[Verdict, str] = {"bad": "bold red", "warn": "yellow", "ok": "green"}
"""The verdicts in the order in which findings are shown."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check found and, if something is wrong, what to do about it."""

    verdict: Verdict
    text: str
    mend: str = ""

    def __post_init__(self) -> None:
        assert bool(self.mend) == (self.verdict != "ok"), "what is wrong has a mend, and what is well needs none"


@dataclass(frozen=True, slots=True)
class Visit:
    """The result of visiting one peer. A value is None if it was not measured."""

    address: str
    """The multiaddr, with the peer's id."""
    unreached: str | None = None
    """Why the peer can't be reached; the other values are then unknown."""
    rtt_s: float | None = None
    """Seconds until a small question was answered."""
    clock_ahead_s: float | None = None
    """Seconds by which the peer's clock is ahead of this machine's."""
    trouble: Literal["stalls", "slow"] | None = None
    """stalls: not even 16 KiB pass; slow: these pass, but larger messages take too long."""
    rate: float | None = None
    """Bytes a second to the peer, in one transfer over libp2p."""
    name: str = INITIAL
    """The peer's name in its run."""
    way: str | None = None
    """The path that payloads to the peer take: "direct", "libp2p" or "relayed"."""

    @property
    def place(self) -> str:
        """The address without the peer's id."""
        return without_peer(self.address)

    def as_link(self) -> dict[str, object]:
        """What is shown of a peer that was reached."""
        return {
            "peer_id": peer_of(self.address), "name": self.name, "address": self.place, "rtt_s": self.rtt_s,
            "rate": self.rate, "way": self.way,
        }  # fmt: skip


@dataclass(slots=True)
class Seen:
    """The settings of a run and a peer, and what was found out so far."""

    peer: PeerConfig
    run: RunConfig = field(default_factory=RunConfig)
    parameters: int | None = None
    """How many parameters the model has; None: unknown."""
    ports: list[Found] = field(default_factory=list)
    listen: tuple[str, ...] = ()
    """The free multiaddrs at which this peer would listen; none in client mode."""
    answers: dict[str, str | None] = field(default_factory=dict)
    """Initial peer -> why it doesn't answer; None: it may."""
    visits: list[Visit] = field(default_factory=list)
    """Of the initial peers that may answer."""
    own: frozenset[str] = frozenset()
    """The IP addresses of this machine."""
    dialled_back: Mapping[str, DialBack] | None = None
    """Initial peer -> its answer. Peers that can't dial back are left out. None: they were not asked."""
    others: list[Visit] | None = None
    """Of the run's peers; None: none was visited."""
    private: list[str] = field(default_factory=list)
    """Names of the run's private peers, which are not visited."""
    left_out: int = 0
    """How many more peers of the run there are that were not visited."""

    @property
    def reached(self) -> list[Visit]:
        """The initial peers that answered."""
        return [each for each in self.visits if each.unreached is None]

    @property
    def outside(self) -> str | None:
        """The IP address at which others see this machine, if a NAT lies between: if it is not one of its own."""
        told = (answer.seen_at for answer in (self.dialled_back or {}).values())
        return next((host(at) for at in told if not is_loopback(at) and host(at) not in self.own), None)

    @property
    def tried(self) -> list[tuple[str, str | None]]:
        """The addresses at which the initial peers have dialled this peer, and why each failed; None: it did not."""
        return [each for answer in (self.dialled_back or {}).values() for each in answer.reached.items()]


@dataclass(frozen=True, slots=True)
class Report:
    """The name of each check with what it found, and the peers that were reached. `took_s`: how long it all took."""

    findings: tuple[tuple[str, Found], ...]
    links: tuple[Visit, ...]
    took_s: float

    @classmethod
    def of(cls, findings: Iterable[tuple[str, Found]], links: Iterable[Visit], took_s: float) -> Report:
        """Make a report in which bad findings come first, then warnings."""
        rank = list(COLOURS)
        ordered = sorted(findings, key=lambda finding: rank.index(finding[1].verdict))
        return cls(tuple(ordered), tuple(sorted(links, key=lambda link: (link.name, link.address))), took_s)

    def count(self, verdict: Verdict) -> int:
        return sum(found.verdict == verdict for _, found in self.findings)

    @property
    def exit_code(self) -> int:
        """1 if something must be mended, else 0."""
        return int(self.count("bad") > 0)

    def to_json(self) -> str:
        content = {
            "schema_version": SCHEMA_VERSION,
            "well": self.exit_code == 0,
            "took_s": round(self.took_s, 3),
            "findings": [{"name": name, **asdict(found)} for name, found in self.findings],
            "links": [link.as_link() for link in self.links],
        }
        return json.dumps(content, ensure_ascii=False, indent=2)

    def text(self) -> str:
        """The report for people: a headline, a table of findings with their mends, and a table of links."""
        bad, warn = self.count("bad"), self.count("warn")
        counted = [f"{bad} thing{'s' * (bad != 1)} must be mended"] * (bad > 0)
        counted += [f"{warn} warning{'s' * (warn != 1)}"] * (warn > 0)
        headline = f"p2p-diloco doctor: {', '.join(counted) or 'all is well'} ({self.took_s:.1f} s)"
        page: list[RenderableType] = [Text(headline, "bold"), "", self._table()]
        if self.links:
            page += ["", self._links()]
        console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
        with console.capture() as captured:
            console.print(Group(*page))
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def _table(self) -> Table:
        table = Table.grid("verdict", "name", Column(overflow="fold"), padding=(0, 2, 0, 0))
        for name, found in self.findings:
            text = Text(found.text)
            if found.mend:
                text.append("\nmend: ", "bold").append(found.mend, "not bold")
            table.add_row(Text(found.verdict, COLOURS[found.verdict]), name, text)
        return table

    def _links(self) -> Table:
        table = Table(box=None, pad_edge=False, title="links, as measured", title_justify="left")
        for title in ("peer", "address", "answer", "rate", "payloads"):
            table.add_column(title, justify="right" if title in ("answer", "rate") else "left", overflow="fold")
        for link in self.links:
            rtt_s = link.rtt_s
            rtt = figure(None if rtt_s is None else 1000 * rtt_s, ".0f" if (rtt_s or 0) >= 0.01 else ".1f", "ms")
            rate = UNKNOWN if link.rate is None else f"{bytes_of(link.rate)}/s"
            table.add_row(Text(link.name), Text(link.place), rtt, rate, link.way or UNKNOWN)
        return table
