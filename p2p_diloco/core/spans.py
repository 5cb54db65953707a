"""Sets of positions as spans: (start, stop) pairs that are sorted, disjoint, not empty and not adjacent.

Law: pure functions. Each returns spans in this form, so equal sets have equal spans.
"""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]
Spans = tuple[Span, ...]


def joined(pairs: Iterable[Span]) -> Spans:
    """Return the union of ranges in any order, which may overlap."""
    found: list[Span] = []
    for start, stop in sorted(pairs):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def union(*several: Spans) -> Spans:
    """Return the positions that are in any of these spans."""
    return joined(span for spans in several for span in spans)


def minus(spans: Spans, others: Spans) -> Spans:
    """Return the positions of ``spans`` that are not in ``others``."""
    found, at = list[Span](), 0
    for start, stop in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        cut = at
        while start < stop and cut < len(others) and others[cut][0] < stop:
            if start < others[cut][0]:
                found.append((start, others[cut][0]))
            start = max(start, others[cut][1])
            cut += 1
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def within(spans: Spans, others: Spans) -> bool:
    """Whether ``others`` has all positions of ``spans``."""
    return not minus(spans, others)


def length(spans: Iterable[Span]) -> int:
    """Return the number of positions."""
    return sum(stop - start for start, stop in spans)


def taken(spans: Spans, count: int) -> tuple[Spans, Spans]:
    """Return the lowest ``count`` positions, or all if there are fewer, and the others."""
    first, rest = list[Span](), list[Span]()
    for start, stop in spans:
        cut = min(stop, start + max(0, count))
        if start < cut:
            first.append((start, cut))
        if cut < stop:
            rest.append((cut, stop))
        count -= cut - start
    return tuple(first), tuple(rest)


def sound(spans: Spans) -> bool:
    """Whether these spans are sorted, disjoint, neither empty nor adjacent."""
    return spans == joined(spans)
