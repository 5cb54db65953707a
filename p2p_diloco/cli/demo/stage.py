"""What all scenes of the demo share: who is there, what has been seen and told, and waiting.

Law: looks and waits. Whoever ends without having been told to ends the demo, with a sentence that names the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from p2p_diloco.cli.demo.cast import RUN_ID, Player, Script
from p2p_diloco.cli.demo.facts import curve, held_out
from p2p_diloco.cli.demo.processes import Child, Children, Signals
from p2p_diloco.cli.demo.report import compared
from p2p_diloco.cli.demo.screen import Actor, Happening, Screen, View
from p2p_diloco.core.election import assign
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.observe.plot import Curve, Moment

LOOK_EVERY_S = 0.1
PATIENCE_S = 180.0
"""How long nothing at all may happen: a slow machine imports torch in a minute."""


class Interrupted(Exception):
    """A signal asked us to end; its number."""


class Stage:
    """The demo as it stands."""

    def __init__(self, script: Script, children: Children, screen: Screen, signals: Signals) -> None:
        self.script, self.children = script, children
        self.players: list[Player] = []
        """The peers of the run, in the order of their coming."""
        self.alone: Player | None = None
        self.services: list[Child] = []
        """What has to run as long as the demo does."""
        self.observer: Child | None = None
        self.moments: list[Moment] = []
        self._screen, self._signals = screen, signals
        self._happenings: list[Happening] = []
        self._started_at = self._news_at = time.monotonic()
        self._seen: dict[str, dict[str, Any]] = {}

    # -- what is known

    @property
    def elapsed_s(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._started_at

    @property
    def epoch(self) -> int:
        """The furthest peer's."""
        return max([0, *(player.epoch for player in self.players)])

    def seen(self, name: str) -> dict[str, Any]:
        """What a peer last said of itself in the DHT, as `p2p-diloco status --json` prints it; perhaps nothing."""
        return self._seen.get(name, {})

    def averages_next(self, epoch: int) -> str | None:
        """Who is elected to average the round after `epoch`, where all that are alive have long been in the run.

        The election is a pure function of what everybody knows, so an onlooker can repeat it.
        """
        ids = {self.seen(p.name).get("peer_id"): p.name for p in self.players if p.trains and p.epoch >= 0}
        if None in ids or not ids:
            return None
        return ids[assign(RUN_ID, epoch, [0], {str(peer): 1.0 for peer in ids})[0][0]]

    def curves(self) -> tuple[Curve, Curve]:
        """The held-out losses so far."""
        alone, every = [] if self.alone is None else self.alone.rows, self.script.sync_every
        return compared(curve(self.losses(), every), curve(held_out([alone]), every))

    def losses(self) -> dict[int, float]:
        """The run's held-out loss by outer step, so far."""
        return held_out(player.rows for player in self.players)

    # -- what goes on

    def tell(self, text: str) -> None:
        """Add a sentence to the story."""
        self._happenings.append(Happening(self.elapsed_s, text))
        self._show()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Look on until something has come about.

        Raises:
            P2PDilocoError: it doesn't, or somebody dies. Interrupted: a signal came.
        """
        self._news_at = time.monotonic()
        while True:
            self._look()
            if condition():
                return
            if time.monotonic() - self._news_at > PATIENCE_S:
                mend = f"see the logs in {self.children.folder}"
                raise P2PDilocoError(f"nothing has happened for {PATIENCE_S:g} s in waiting for {what}", mend=mend)
            time.sleep(LOOK_EVERY_S)

    def _look(self) -> None:
        if self._signals.received:
            raise Interrupted(self._signals.received[0])
        everybody = [*self.players, *([self.alone] if self.alone else [])]
        for player in everybody:
            ended = player.child.status
            if player.look():
                self._news_at = time.monotonic()
            if ended and not player.killed:
                raise self._failure(player.child)
        for service in self.services:
            if service.status is not None:
                raise self._failure(service)
        if self.observer is not None:
            for snapshot in self.observer.printed.new():
                self._seen |= {peer["name"]: peer for peer in snapshot["peers"]}
        self._show()

    def _failure(self, child: Child) -> P2PDilocoError:
        status = child.status or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return P2PDilocoError(f"{child.name} {how} ({child.last_words()})", mend=f"its log is {child.log}")

    # -- what is seen

    def _show(self) -> None:
        script = self.script
        actors = [self._actor(player) for player in self.players]
        if self.alone is not None:
            alone = self.alone
            state = "alone" if alone.trains else "finished"
            actors.append(Actor(alone.name, state, None, alone.steps or None, alone.loss, alone.val_loss))
        view = View(
            elapsed_s=self.elapsed_s,
            epoch=self.epoch,
            epochs=script.epochs,
            steps=script.steps,
            folder=str(self.children.folder),
            actors=tuple(actors),
            curves=self.curves(),
            moments=tuple(self.moments),
            happenings=tuple(self._happenings),
        )
        self._screen.show(view)

    def _actor(self, player: Player) -> Actor:
        seen = self.seen(player.name)
        return Actor(
            name=player.name,
            state=self._state(player, seen.get("state")),
            epoch=player.epoch if player.rows else None,
            steps=player.steps if player.rows else None,
            loss=player.loss,
            val_loss=player.val_loss,
            waited_s=seen.get("waiting_s"),
            sent=seen.get("bytes_sent"),
            averages_next=player.trains and self.averages_next(self.epoch) == player.name,
        )

    def _state(self, player: Player, seen: str | None) -> str:
        if player.killed:
            return "killed"
        if player.child.status is not None:
            return "finished"
        if not player.rows:
            return "starting"
        return seen or "training"
