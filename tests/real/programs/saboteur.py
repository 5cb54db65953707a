"""A node that ends its machine at a chosen moment of a round: `python saboteur.py PLAN NODE-ARGUMENTS...`.

PLAN, as JSON: `role` ("leader" of the round, or "contributor"), `phase`, `after` (rounds since this peer's first
contribution), `victims` ("machine", "node" or "trainer"), `note` (the file for the time of its death).

    phase        leader                                        contributor
    training     between a commit and the next contribution    the same
    sending      it has one contribution, others are missing   its first contribution is half sent
    sent         it has all, and has told no owner             all of its own are delivered
    committing   one of the others has a commit, one has not   it has just received a commit
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from p2p_diloco.core import closing
from p2p_diloco.core.events import Average, Delivered, Effect, Event, Load, Merge, Received, Send
from p2p_diloco.core.messages import Close, Commit, Ready, Slice
from p2p_diloco.core.replica import Replica
from p2p_diloco.node import __main__ as program
from p2p_diloco.node import common

PLAN = json.loads(sys.argv.pop(1))
SENDING_S = 0.01
TRAINING_S = 0.05


class DoomedReplica(Replica):
    """A replica that kills its machine when the chosen moment has come."""

    committed: Commit | None = None  # the commit of which only the first copy leaves

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        if not hasattr(self, "joined_at"):
            if self.own.ready is not None:  # rounds do not wait for a peer before this
                self.joined_at, self.doomed = self.epoch, False
                self.daemons = psutil.Process().children(recursive=True)
            return effects
        if not self.has_state or self.doomed or self.epoch < self.joined_at + PLAN["after"]:
            return effects
        if isinstance(event, Delivered) and event.message is self.committed:  # it may have made the next version by now
            self.die()
        return self.watch(event, effects, now) if self.role_now() == PLAN["role"] else effects

    def role_now(self) -> str:
        return "leader" if any(log.leads for log in self.logs) else "contributor"

    def watch(self, event: Event, effects: list[Effect], now: float) -> list[Effect]:
        sent = [effect.message for effect in effects if isinstance(effect, Send)]
        came = event.message if isinstance(event, Received) else None
        match PLAN["phase"], PLAN["role"]:
            case "training", _:
                if isinstance(event, Merge) and any(isinstance(e, Load) and e.fragments for e in effects):
                    self.die_in(TRAINING_S)
            case "sending", "leader":
                if isinstance(came, Ready) and closing.waited_for(self.logs[came.fragment], now):
                    self.die()
            case "sending", "contributor":
                if any(isinstance(message, Slice) for message in sent):
                    self.die_in(SENDING_S)
            case "sent", "leader":
                if any(isinstance(message, Close) for message in sent) or any(isinstance(e, Average) for e in effects):
                    self.die()
            case "sent", "contributor":
                own, delivered = self.own, isinstance(event, Delivered) and isinstance(event.message, Ready | Slice)
                if delivered and own.flying and -1 in own.handed and not own.going:
                    self.die()
            case "committing", "leader":
                commits = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Commit)]
                if len(commits) >= 2:
                    effects = [e for e in effects if e not in commits[1:]]
                    self.committed = commits[0].message
            case "committing", "contributor":
                if isinstance(came, Commit):
                    self.die()
        return effects

    def die_in(self, seconds: float) -> None:
        self.doomed = True
        asyncio.get_running_loop().call_later(seconds, self.die)

    def die(self) -> None:
        note = {
            "time": time.time(),
            "epoch": self.epoch,
            "me": self.me,
            "role": "leader" if self.committed else self.role_now(),
        }
        Path(PLAN["note"]).write_text(json.dumps(note))
        self.doomed = True
        if PLAN["victims"] in ("machine", "trainer"):
            os.kill(os.getppid(), signal.SIGKILL)
        if PLAN["victims"] == "machine":
            for daemon in self.daemons:
                daemon.kill()
        if PLAN["victims"] in ("machine", "node"):
            os.kill(os.getpid(), signal.SIGKILL)


assert common.Replica is Replica, "the node makes its replica elsewhere: replace it there"
common.Replica = DoomedReplica  # type: ignore[misc]

if __name__ == "__main__":
    status = program.main()
    os._exit(status)
