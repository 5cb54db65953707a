"""Finds the run that a peer names, or founds it; and describes the run's model to peers that join: its layout, and the
model's card.

Law: the decision is made once, at the start, from DHT records and one other peer's description; afterwards the replica
decides. A run's record has no owner (see `board`). If two peers found a run at once, the record with the lowest name,
which is its hash, wins. Until a description comes, every other message is refused. A description without a card, or
with a card that is too long, still describes the layout.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import msgpack

from p2p_diloco.config import LIVE_KEYS, RunConfig
from p2p_diloco.errors import ConfigError, ConfigMismatch, GaveUpWaiting, ModelMismatch, Refused, shown
from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.node import privacy, wire
from p2p_diloco.node.board import name_of
from p2p_diloco.node.inbox import Handler, Inbox
from p2p_diloco.node.records import PUBLISH_AT_LEAST_EVERY_S, read_peers
from p2p_diloco.node.run import Run, layout_of, token
from p2p_diloco.node.run_end import refuse_if_ended
from p2p_diloco.node.run_record import BOARD, Founding, RunRecord, cut_of
from p2p_diloco.node.shared import Setup
from p2p_diloco.node.swarm import Swarm
from p2p_diloco.tensors.card import CARD_BYTES_MAX
from p2p_diloco.tensors.layout import Layout

RECORD_EVERY_S = 15.0
FOUNDERS_MEET_S = 0.7
"""Seconds that a founder waits to see another founder's record."""
FOUNDED_JUST_NOW_S = 5.0
"""Seconds. While a run's record is younger, another founder's record may exist that this peer doesn't see yet. Peers'
clocks may differ by 3 s, because the DHT works up to that difference."""
HOLDS_FOR_S = 2 * PUBLISH_AT_LEAST_EVERY_S
"""Seconds for which a peer's last record counts as proof that it holds a state."""
LOOK_EVERY_S = 1.0
_LOOK_AFTER_THE_PEERS = "check that its peers are up, or wait longer"
_NOT_TOLD = (
    "; this peer does not, because it was given neither settings of the run nor found (--found)",
    "start the peer that has the run's settings, or give this peer found=True (--found) or settings",
)
"""Why a peer that could found the run waits for another one to do it, and the mend."""
_SEEN = (
    "; this peer does not found it anew without found (--found): peers of it were met here, and may only be hidden",
    "check that they are up and can be reached from here, or found the run anew with found=True (--found)",
)
"""The same for a peer whose machine has been in the run. A stranger may hide a run's records, and a bootstrap that has
just started has none; founding the run anew would make two of one name."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Joined:
    """A run that was found or founded, and its record. `founder`: whether this peer has just founded the run, so that
    this peer's model is epoch 0. `card`: the packed card of the run's model; empty if this peer knows none. `key`: the
    public run key of a private run; empty in an open run. `may_begin_again`: whether this peer may found the run anew
    if no peer holds its state: it is told to (`found`); or it has the run key, or is the founder, started again, and
    has met no other peer of the run."""

    run: Run
    record: bytes
    founder: bool
    card: bytes = b""
    key: bytes = b""
    may_begin_again: bool = False

    @property
    def founding(self) -> Founding:
        return Founding.of(self.run.run_id, RunRecord.unpack(self.record), self.key)


class Joining:
    """Finds or founds a run for one peer. `tell` is called with the reason for each wait."""

    def __init__(self, setup: Setup, swarm: Swarm, tell: Callable[[str], None]) -> None:
        self._setup, self._tell, self._run_id = setup, tell, setup.local.run_id
        self._transport, self._inbox, self._access = swarm.transport, swarm.inbox, swarm.access
        self._salt = b"" if swarm.access is None else swarm.access.member.token_salt
        self._was_in_it = privacy.has_been_in_it(setup.local, swarm.transport.peer_id)
        self._card = setup.card
        self._give_up_at = time.monotonic() + setup.local.wait_timeout

    async def find_run(self, founding: RunConfig, founded: tuple[str, float] | None = None) -> Joined:
        """Find the run, or found it with the settings `founding`. This peer founds the run if there is none yet, and
        this peer can and is told to (`Setup.is_told_to_found`).

        `founded`: the founder and the founding time that a run restarted from a checkpoint keeps; None for a new run.

        Raises:
            GaveUpWaiting: no peer founded the run, or described its model, in time.
            ConfigMismatch, ModelMismatch, Refused: this peer doesn't fit into the run, or has no invitation to it.
            ConfigError: the run's slices are too large or too many to be sent, or this peer is to found the run with
                parameters that are not finite.
        """
        own: bytes | None = None
        told = self._setup.is_told_to_found(founding)
        founds = self._may_found and told and (founded is not None or not self._was_in_it)
        while not (found := await self._records()):
            if self._access is None and not self._setup.local.open:
                await privacy.refuse_if_private(self._transport, self._run_id)
            if founded is None:
                await refuse_if_ended(self._transport, self._run_id, observes=self._setup.local.role == "observer")
            if founds:
                if founded is None and (names := self._setup.not_finite):
                    wrong, mend = "has NaN or infinite values, and a founder's go to all peers", "give it finite ones"
                    raise ConfigError(wrong, key="parameter", value=names, mend=f"{mend} before the peer is made")
                own = await self._publish_own(founding, founded or (self._transport.peer_id, time.time()))
                await asyncio.sleep(FOUNDERS_MEET_S)
                found = await self._records() or {name_of(own): own}
                break
            why, mend = (_SEEN if told else _NOT_TOLD) if self._may_found else ("", _LOOK_AFTER_THE_PEERS)
            founder = "a worker" if self._access is None else "a worker that has the run key"
            await self._wait(
                f"waiting for {founder} to found the run {self._run_id}{why}",
                f"is over: no peer has founded the run {self._run_id}{why}",
                mend,
            )
        else:
            if _just_founded(found):  # perhaps by several peers, which must all choose among the same records
                await asyncio.sleep(FOUNDERS_MEET_S)
                found = {**found, **await self._records()}
        value = found[min(found)]
        if value == own:
            log.info("founded the run %s, because this swarm has no peer and no record of it", self._run_id)
        run = await self._fit(RunRecord.unpack(value))
        run.check(self._transport.limits)
        return Joined(
            run,
            value,
            founder=value == own,
            card=self._card,
            key=b"" if self._access is None else self._access.member.run,
            may_begin_again=self._may_begin_again(RunRecord.unpack(value)),
        )

    @property
    def _may_found(self) -> bool:
        """Whether this peer can found the run: it has a model, and for a private run the run key."""
        return self._setup.can_found and (self._access is None or self._access.key is not None)

    def _may_begin_again(self, record: RunRecord) -> bool:
        own = record.founder == self._transport.peer_id if self._access is None else self._access.key is not None
        return self._setup.local.found or (own and not self._was_in_it)

    async def _records(self) -> dict[str, bytes]:
        """The run's records by name. Values that are no record of a run, or not named by their hash, are left out; of a
        private run's records, also those that the run key didn't sign. Empty if the DHT doesn't answer."""
        try:
            found = await BOARD.fetch(self._transport, self._run_id)
        except Unreachable as error:
            log.debug("the DHT gave no answer about the run: %s", error)
            return {}
        records: dict[str, bytes] = {}
        reason = ""
        for name, value in found.items():
            if self._access is not None and not self._access.founded_by_the_key(self._run_id, value):
                _leave_out(self._run_id, name)
                continue
            try:
                RunRecord.unpack(value)
            except ValueError as error:
                reason = str(error)
            else:
                records[name] = value
        if reason and not records:
            wrong = f"has a record that can't be used ({reason})"
            raise Refused(wrong, key="run_id", value=self._run_id, mend="choose another")
        return records

    async def _publish_own(self, config: RunConfig, founded: tuple[str, float]) -> bytes:
        run = Run(self._run_id, config, self._own_layout(config), self._salt)
        run.check(self._transport.limits)
        record = RunRecord.founding(run, *founded, self._setup.frozen)
        value = record.pack() if self._access is None else self._access.signed(self._run_id, record)
        await BOARD.store(self._transport, run.run_id, value)
        return value

    def _own_layout(self, config: RunConfig) -> Layout:
        """The layout of this peer's model by these settings."""
        assert self._setup.specs is not None
        return layout_of(config, self._setup.specs, self._setup.buffers)

    async def _fit(self, record: RunRecord) -> Run:
        """Check that this peer fits into the run, and return the run."""
        run_id, asked = self._run_id, self._setup.asked
        config = RunConfig.from_wire(record.config)
        if differences := asked.difference(config, asked.given):
            raise ConfigMismatch(differences, run_id=run_id)
        if ":" in (theirs := config.outer_optimizer) and theirs != asked.outer_optimizer:
            # a stranger's word must not make this machine import and run a package
            wrong, mend = "is code that this peer was not told to run", "set it here, too, if you trust that code"
            raise Refused(wrong, key="outer_optimizer", value=theirs, mend=mend)
        for key in LIVE_KEYS & asked.given.keys():
            if (theirs := getattr(config, key)) != (mine := getattr(asked, key)):
                log.warning("%s=%s is the run's value, which is used instead of %s", key, shown(theirs), shown(mine))
        if record.frozen and self._setup.frozen not in ("", record.frozen):
            log.warning(
                "this model's frozen parameters or buffers differ from the founder's: what the run trains, such as an "
                "adapter, is then for another base; load the same base on all peers"
            )
        try:
            own = None if self._setup.specs is None else self._own_layout(config)
        except ConfigError as error:  # they fit the run's model
            lines = [f"the run has {error.key}={error.value}, which {error.wrong}"]
            raise ModelMismatch(lines, run_id=run_id) from None
        if own is not None and cut_of(own) == record.cut:
            return Run(run_id, config, own, self._salt)
        run_token = token(run_id, config.fingerprint(), record.model, self._salt)
        while True:
            count = 4 * record.params + record.slices  # a BatchNorm has three buffers for two parameters
            described = await self._described(run_token, count)
            if own is not None and own.fingerprint() != record.model:
                lines = [] if described is None else described.layout.difference(own)
                raise ModelMismatch(lines or [_totals(record, own)], run_id=run_id)
            if described is not None and cut_of(described.layout) == record.cut:
                self._card = self._card or described.card
                return Run(run_id, config, described.layout, self._salt)
            await self._wait(
                f"waiting for a peer of the run {run_id} to describe its model",
                f"is over: no peer of the run {run_id} described its model",
            )

    async def _described(self, run_token: bytes, count: int) -> Described | None:
        """The description of the run's model, from the first peer that gives one; None if no peer does. An observer
        prefers a description with a card."""
        first = None
        for peer, status in (await read_peers(self._transport, self._run_id)).items():
            if peer != self._transport.peer_id:
                await self._transport.introduce(peer, status.addresses)
                described = await ask_to_describe(self._transport, self._inbox, run_token, peer, count)
                if described is not None and (described.card or self._setup.local.role != "observer"):
                    return described
                first = first or described
        return first

    async def _wait(self, text: str, in_vain: str, mend: str = _LOOK_AFTER_THE_PEERS) -> None:
        """Report the reason for the wait, and sleep until the next look. `in_vain`, `mend`: the error's texts.

        Raises:
            GaveUpWaiting: the wait has lasted for `wait_timeout`.
        """
        if time.monotonic() >= self._give_up_at:
            raise GaveUpWaiting(in_vain, key="wait_timeout", value=self._setup.local.wait_timeout, mend=mend)
        self._tell(text)
        await asyncio.sleep(LOOK_EVERY_S)


