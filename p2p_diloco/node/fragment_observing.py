"""Reads the global parameters of a run of `p2p_diloco.fragments` without taking part in it.

Law: as `observing`, but with the messages of fragments. A fragment is read once all its slices have the version of its
head: donors keep no past, so slices that a round overtook are asked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from p2p_diloco.core.version import ModelVersion, Version
from p2p_diloco.fragments import messages as m
from p2p_diloco.fragments.events import Fill
from p2p_diloco.fragments.lineage import model_of
from p2p_diloco.fragments.state import State, final, is_sound
from p2p_diloco.net.interface import Refusal, Transport, Unreachable
from p2p_diloco.node.forms import About
from p2p_diloco.node.fragment_inbox import Long, misplaced
from p2p_diloco.node.headers import Folded, Rolls, opened, pack, unpack
from p2p_diloco.node.joining import Joined
from p2p_diloco.node.observing import QUESTIONS_MAX, Observer
from p2p_diloco.node.payloads import unfit
from p2p_diloco.node.slice_work import SliceWork

log = logging.getLogger(__name__)

Place = tuple[int, int]
"""A fragment and the number of a slice of it; -1: its head."""


class FragmentObserver(Observer):
    """Holds the newest state that was read of a run. `versions`: the version of each fragment; None: not read yet."""

    def __init__(self, transport: Transport, joined: Joined, tell: Callable[[str], None]) -> None:
        super().__init__(transport, joined, tell)
        fragments = self.run.rules.fragments
        self.versions, self._final = [None for _ in fragments], [False for _ in fragments]
        self._slices = SliceWork(self.run, self.theta, lambda *of: b"")
        self._answers: list[m.Told] = []
        self._heads: dict[int, tuple[State, tuple[str, ...]]] = {}
        self._parts: dict[Place, tuple[Version, str]] = {}  # the version of each slice that came, and its digest
        self._open: set[Place] = set()  # what was asked for

    @property
    def model(self) -> ModelVersion:
        return model_of(self.held) if self._complete() else ModelVersion()

    def _complete(self) -> bool:
        generations = {version.generation for version in self.held}
        return len(self.held) == len(self.versions) and len(generations) == 1

    # -- reading

    async def _take_from(self, donor: str, give_up_at: float) -> bool:
        clock, self._donor = asyncio.get_running_loop().time, donor
        for _ in range(QUESTIONS_MAX):
            if clock() >= give_up_at or (told := await self._told_by(donor)) is None:
                return False
            if model_of(told) < self.model:
                return True
            lacking = {
                (fragment, number)
                for fragment, shards in enumerate(self.run.rules.fragments)
                for number in range(len(shards))
                if self._parts.get((fragment, number), (None, ""))[0] != told[fragment]
            }
            if lacking and not await self._come(donor, lacking, give_up_at):
                self._why = f"not all slices came from the peer {donor}"
                return False
            self._take_whole()
            if self._complete() and not lacking:
                return True
            self._why = "rounds are shorter than its transfer"
        return False

    async def _told_by(self, donor: str) -> tuple[Version, ...] | None:
        self._answers = []
        if await self._says(donor, m.Ask()):
            await self._wait(lambda: bool(self._answers), self.run.rules.answers_within)
        if not self._answers:
            self._why = f"the peer {donor} does not answer"
            return None
        return self._answers[-1].versions

    async def _come(self, donor: str, lacking: set[Place], give_up_at: float) -> bool:
        """Ask for these slices, and for the heads of their fragments; False if some did not come."""
        window = self.run.rules.fetch_window
        self._open, self._asked = lacking | {(fragment, -1) for fragment, _ in lacking}, len(lacking)
        for fragment in sorted({fragment for fragment, _ in lacking}):
            numbers = sorted(number for of, number in lacking if of == fragment)
            asks = [numbers[start : start + window] for start in range(0, len(numbers), window)]
            for ask in ([], *asks):
                if not await self._says(donor, m.Ask(fragment, tuple(ask))):
                    return False
        await self._wait(lambda: not self._open, self.run.rules.answered_within, give_up_at)
        came, self._open = not self._open, set()
        return came

    def _take_whole(self) -> None:
        """Record the version of each fragment whose slices are all at that of its head, with the head's digests."""
        for fragment, (state, digests) in self._heads.items():
            parts = [self._parts.get((fragment, n), (None, "")) for n in range(len(self.run.rules.fragments[fragment]))]
            if any(version != state.version for version, _ in parts):
                continue
            if digests and [digest for _, digest in parts] != list(digests):
                log.warning("fragment %d: slices of %s don't have the digests that it told", fragment, self._donor)
                self._parts = {place: part for place, part in self._parts.items() if place[0] != fragment}
                continue
            self.versions[fragment], self._final[fragment] = state.version, final(state, self.run.rules)

    async def _says(self, donor: str, ask: m.Ask) -> bool:
        header, _ = pack(ask, About(self._transport.peer_id, self.run.rules), self.run.token)
        try:
            await self._transport.send(donor, header)
        except (Refusal, Unreachable) as error:
            log.debug("the peer %s was not asked: %s", donor, error)
            return False
        return True

    # -- what comes

    def read(self, sender: str, header: bytes) -> tuple[Any, int]:
        body = opened(header, self.run.token)
        if isinstance(body, int):
            return Long(), body
        message = self._checked(unpack(body, About(sender, self.run.rules), Rolls()))
        return message, self._slices.nbytes(message)

    def check(self, sender: str, message: Any, payload: memoryview | None) -> Any:
        if isinstance(message, Long):
            assert payload is not None, "the length of its payload was checked"
            message = self._checked(unpack(payload, About(sender, self.run.rules), Rolls()))
        awaited = isinstance(message, m.Told) or (message.fragment, getattr(message, "number", -1)) in self._open
        if sender != self._donor or not awaited:
            raise Refusal("this observer did not ask for it")
        if isinstance(message, m.Part) and payload is not None:
            if why := unfit(payload, "fp32", payload.nbytes // 4):
                raise Refusal(f"the Part is refused: {why}")
            return replace(message, payload=payload)
        return message

    def _checked(self, message: m.Message | Folded) -> m.Message:
        if not isinstance(message, m.Told | m.Head | m.Part):
            raise Refusal("this peer only observes the run")
        if why := misplaced(message, self.run.rules):
            raise Refusal(f"the {type(message).__name__} is refused: {why}")
        if isinstance(message, m.Head) and not is_sound(message.state):
            raise Refusal("the Head is refused: its state does not have the chain of its version")
        return message

    async def take(self, sender: str, message: Any) -> None:
        match message:
            case m.Told():
                self._answers.append(message)
            case m.Head(fragment=fragment, state=state, digests=digests):
                self._heads[fragment] = state, digests
                self._open.discard((fragment, -1))
            case m.Part(fragment=fragment, version=version, number=number, payload=payload):
                # no fragment has a version in `_slices`, so its slices are filled in place: in `theta`
                filled = self._slices.fill(Fill(fragment, version, number, payload))
                self._parts[fragment, number] = version, filled.digest
                self._open.discard((fragment, number))
                self._awaited = set(range(len(self._open)))
                self._report()
        self._heard()
