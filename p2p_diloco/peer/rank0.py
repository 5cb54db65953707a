"""Rank 0 of a group of processes that is one peer. It decides, and the other ranks follow with their parts of the
model.

Law: `hook` decides what a step does, and runs only here. Every rank makes the same calls (a step, for example); the
other ranks then carry out rank 0's commands until it tells them to go on. A rank that ends, or makes a different call,
ends this peer and no other.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor

from p2p_diloco.errors import P2PDilocoError, RankDied
from p2p_diloco.node.channel import Message
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.progress import Blend
from p2p_diloco.peer.rank_n import LEAVING, RankLink, packed, unpack

RANK_S = 600.0
"""Deadline for a rank to make the call that the others have made; torch's collectives have the same deadline."""
TELL_EVERY_S = 30.0
"""Seconds between two log lines that name the rank that rank 0 waits for."""

log = logging.getLogger("p2p_diloco")


class OtherRanks:
    """Rank 0's connections to the other ranks, in the order of the ranks."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._links = [RankLink(f"rank {rank} of this peer", sock) for rank, sock in enumerate(sockets, start=1)]
        self.memory: Mapping[str, Tensor] = {}
        """The values that ranks on other hosts may read and write here, by name: the peer's θ and Δ."""

    def tell(self, kind: str, **values: object) -> None:
        """Send a message to all other ranks.

        Raises:
            RankDied: one of them has ended.
        """
        for link in self._links:
            link.send(kind, **values)

    def answers(self) -> list[Message]:
        """Receive the next message of each other rank.

        Raises:
            RankDied: one of them has ended, or sends nothing.
            P2PDilocoError: the error with which one of them failed.
        """
        return [self._answer(rank, link) for rank, link in enumerate(self._links, start=1)]

    def _answer(self, rank: int, link: RankLink) -> Message:
        """Receive the next message of a rank. Until it comes, carry out the rank's requests to write or read values in
        `memory`; only a rank on another host makes such requests."""
        while "which" in (message := self._next(rank, link)):
            values, ranges = self.memory[message["which"]], message["ranges"]
            if message["kind"] == "put":
                link.send("go")
                unpack(self._next(rank, link)["values"], values, ranges)
            else:
                link.send("values", values=packed(values, ranges))
        return message

    def _next(self, rank: int, link: RankLink) -> Message:
        began = time.monotonic()
        while time.monotonic() - began < RANK_S:
            if (message := link.receive(TELL_EVERY_S)) is not None:
                return message
            log.info("rank 0 still waits for a message from rank %d", rank)
        mend = "make the same calls of the peer on every rank"
        raise RankDied(f"rank {rank} has sent nothing to rank 0 for {RANK_S:g} s", mend=mend)

    def together(self, kind: str, own: Callable[[], None], **values: object) -> list[Message]:
        """Have all ranks, this one included, carry out the command `kind`. `own` carries it out on this rank. Returns
        the other ranks' answers."""
        self.tell(kind, **values)
        own()
        return self.answers()

    @contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """A block whose errors are also sent to the other ranks, so that their calls end with the same error."""
        try:
            yield
        except P2PDilocoError as error:
            for link in self._links:
                link.fail(error)
            raise

    def close(self) -> None:
        """Close the connections. The other ranks notice it at their next call."""
        for link in self._links:
            link.close()


class Rank0Model:
    """The parameters of all ranks, as one model. Each rank carries out its part of each method of `LocalModel`, whose
    name is the command (`RankNHook.serve`)."""

    def __init__(self, own: LocalModel, ranks: OtherRanks) -> None:
        self._own, self._ranks = own, ranks

    def write_theta(self) -> None:
        """Let every rank copy its parameters into θ."""
        self._together("write_theta")

    def merge(self, blends: Mapping[int, Blend], kept: Collection[int] = ()) -> None:
        """Let every rank load new global values."""
        if blends:
            self._together("merge", blends, kept)

    def write_delta(self, slices: Collection[int], kept: Collection[int] = ()) -> bool:
        """Let every rank write its pseudo-gradients. Returns whether those of all ranks may be sent."""
        return all(self._together("write_delta", slices, kept))

    def global_values(self, kept: Collection[int] = ()) -> dict[str, Tensor]:
        """Let every rank read its part of the global parameters. Returns this rank's part."""
        values: dict[str, Tensor] = self._together("global_values", kept)[0]
        return values

    def keep_values(self, kept: Collection[int] = ()) -> None:
        """Let every rank keep its part of the global parameters."""
        self._together("keep_values", kept)

    def _together(self, method: str, *values: object) -> list[Any]:
        """Have all ranks call this method. Returns what each call returned, this rank's first."""
        own: list[Any] = []
        method_here: Callable[..., Any] = getattr(self._own, method)
        answers = self._ranks.together(method, lambda: own.append(method_here(*values)), values=values)
        return own + [answer["result"] for answer in answers]