@lru_cache(maxsize=2048)  # each is logged once, though many looks find it
def _leave_out(run_id: str, name: str) -> None:
    log.warning("a record of the run %s is left out: the run key did not sign it", run_id)


def _just_founded(found: Mapping[str, bytes]) -> bool:
    times = [RunRecord.unpack(value).time for value in found.values()]
    return abs(time.time() - max(times)) < FOUNDED_JUST_NOW_S


def _totals(record: RunRecord, own: Layout) -> str:
    return (
        f"{record.params} parameters of {record.numel} elements in all in the run, "
        f"{len(own.params)} of {own.numel} here"
    )


async def holders_of(transport: Transport, run_id: str) -> dict[str, list[str]]:
    """The other peers whose recent DHT records say that they hold the run's state, with their addresses. A peer that
    has come to the run's end holds it until it leaves: the record of the end may follow the peer's own."""
    holders = {}
    for peer, status in (await read_peers(transport, run_id)).items():
        recent = time.time() - status.time < HOLDS_FOR_S
        if status.epoch is not None and recent and not status.gone and peer != transport.peer_id:
            holders[peer] = list(status.addresses)
    return holders


# -- the description of a run's model

DESCRIPTION_BYTES_MAX = 16 * 2**20
"""The longest description of a model that is accepted of any run."""
BYTES_OF_ONE = 1024
"""The most bytes of one parameter, buffer or slice in a description."""
DESCRIBE_S = 3.0
"""Deadline for one peer's description of the run's model."""


