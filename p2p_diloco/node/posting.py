"""Sends the replica's messages, and tells the replica for each whether it was delivered.

Law: one event follows for each message, Delivered or SendFailed. What a round waits for leaves at once; commits and
states for peers that catch up wait for the payloads of rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import replace

from p2p_diloco.core.events import Damaged, Delivered, SendFailed
from p2p_diloco.core.messages import Commit, Contribution, Message, Plan, State
from p2p_diloco.net.interface import Refusal, Unreachable
from p2p_diloco.node import wire
from p2p_diloco.node.auditing import EXPELLED
from p2p_diloco.node.common import Common
from p2p_diloco.node.outbox import Made, Outcome

PROMPT_MAX = 4
"""A commit for a training peer that its plan does not name is sent at once if the number of commits under way to that
peer is below PROMPT_MAX times the number of shards; otherwise it waits for the payloads of rounds."""

log = logging.getLogger(__name__)


class Posting:
    """Sends the messages of one replica."""

    def __init__(self, common: Common, at_rest: asyncio.Event) -> None:
        """`at_rest` is set while versions and tensors agree."""
        self._run, self._replica, self._work = common.run, common.replica, common.work
        self._events, self._event_log, self._outbox = common.events, common.event_log, common.outbox
        self._sealed = common.seals.of_contribution if common.run.config.audit_rate else None
        self._at_rest = at_rest
        self._states: set[tuple[str, int]] = set()  # (peer, shard) of states that are queued or being sent
        self._under_way = Counter[str]()  # commits to each peer that are queued or being sent
        self._expelled_by: set[str] = set()  # peers that have expelled this one
        self._heard = Counter[str]()  # signs of life of each peer

    def heard(self, peer: str) -> None:
        """Note a sign of life: a message of this peer has come, or a transfer with it makes progress."""
        self._heard[peer] += 1

    def send(self, to: str, message: Message) -> None:
        """Send a message. An event tells the replica whether it was delivered."""
        heard = self._heard[to]

        def answer(outcome: Outcome) -> None:
            if isinstance(message, Commit):
                self._under_way[to] -= 1
            if isinstance(message, State):
                self._states.discard((to, message.shard))
            if outcome is None:
                self._events.post(Delivered(to, message))
                return
            log.debug("sending a %s message to %s failed: %s", type(message).__name__, to, outcome)
            if isinstance(outcome, Refusal) and outcome.reason.startswith(EXPELLED) and to not in self._expelled_by:
                self._expelled_by.add(to)
                self._event_log.note("expelled", f"{to} refuses this peer's messages: {outcome.reason}")
            # A passed deadline doesn't prove that the peer is gone, and the transport itself reports a broken link. Nor
            # does a dial prove it that began before the peer's last sign of life: the peer or its relay was not ready.
            gone = isinstance(outcome, Unreachable) and outcome.refused and self._heard[to] == heard
            self._events.post(SendFailed(to, message, gone))

        match message:
            case State(shard=shard) if (to, shard) in self._states:
                self._events.post(SendFailed(to, message, gone=False))  # the queued message will have the newest state
                return
            case State(shard=shard):
                self._states.add((to, shard))
                self._outbox.put_late(to, lambda: self._present(to, shard), answer)
                return
        payload: memoryview | None = getattr(message, "payload", None)
        try:
            header = wire.pack(self._as_sent(message), self._run.token)
        except (ValueError, TypeError, OverflowError) as error:
            log.error("a %s message to %s can't be encoded: %s", type(message).__name__, to, error)
            self._events.post(SendFailed(to, message, gone=False))
        else:
            self._under_way[to] += isinstance(message, Commit)
            match message:
                case Commit(shard=shard, plan=plan) if self._run.rules.asynchronous:
                    # urgent, because a submitter is answered only once every successor holds the commit
                    self._outbox.put(to, header, payload, answer, line=shard, urgent=to in plan.succession)
                case Commit(shard=shard, plan=plan) if payload is not None and not self._soon(to, plan):
                    kept = shard, message.base.epoch % self._run.rules.commits_kept
                    self._outbox.put_late(to, _made(header, payload), answer, kept)
                case Contribution(shard=shard):
                    self._outbox.put(to, header, payload, answer, shard)
                case _:
                    self._outbox.put(to, header, payload, answer)

    def _as_sent(self, message: Message) -> Message:
        """The message, with this peer's seal if it is a contribution."""
        if isinstance(message, Contribution) and self._sealed is not None:
            return replace(message, seal=self._sealed(message))
        return message

    def _soon(self, to: str, plan: Plan) -> bool:
        """Whether a commit for the peer `to` is sent at once, because rounds may wait for that peer. They may if the
        plan names the peer, or if the peer trains and receives commits as fast as they are made."""
        room = PROMPT_MAX * self._run.rules.shards
        return plan.names(to) or (self._under_way[to] < room and to in self._replica.roster.workers())

    async def _present(self, to: str, shard: int) -> tuple[bytes, memoryview]:
        """Encode a shard's present state. This is called when the state can be sent, so the state may be newer than the
        one that was asked for.

        Raises:
            Refusal: the tensors don't have the digest of their version.
        """
        while not self._at_rest.is_set():
            await self._at_rest.wait()
        state = self._replica.state(shard)
        if self._work.damaged(state):
            self._events.post(Damaged(shard, state.version))
            raise Refusal(f"shard {shard} is corrupted in the sender's memory")
        return wire.pack(state, self._run.token), self._work.export(shard)


def _made(header: bytes, payload: memoryview) -> Made:
    async def make() -> tuple[bytes, memoryview]:
        return header, payload

    return make