class Rank0Hook:
    """Rank 0's hook. Every rank makes the same calls. Between two calls all ranks see the same position in the run, so
    that a loop that ends with the run ends at the same step on all ranks. `after`: called after each step, before the
    other ranks go on."""

    def __init__(self, hook: Hook, ranks: OtherRanks, after: Callable[[], None]) -> None:
        self._hook, self._ranks, self._after = hook, ranks, after
        self._loss: float | None = None
        self._samples: int | None = None
        self.standing = hook.standing
        """The position of all ranks in the run at the end of the last call."""

    @contextmanager
    def _call(self, name: str) -> Iterator[list[Message]]:
        """A block around a call that every rank makes, such as a step. At its beginning it waits until all other ranks
        have made the call `name`, and yields their messages. At its end it tells them the peer's position in the run,
        and all ranks go on.

        Raises:
            RankDied: a rank has ended, or makes another call.
        """
        with self._ranks.told_of_errors():
            said = self._ranks.answers()
            for rank, message in enumerate(said, start=1):
                if message["call"] != name:
                    raise RankDied(
                        f"rank {rank} calls {message['call']} where rank 0 calls {name}",
                        mend="make the same calls of the peer on every rank, in the same order",
                    )
            yield said
            self.standing = self._hook.standing
            self._ranks.tell("go on", standing=asdict(self.standing))

    def report(self, loss: float | None, samples: int | None, held_out_loss: float | None = None) -> None:
        """Record the loss and the samples of this rank's share of the next step. The peer reports the samples of all
        ranks together, their mean loss, and this rank's held-out loss."""
        if held_out_loss is not None:
            self._hook.report(None, None, held_out_loss)
        self._loss = loss if loss is not None else self._loss
        self._samples = samples if samples is not None else self._samples

    def step(self) -> None:
        """Called after each inner step, on every rank. Does the work of `Hook.step` for the whole peer."""
        with self._call("optimizer.step()") as said:
            losses = [one for one in (self._loss, *(message["loss"] for message in said)) if one is not None]
            samples = [one for one in (self._samples, *(message["samples"] for message in said)) if one is not None]
            self._loss = self._samples = None
            self._hook.report(sum(losses) / len(losses) if losses else None, sum(samples) if samples else None)
            self._hook.step()
            self._after()

    def pause(self) -> AbstractContextManager[None]:
        """A block in which no inner step is made, as in `Hook.pause`."""
        return self._hook.pause()

    def synchronise(self) -> None:
        """Exchange the whole model now, as `Hook.synchronise` does. Every rank must call this."""
        with self._call("force_sync()"):
            self._hook.synchronise()

    def global_values(self) -> dict[str, Tensor]:
        """A copy of this rank's part of the global parameters. Every rank must call this."""
        with self._call("global_state_dict()"):
            return self._hook.global_values()

    @property
    def uncounted(self) -> int:
        """The inner steps whose progress no merged commit has counted."""
        return self._hook.uncounted

    def leave(self, last: Callable[[Hook], None]) -> None:
        """Call `last`, which makes the peer's last exchange. Every rank must call this."""
        with self._call(LEAVING):
            last(self._hook)

    def count_on(self, totals: Mapping[str, float]) -> None:
        """Add the totals from before a restart to the counters, as `Hook.count_on` does."""
        self._hook.count_on(totals)
        self.standing = self._hook.standing