@dataclass(frozen=True)
class Described:
    """A peer's description of the run's model. `card`: the model's packed card; empty if the peer has none."""

    layout: Layout
    card: bytes = b""

    @cached_property
    def packed(self) -> memoryview:
        """The description as it is handed out."""
        return memoryview(msgpack.packb({**self.layout.to_wire(), "card": self.card}))

    @classmethod
    def unpack(cls, payload: object) -> Described:
        """Decode a description. Raises ValueError, TypeError or UnpackException if it isn't one."""
        wire = msgpack.unpackb(payload)
        layout = Layout.from_wire(wire)
        card = wire.get("card", b"")
        return cls(layout, card if isinstance(card, bytes) and len(card) <= CARD_BYTES_MAX else b"")


async def ask_to_describe(transport: Transport, inbox: Inbox, token: bytes, peer: str, count: int) -> Described | None:
    """Ask a peer to describe the run's model; returns None if no description came in time. `count`: about how many
    parameters, buffers and slices the model has; a description that is much longer is refused: decoded, a hostile one
    takes a hundred times its bytes."""

    def read(payload: memoryview) -> Described:
        try:
            return Described.unpack(payload)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise Refusal(f"the description of the model can't be read: {error}") from None

    inbox.handler = Handler(token)  # it takes nothing but the answer
    most = min(DESCRIPTION_BYTES_MAX, CARD_BYTES_MAX + BYTES_OF_ONE * (64 + count))
    try:
        return await within(DESCRIBE_S, inbox.questions.ask(transport, peer, wire.Describe(), most, read, token))
    except (Refusal, Unreachable, asyncio.TimeoutError) as error:
        log.debug("%s didn't describe the run's model: %r", peer, error)
        return None
