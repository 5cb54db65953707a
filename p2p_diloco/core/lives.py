"""The numbers of a peer's lives: an incarnation is a clock in milliseconds and random bits.

Law: pure functions.
"""

from __future__ import annotations

SALT_BITS = 20


def incarnation(clock_ms: int, salt: int) -> int:
    """Return an incarnation number that grows with the clock. Two incarnations that start at the same clock time differ
    by their random ``salt`` (below 2**20)."""
    return clock_ms << SALT_BITS | salt


def incarnation_after(counted: int, own: int) -> int:
    """Return an incarnation number above ``counted``, with the salt of ``own``. A peer needs it if its clock shows an
    earlier time than during its earlier incarnation."""
    return ((counted >> SALT_BITS) + 1) << SALT_BITS | own & (1 << SALT_BITS) - 1


def life_of(incarnation: int) -> int:
    """Return the random bits of an incarnation, which stay when the incarnation is raised."""
    return incarnation & (1 << SALT_BITS) - 1
