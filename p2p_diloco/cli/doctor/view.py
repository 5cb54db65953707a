"""Draws a report: a page on a terminal, lines of text anywhere else.

Law: only draws a report. Both views show the same.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from p2p_diloco.cli.doctor.report import Finding, Link, Report
from p2p_diloco.observe.figures import UNKNOWN, bytes_of, figure

COLOURS = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def headline(report: Report) -> str:
    """One line that tells how many things must be mended, how many warnings there are, and how long the checks took."""
    bad, warn = report.count("bad"), report.count("warn")
    parts = ["all is well"] if not bad and not warn else []
    if bad:
        parts.append(f"{bad} {'thing' if bad == 1 else 'things'} must be mended")
    if warn:
        parts.append(f"{warn} {'warning' if warn == 1 else 'warnings'}")
    return f"p2p-diloco doctor: {', '.join(parts)} ({report.took_s:.1f} s)"


def lines(report: Report) -> list[str]:
    """The report as plain text: a headline, then one line for each finding, mend and link."""
    told = [headline(report)]
    for finding in report.findings:
        told.append(f"{finding.verdict:<4}  {finding.name}: {finding.text}")
        if finding.mend:
            told.append(f"      mend: {finding.mend}")
    for link in report.links:
        cells = " ".join(f"{title}={cell}" for title, cell in _cells(link).items())
        told.append(f"link  {link.name} {cells}")
    return told


def drawn(report: Report) -> RenderableType:
    """The report as a page for a terminal: the headline, a table of findings with their mends, and a table of links."""
    style = "bold red" if report.count("bad") else "bold yellow" if report.count("warn") else "bold green"
    page: list[RenderableType] = [Text(headline(report), style), Text(), _findings(report.findings)]
    if report.links:
        page += [Text(), _links(report.links)]
    return Group(*page)


def _findings(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for finding in findings:
        table.add_row(Text(finding.verdict, COLOURS[finding.verdict]), Text(finding.name), _told(finding))
    return table


def _told(finding: Finding) -> Text:
    text = Text(finding.text)
    if finding.mend:
        text.append("\nmend: ", "bold")
        text.append(finding.mend)
    return text


def _links(links: tuple[Link, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title="links, as measured", title_justify="left")
    table.add_column("peer", overflow="fold", min_width=9)
    for title in _cells(links[0]):
        left = title in ("address", "payloads")
        table.add_column(title, justify="left" if left else "right", overflow="fold", no_wrap=title != "address")
    for link in links:
        table.add_row(Text(link.name), *map(Text, _cells(link).values()))
    return table


def _cells(link: Link) -> dict[str, str]:
    rate = UNKNOWN if link.rate is None else f"{bytes_of(link.rate)}/s"
    rtt = figure(None if link.rtt_s is None else 1000 * link.rtt_s, ".0f" if (link.rtt_s or 0) >= 0.01 else ".1f", "ms")
    return {"address": link.address, "answer": rtt, "rate": rate, "payloads": link.way or UNKNOWN}
