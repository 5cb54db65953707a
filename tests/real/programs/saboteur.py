"""A node that ends its machine at a chosen moment of a round: `python saboteur.py PLAN NODE-ARGUMENTS...`.

PLAN, as JSON: `role` ("aggregator" of a shard of the round; "contributor", which aggregates none; "successor", a
contributor that would take over a shard; "bystander", a contributor that would not), `phase`, `after` (rounds since
this peer's first contribution), `victims` ("machine", "node" or "trainer"), `note` (the file for the time of its
death).

    phase        aggregator                                    contributor
    training     between a commit and the next contribution    the same
    sending      it has one contribution, others are missing   its first contribution is half sent
    sent         it has all, nothing is averaged yet           all of its own are delivered
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

from p2p_diloco.core.events import Average, Delivered, Effect, Event, Load, Merge, Received, Send
from p2p_diloco.core.messages import Commit, Contribution
from p2p_diloco.core.replica import Replica
from p2p_diloco.node import __main__ as program
from p2p_diloco.node import common

PLAN = json.loads(sys.argv.pop(1))
SENDING_S = 0.01
TRAINING_S = 0.05


class DoomedReplica(Replica):
    """A replica that kills its machine when the chosen moment has come."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        self.ask_for_the_role()
        if not hasattr(self, "joined_at"):
            if any(log.own.mine is not None for log in self.logs):  # rounds do not wait for a peer before this
                self.joined_at, self.doomed = self.epoch, False
                self.daemons = psutil.Process().children(recursive=True)
            return effects
        if not self.has_state or self.doomed or self.epoch < self.joined_at + PLAN["after"]:
            return effects
        if PLAN["role"] in self.roles_now():
            effects = self.watch(event, effects)
        return effects

    def ask_for_the_role(self) -> None:
        """Announce a bandwidth with which this peer gets its role, however unlike the measured ones are: the fastest
        peer's if it is to aggregate or succeed the aggregator, else next to none."""
        others = [summary.bandwidth for peer, summary in self.roster.summaries().items() if peer != self.me]
        leads = PLAN["role"] in ("aggregator", "successor")
        self.roster.says(bandwidth=max(others, default=0.0) if leads else 1.0)

    def roles_now(self) -> tuple[str, ...]:
        if any(log.lead.holder == self.me for log in self.logs):
            return ("aggregator",)
        successor = any(log.lead.candidates()[1:2] == [self.me] for log in self.logs)
        return ("contributor", "successor" if successor else "bystander")

    def watch(self, event: Event, effects: list[Effect]) -> list[Effect]:
        match PLAN["phase"], self.roles_now()[0]:
            case "training", _:
                if isinstance(event, Merge) and self.fresh(effects):
                    self.die_in(TRAINING_S)
            case "sending", "aggregator":
                log = self.logs[event.message.shard] if self.came(event) else None
                if log is not None and log.lead.holder == self.me and log.waited_for():
                    self.die()
            case "sending", "contributor":
                if any(isinstance(e, Send) and isinstance(e.message, Contribution) for e in effects):
                    self.die_in(SENDING_S)
            case "sent", "aggregator":
                if any(isinstance(e, Average) for e in effects):
                    self.die()
            case "sent", "contributor":
                mine = [log for log in self.logs if log.own.mine is not None and log.own.mine.base == log.version]
                delivered = isinstance(event, Delivered) and isinstance(event.message, Contribution)
                if delivered and mine and all(log.own.handed for log in mine):
                    self.die()
            case "committing", "aggregator":
                commits = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Commit)]
                if len(commits) >= 2:
                    effects = [e for e in effects if e not in commits[1:]]
                    self.committed = commits[0].message
                if isinstance(event, Delivered) and event.message is getattr(self, "committed", None):
                    self.die()
            case "committing", "contributor":
                if isinstance(event, Received) and isinstance(event.message, Commit):
                    self.die()
        return effects

    def fresh(self, effects: list[Effect]) -> bool:
        """Whether the merge follows an exchange, that is, a round of training begins."""
        return any(isinstance(e, Load) and len(e.shards) == len(self.logs) for e in effects)

    def came(self, event: Event) -> bool:
        return isinstance(event, Received) and isinstance(event.message, Contribution)

    def die_in(self, seconds: float) -> None:
        self.doomed = True
        asyncio.get_running_loop().call_later(seconds, self.die)

    def die(self) -> None:
        note = {"time": time.time(), "epoch": self.epoch, "me": self.me, "role": self.roles_now()[0]}
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
