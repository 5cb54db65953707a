"""Machines whose links can be cut in silence: packets vanish, and connections stay open."""

from __future__ import annotations

from examples.benchmarks.network import Network

AWAY = "br1"
"""The bridge of the machines that are cut off, which still see each other."""


class Cables(Network):
    """A network whose links can be cut and healed."""

    def __init__(self) -> None:
        super().__init__()
        self.add_bridge(AWAY)

    def cut(self, *names: str) -> None:
        """Cut these machines off from the others, not from each other."""
        for name in names:
            self.connect(name, AWAY)

    def heal(self) -> None:
        """All machines see each other again."""
        for name in self.machines:
            self.connect(name)
