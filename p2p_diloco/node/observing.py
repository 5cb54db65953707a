"""Reads a run's global parameters without taking part in the run, for a trainer's process (`follow`) or in this process
(`observing`).

Law: an observer only asks (`Describe`, `Ask`). It is in no roster and in no plan, no peer waits for it, and it
publishes nothing. It takes only what it has asked for. A fragment is read once all its slices have the version of its
head, and the digests that the head names. Donors keep no past, so slices that a round overtook are asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.core import messages as m
from p2p_diloco.core.events import Fill
from p2p_diloco.core.state import State, final, is_sound
from p2p_diloco.core.version import ModelVersion, Version, model_version
from p2p_diloco.errors import GaveUpWaiting, P2PDilocoError
from p2p_diloco.net.attempts import within
from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.node import run_end, wire
from p2p_diloco.node.channel import Message, NodeEnd
from p2p_diloco.node.headers import pack
from p2p_diloco.node.inbox import Handler
from p2p_diloco.node.joining import Joined, Joining
from p2p_diloco.node.privacy import refuse_if_out, refuse_if_private
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.shared import Setup, SharedMemory
from p2p_diloco.node.slice_work import SliceWork, check_values
from p2p_diloco.node.swarm import Swarm, entered

LOOK_EVERY_S = 1.0
"""Seconds between two searches for a peer that holds the state."""
TELL_EVERY_S = 3.0
"""Seconds between two reports of how much of a state has come."""
QUESTIONS_MAX = 20
"""The most questions in a row to one peer. After them the next peer is asked, only for slices that still differ."""
PEERS_S = 5.0
"""The most seconds for which `observing` looks for a peer of the run."""
END_S = 5.0
"""Seconds for which an observer looks for a peer that holds a state, before it looks whether the run has ended."""

Place = tuple[int, int]
"""A fragment and the number of a slice of it, or `HEAD`."""
HEAD = -1

log = logging.getLogger(__name__)


class Observer(Handler):
    """Holds the newest state that was read of a run. `theta`: the global parameters [numel]. `versions`: the version of
    each fragment; None: not read yet. Both change only in `refresh`. During that call, and after it has failed, `theta`
    may mix several states."""

    def __init__(self, transport: Transport, joined: Joined, tell: Callable[[str], None]) -> None:
        """`tell` is called with the reason of each wait."""
        super().__init__(joined.run.token, joined.run.rules)
        self.run, self.card = joined.run, joined.card
        self.theta = torch.zeros(self.run.layout.numel, device="cpu")
        fragments = self.rules.fragments
        self.versions: list[Version | None] = [None for _ in fragments]
        self._final = [False for _ in fragments]  # whether the run ends for the fragment at its version
        self._founding = joined.founding
        self._transport, self._tell = transport, tell
        self._work = SliceWork(self.run, self.theta, lambda *of: b"")
        self._donor = ""
        self._heads: dict[int, tuple[State, tuple[str, ...]]] = {}  # by fragment, with the digests of its slices
        self._parts: dict[Place, tuple[Version, str]] = {}  # the version of each slice that came, and its digest
        self._open: set[Place] = set()  # what was asked for
        self._asked, self._told_at = 0, 0.0  # how many slices were asked for, and when the progress was last reported
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
        """The version of the whole model; the lowest one, `ModelVersion()`, while a fragment is missing."""
        return model_version(self.held) if self._complete() else ModelVersion()

    def _complete(self) -> bool:
        """Whether all fragments are held, of one generation."""
        generations = {version.generation for version in self.held}
        return len(self.held) == len(self.versions) and len(generations) == 1

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
            end = next(iter(await run_end.read(self._transport, self._founding, self.rules)), None)
        except Unreachable:
            return
        if end is not None and end.model != self.model:
            raise run_end.ended(self.run.run_id, end, observes=True)

    async def _take_from(self, donor: str, give_up_at: float) -> bool:
        self._donor = donor
        heads = {(fragment, HEAD) for fragment in range(len(self.rules.fragments))}
        for _ in range(QUESTIONS_MAX):
            if not await self._come(donor, heads, self.rules.answers_within, give_up_at):
                self._why = f"the peer {donor} does not answer"
                return False
            if model_version([state.version for state, _ in self._heads.values()]) < self.model:
                return True
            if (lacking := self._take_whole()) is None:
                self._why = f"slices of the peer {donor} don't have the digests that it told"
                return False
            if not lacking and self._complete():
                return True
            if not await self._come(donor, lacking, self.rules.answered_within, give_up_at):
                self._why = f"not all slices came from the peer {donor}"
                return False
            self._why = "rounds are shorter than its transfer"
        return False

    async def _come(self, donor: str, places: set[Place], silence_s: float, give_up_at: float) -> bool:
        """Ask for the heads of fragments, or for slices; False if some did not come."""
        window = self.rules.fetch_window
        self._open, self._asked = set(places), len(places)
        for fragment in sorted({fragment for fragment, _ in places}):
            numbers = sorted(number for of, number in places - {(fragment, HEAD)} if of == fragment)
            for start in range(0, max(1, len(numbers)), window):
                if not await self._says(donor, m.Ask(fragment, tuple(numbers[start : start + window]))):
                    return False
        await self._wait(silence_s, give_up_at)
        came, self._open = not self._open, set()
        return came

    def _take_whole(self) -> set[Place] | None:
        """Record the version of each fragment whose slices are all at that of its head. Returns the slices of the other
        fragments that are at another one; None if slices don't have the digests of their head."""
        lacking = set[Place]()
        for fragment, (state, digests) in self._heads.items():
            places = [(fragment, number) for number in range(len(self.rules.fragments[fragment]))]
            parts = [self._parts.get(place, (None, "")) for place in places]
            if others := {place for place, (version, _) in zip(places, parts, strict=True) if version != state.version}:
                lacking |= others
            elif digests and [digest for _, digest in parts] != list(digests):
                self._parts = {place: part for place, part in self._parts.items() if place[0] != fragment}
                return None
            else:
                self.versions[fragment], self._final[fragment] = state.version, final(state, self.rules)
        return lacking

    async def _says(self, donor: str, ask: m.Ask) -> bool:
        header, _ = pack(ask, self.token)
        try:
            await self._transport.send(donor, header)
        except (Refusal, Unreachable) as error:
            log.debug("the peer %s was not asked: %s", donor, error)
            return False
        return True

    async def _wait(self, silence_s: float, give_up_at: float) -> None:
        """Wait until all has come, until the time `give_up_at`, or until nothing has come for `silence_s`."""
        clock = asyncio.get_running_loop().time
        self._heard_at = clock()
        while self._open and (left := min(self._heard_at + silence_s, give_up_at) - clock()) > 0:
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left, self._news.wait())

    # -- what comes

    def nbytes(self, sender: str, message: wire.AnyMessage) -> int:
        if not isinstance(message, m.Head | m.Part):
            raise Refusal("this peer only observes the run")
        return self._work.nbytes(message)

    async def take(self, sender: str, message: Any, payload: memoryview | None) -> None:
        if sender != self._donor or (message.fragment, getattr(message, "number", HEAD)) not in self._open:
            raise Refusal("this observer did not ask for it")
        match message:
            case m.Head(fragment=fragment, state=state, digests=digests):
                if not is_sound(state):
                    raise Refusal("its state does not have the chain of its version")
                self._heads[fragment] = state, digests
                self._open.discard((fragment, HEAD))
            case m.Part(fragment=fragment, version=version, number=number):
                assert payload is not None, "the length of its payload was checked"
                check_values(payload, "fp32", payload.nbytes // 4)
                # no fragment has a version in `_slices`, so its slices are filled in place: in `theta`
                filled = self._work.fill(Fill(fragment, version, number, payload))
                self._parts[fragment, number] = version, filled.digest
                self._open.discard((fragment, number))
                self._report()
        self._heard()

    def _report(self) -> None:
        """Tell now and then how much of the state has come."""
        if (now := asyncio.get_running_loop().time()) - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            self._tell(f"{self._asked - len(self._open)} of {self._asked} slices have come")

    def moving(self, peer: str) -> None:
        if peer == self._donor:
            self._heard()

    def _heard(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self._news.set()


async def _observer(setup: Setup, swarm: Swarm, tell: Callable[[str], None]) -> Observer:
    joined = await Joining(setup, swarm, tell).find_run(setup.asked)
    swarm.inbox.handler = observer = Observer(swarm.transport, joined, tell)
    return observer


async def follow(
    setup: Setup, channel: NodeEnd, messages: asyncio.Queue[Message], shared: SharedMemory, swarm: Swarm
) -> None:
    """Find the run, and read its global parameters whenever the trainer's process asks for them, until cancelled."""
    observer = await _observer(setup, swarm, channel.progress)
    run, wait_s = observer.run, setup.local.wait_timeout
    me = {"peer_id": swarm.transport.peer_id, "addresses": swarm.transport.addresses()}
    channel.send("run", **me, config=run.config.to_wire(), layout=run.layout.to_wire(), checkpoint=None)

    async def refreshed() -> dict[str, Any]:
        came = await observer.refresh(wait_s)
        shared.theta[: run.layout.numel].copy_(observer.theta)
        peers, traffic = await observer.peers(), swarm.transport.traffic
        shared.peers, shared.bytes_sent, shared.bytes_received = len(peers), traffic.bytes_sent, traffic.bytes_received
        digest, finished = observer.model.digest, observer.finished
        return {"came": came, "epoch": observer.epoch, "digest": digest, "finished": finished}

    channel.send("ready", **await refreshed())
    while True:
        match await messages.get():
            case {"kind": "refresh", "n": n}:
                try:
                    channel.send("refreshed", n=n, **await refreshed())
                except P2PDilocoError as error:  # the next call may succeed
                    channel.send("refreshed", n=n, error=error.to_wire())
            case {"kind": "ask", "n": n}:
                channel.send("told", n=n, peers=await observer.peers())


@contextlib.asynccontextmanager
async def observing(local: PeerConfig, tell: Callable[[str], None]) -> AsyncIterator[Observer]:
    """An observer of a run, in this process; it leaves at the block's end. `tell` is called with a text about each
    step, and with the reason for each wait.

    Raises:
        P2PDilocoError: the run can't be read.
    """
    setup = Setup(RunConfig(), local, None)
    async with entered(setup, tell) as swarm:
        if swarm.access is not None:
            await refuse_if_out(swarm.transport, local.run_id, swarm.access.member)
        elif not local.open:
            await refuse_if_private(swarm.transport, local.run_id)
        await _refuse_without_peers(swarm.transport, local.run_id)
        yield await _observer(setup, swarm, tell)


async def _refuse_without_peers(transport: Transport, run_id: str) -> None:
    """Look for a peer of the run, for `PEERS_S` seconds at most.

    Raises:
        Refused: there is none, because the run has ended. GaveUpWaiting: there is none.
    """
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + PEERS_S
    while all(status.gone for status in (await read_peers(transport, run_id)).values()):
        if clock() < give_up_at:
            await asyncio.sleep(LOOK_EVERY_S)
            continue
        await run_end.refuse_if_ended(transport, run_id, observes=True)
        mend = "start one, check the run's name, or export a checkpoint (--checkpoint)"
        raise GaveUpWaiting(f"no peer of the run {run_id} is there", mend=mend)
