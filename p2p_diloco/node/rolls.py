"""Names peers by their places in the sorted roll of a version, so that a header need not spell them out.

Law: a place means the same at all peers that hold the version. A header with places on a version that this peer has not
reached is kept as it came, and read once it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

from p2p_diloco.core.version import Version
from p2p_diloco.fragments.plan import Member
from p2p_diloco.fragments.state import State

KEPT = 8
"""The rolls of so many versions of a fragment are known: of the present one, of those before it whose commits are still
sent, and of heads of fetches."""


class Roll:
    """The members of one version. An empty one has no places, so everybody is spelled out."""

    def __init__(self, members: Mapping[str, Member] = MappingProxyType({})) -> None:
        self.members = members

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The members, sorted."""
        return tuple(sorted(self.members))

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each peer."""
        return {name: place for place, name in enumerate(self.names)}


NOBODY = Roll()


class Rolls:
    """The rolls of the versions that this peer holds, or held not long ago."""

    def __init__(self) -> None:
        self._rolls: dict[int, OrderedDict[Version, Roll]] = {}

    def know(self, state: State) -> None:
        """Remember the roll of a state. The one that was not asked for longest is forgotten."""
        rolls = self._rolls.setdefault(state.fragment, OrderedDict())
        if state.version not in rolls:
            rolls[state.version] = Roll(state.roll)
        rolls.move_to_end(state.version)
        if len(rolls) > KEPT:
            rolls.popitem(last=False)

    def of(self, fragment: int, version: Version) -> Roll | None:
        """The roll of this version; None if it isn't known."""
        return self._rolls.get(fragment, OrderedDict()).get(version)
