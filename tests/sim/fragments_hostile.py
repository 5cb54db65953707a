"""What a hostile member sends to replicas of `p2p_diloco.fragments`: nothing yet but what it must answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .hostile import Hostile

if TYPE_CHECKING:
    from .process import Process
    from .world import World


class FragmentsHostile(Hostile):
    """The hostile member of a world of `p2p_diloco.fragments`. It is not built: such worlds can't be played."""

    def __init__(self, world: World) -> None:
        raise NotImplementedError("there is no hostile member for the core of fragments; play another --kind")

    @property
    def delay(self) -> float:
        raise NotImplementedError

    def spoils(self, message: Any) -> None:
        raise NotImplementedError

    def answer(self, sender: Process, message: Any) -> None:
        raise NotImplementedError

    def message(self, process: Process, unit: int, tactic: str) -> Any | None:
        raise NotImplementedError

    def arrives(self, to: Process, message: Any) -> None:
        raise NotImplementedError
