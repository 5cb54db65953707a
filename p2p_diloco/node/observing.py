"""Reads a run's global parameters without taking part in the run.

Law: an observer only asks (`Describe`, `Fetch`). It is in no roster and in no plan, no peer waits for it, and it
publishes nothing. It takes only what it has asked for; the tensors of each shard must have the digest of their version.
A state is complete if all shards of a fragment are at one epoch; in asynchronous mode every state is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b

import torch

from p2p_diloco.core.events import Fill
from p2p_diloco.core.messages import Fetch, State, Versions
from p2p_diloco.core.replica import meta_of
from p2p_diloco.core.state import fetched, final
from p2p_diloco.core.version import ModelVersion, Version, model_version
from p2p_diloco.errors import GaveUpWaiting
from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.node import ends, wire
from p2p_diloco.node.inbox import Handler
from p2p_diloco.node.joining import Joined
from p2p_diloco.node.misfit import misfit
from p2p_diloco.node.payloads import objection
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.tensor_work import TensorWork

LOOK_EVERY_S = 1.0
"""Seconds between two searches for a peer that holds the state."""
TELL_EVERY_S = 3.0
"""Seconds between two reports of how much of a state has come."""
EVEN_EVERY_S = 0.2
"""Seconds between two questions to a peer whose shards are at unlike epochs, because commits are on their way."""
QUESTIONS_MAX = 20
"""The most questions in a row to one peer. After them the next peer is asked, only for shards that still differ."""
END_S = 5.0
"""Seconds for which an observer looks for a peer that holds a state, before it looks whether the run has ended."""

log = logging.getLogger(__name__)


class Observer(Handler):
    """Holds the newest state that was read of a run. `theta`: the global parameters [numel]. `versions`: the version of
    each shard; None: not read yet. Both change only in `refresh`. During that call, and after it has failed, `theta`
    may mix several states."""

    def __init__(self, transport: Transport, joined: Joined, tell: Callable[[str], None]) -> None:
        """`tell` is called with the reason of each wait."""
        self.run, self.card = joined.run, joined.card
        self.theta = torch.zeros(self.run.layout.numel, device="cpu")
        self.versions: list[Version | None] = [None for _ in self.run.layout.shards]
        self._final = [False for _ in self.run.layout.shards]  # whether the run ends for the shard at its version
        self._founding = joined.founding
        self._transport, self._tell = transport, tell
        self._work = TensorWork(self.run, self.theta)
        self._donor = ""
        self._told: list[Versions] = []  # the answer to the last question for versions
        self._awaited: set[int] = set()  # shards that were asked for
        self._asked, self._told_at = 0, 0.0  # how many shards were asked for, and when the progress was last reported
        self._wrong = False  # whether the donor has sent a state that can't be used
        self._news = asyncio.Event()
        self._heard_at = 0.0
        self._why = "no peer of the run holds its state"
        transport.limits = self.run.timed(transport.limits)

    # -- what is known

    @property
    def held(self) -> list[Version]:
        return [version for version in self.versions if version is not None]

    @property
    def model(self) -> ModelVersion:
        """The version of the whole model; the lowest one, `ModelVersion()`, while a shard is missing."""
        return model_version(self.held) if len(self.held) == len(self.versions) else ModelVersion()

    @property
    def epoch(self) -> int:
        return min((version.epoch for version in self.held), default=0)

    @property
    def finished(self) -> bool:
        """Whether this state is the run's last one."""
        return all(self._final)

    async def peers(self) -> list[str]:
        """The ids of the peers that have a recent record in the DHT."""
        return sorted(await read_peers(self._transport, self.run.run_id))

    # -- reading

    async def refresh(self, within_s: float) -> bool:
        """Fetch the newest complete state. Returns whether it is newer than the one held before.

        Raises:
            GaveUpWaiting: no complete state came within `within_s`.
            Refused: the run has ended, and no peer has its last state.
        """
        clock, before = asyncio.get_running_loop().time, tuple(self.versions)
        began, give_up_at = clock(), clock() + within_s
        while True:
            donors = await self._donors()
            if not donors and self.finished and self._complete():
                return False
            for donor in donors:
                if await self._take_from(donor, give_up_at):
                    return before != tuple(self.versions)
            if not donors and clock() - began >= END_S:
                await self._look_for_the_end()
            if clock() >= give_up_at:
                mend = "check that its peers can be reached from here, wait longer, or read a checkpoint"
                raise GaveUpWaiting(
                    f"is over: no complete state of the run {self.run.run_id} came ({self._why})",
                    key="wait_timeout",
                    value=f"{within_s:g}",
                    mend=mend,
                )
            self._tell(f"waiting for the state of the run {self.run.run_id}: {self._why}")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _donors(self) -> Sequence[str]:
        """The peers whose records say that they hold a state, in the order in which to ask them: by epoch, highest
        first, then reachable peers before private ones. Each observer has an order of its own for equal ones."""
        peers = await read_peers(self._transport, self.run.run_id)
        able = {p: s for p, s in peers.items() if s.epoch is not None and not s.gone}
        for peer, status in able.items():
            await self._transport.introduce(peer, status.addresses)

        def rank(peer: str) -> tuple[int, bool, bytes]:
            own = blake2b(f"{self._transport.peer_id} {peer}".encode(), digest_size=8).digest()
            return -(able[peer].epoch or 0), able[peer].reach == "private", own

        return sorted(able, key=rank)

    async def _look_for_the_end(self) -> None:
        """Raises Refused if the run has ended at a state that this observer does not hold."""
        try:
            end = await ends.read(self._transport, self._founding, self.run.rules)
        except Unreachable:
            return
        if end is not None and end.model != self.model:
            raise ends.unreadable(self.run.run_id, end)

    async def _take_from(self, donor: str, give_up_at: float) -> bool:
        """Fetch from this peer the shards that differ from those held, unless the state held is complete and newer.
        Returns False if the peer has given no complete state in time."""
        clock, self._donor = asyncio.get_running_loop().time, donor
        for _ in range(QUESTIONS_MAX):
            if clock() >= give_up_at or (theirs := await self._versions_of(donor)) is None:
                return False
            if model_version(theirs) < self.model and self._complete():
                return True
            lacking = [s for s, version in enumerate(theirs) if version != self.versions[s]]
            if lacking and not await self._states_of(donor, lacking, give_up_at):
                return False
            if self._complete() and (self.held == list(theirs) or self.run.rules.asynchronous):
                return True
            self._why = "rounds are shorter than its transfer" if lacking else "its shards are at unlike epochs"
            await asyncio.sleep(0 if lacking else EVEN_EVERY_S)
        return False

    def _complete(self) -> bool:
        """Whether all shards are held, of one generation, and (unless asynchronous) at one epoch in each fragment."""
        if len(self.held) < len(self.versions):
            return False
        if len({version.generation for version in self.held}) > 1:
            return False
        fragments = self.run.rules.fragments
        even = all(len({v.epoch for s in shards if (v := self.versions[s])}) == 1 for shards in fragments)
        return even or self.run.rules.asynchronous

    async def _versions_of(self, donor: str) -> tuple[Version, ...] | None:
        """Ask a peer for its versions; None if they do not come in time."""
        self._told = []
        if await self._ask(donor, Fetch(tuple(self.versions), shards=())):
            await self._wait(lambda: bool(self._told), self.run.rules.answers_within)
        if not self._told:
            self._why = f"the peer {donor} does not answer"
            return None
        return self._told[-1].versions

    async def _states_of(self, donor: str, shards: Collection[int], give_up_at: float) -> bool:
        """Fetch these shards' states; False if some did not come."""
        self._awaited, self._asked, self._wrong = set(shards), len(shards), False
        self._told_at = asyncio.get_running_loop().time()
        if await self._ask(donor, Fetch(tuple(self.versions), whole=True, shards=tuple(shards))):
            await self._wait(lambda: not self._awaited or self._wrong, self.run.rules.answered_within, give_up_at)
        if self._awaited:
            self._why = f"{len(self._awaited)} of {len(shards)} shards did not come from the peer {donor}"
        came, self._awaited = not self._awaited, set()
        return came

    async def _ask(self, donor: str, request: Fetch) -> bool:
        try:
            await self._transport.send(donor, wire.pack(request, self.run.token))
        except (Refusal, Unreachable) as error:
            log.debug("the peer %s was not asked: %s", donor, error)
            return False
        return True

    async def _wait(self, come: Callable[[], bool], silence_s: float, give_up_at: float = float("inf")) -> None:
        """Wait until `come()` is true, until the time `give_up_at`, or until nothing has come for `silence_s`."""
        clock = asyncio.get_running_loop().time
        self._heard_at = clock()
        while not come() and (left := min(self._heard_at + silence_s, give_up_at) - clock()) > 0:
            self._news.clear()
            try:
                await within(left, self._news.wait())
            except asyncio.TimeoutError:
                continue

    # -- what comes

    def read(self, sender: str, header: bytes) -> tuple[wire.AnyMessage, int]:
        message = wire.unpack(header, self.run.token)
        if not isinstance(message, (State, Versions)):
            raise Refusal("this peer only observes the run")
        layout = self.run.layout
        if reason := misfit(message, len(layout.shards), len(layout.fragments)):
            raise Refusal(f"the {type(message).__name__} is refused: {reason}")
        return message, self._work.nbytes(message)

    def check(self, sender: str, message: wire.AnyMessage, payload: memoryview | None) -> wire.AnyMessage:
        awaited = not isinstance(message, State) or message.shard in self._awaited
        if sender != self._donor or not awaited:
            raise Refusal("this observer did not ask for it")
        if isinstance(message, State) and payload is not None:
            if why := objection(self.run, message, payload):
                raise Refusal(f"the State is refused: {why}")
            return dataclasses.replace(message, payload=payload)
        return message

    async def take(self, sender: str, message: wire.AnyMessage) -> None:
        match message:
            case Versions():
                self._told.append(message)
            case State(shard=shard, version=version):
                digest = self._work.fill(Fill(message, meta_of(fetched(message, self.run.rules)))).digest
                if digest == version.digest:
                    self._work.accept([(shard, digest)])
                    self.versions[shard], self._final[shard] = version, final(message, self.run.rules)
                    self._awaited.discard(shard)
                    self._report()
                else:
                    self._wrong = True
                    log.warning("shard %d: a state of %s doesn't have the digest that it names", shard, sender)
        self._heard()

    def _report(self) -> None:
        """Tell now and then how much of the state has come."""
        if (now := asyncio.get_running_loop().time()) - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            self._tell(f"{self._asked - len(self._awaited)} of {self._asked} shards have come")

    def moving(self, peer: str) -> None:
        if peer == self._donor:
            self._heard()

    def _heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._news.set()
