"""Simulated worlds whose processes write histories, as nodes do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from p2p_diloco import __version__
from p2p_diloco.history.reading import Entry, Life, read
from p2p_diloco.node.history import Head, History, packed, read_line
from tests.sim.process import Process
from tests.sim.settings import Settings
from tests.sim.world import World

RUN = {"version": __version__, "protocol": 9, "run_id": "r", "founder": "p0", "founded": 0.0}
CALM = {"peers": 3, "drop": 0.0, "duplicate": 0.0, "clock_skew": 0.0, "delay_mean": 0.02, "faults": (), "interval": 2}


def as_written(entries: Iterable[Entry]) -> list[object]:
    """The events as a history has them: without signatures and payloads."""
    events = ((0.0, entry.what, ()) for entry in entries if not isinstance(entry.what, str))
    return [read_line(packed(event)) for event in events]


class _Written(list[Entry]):
    """A trace that is written to histories as it grows."""

    def __init__(self, world: RecordedWorld) -> None:
        super().__init__()
        self._world = world

    def append(self, entry: Entry) -> None:
        super().append(entry)
        if not isinstance(entry.what, str):
            process = self._world.alive[entry.peer]
            self._world.histories[process].write(process.clock(self._world.now), entry.what, entry.effects)


class RecordedWorld(World):
    """Each process writes a history. `wrong`: by how many seconds the wall clock of a peer is wrong."""

    def __init__(
        self,
        folder: Path,
        seed: int = 0,
        settings: Settings | None = None,
        bytes_max: int = 2**24,
        wrong: dict[str, float] | None = None,
    ) -> None:
        self.folder, self.bytes_max, self.wrong = folder, bytes_max, wrong or {}
        self.histories: dict[Process, History] = {}
        super().__init__(seed, settings or Settings(**CALM), trace=True)  # type: ignore[arg-type]
        self.trace = _Written(self)

    def say(self, who: str, what: str) -> None:
        super().say(who, what)
        if what.startswith("starts"):
            self._begin(self.alive[who])

    def _begin(self, process: Process) -> None:
        name, now, mine = process.name, process.clock(self.now), process.replica.roster.mine
        head = Head(peer=name, name=name, role=mine.role, eligible=mine.eligible, incarnation=mine.incarnation,
                    started=self.now, began=now, ahead=1e9 + self.now + self.wrong.get(name, 0.0) - now,
                    rules=self.rules, **RUN)  # fmt: skip
        self.histories[process] = history = History(lambda: 1e9 + self.now + self.wrong.get(name, 0.0))
        history.begin(self.folder / f"{name}-{self.now:07.2f}", head, self.bytes_max)

    def lives(self, *, of_killed: bool = False) -> list[Life]:
        """What is read of the histories now. Those of killed processes lack what was not written yet, except with
        `of_killed`."""
        for process, history in self.histories.items():
            if of_killed or self.alive.get(process.name) is process:
                history._write_out(process.clock(self.now))
        return read([self.folder])
