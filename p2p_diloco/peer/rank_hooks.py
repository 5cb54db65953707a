"""The hooks of a peer with several ranks. Rank 0 decides, and the other ranks follow with their parts of the model.

Law: `hook` decides what a step does, and runs only on rank 0. Every rank makes the same calls (a step, for example).
Another rank communicates only with rank 0: it announces each call there, and then carries out rank 0's commands on its
part of the model, until rank 0 tells it to go on. A rank that ends, or makes a different call, ends this peer and no
other.

A rank on another host than rank 0 can't map the peer's shared memory. It has memory of its own, of which only the pages
of its part of the model are used; `LocalModel` computes on it as on shared memory. Values travel over the connection to
rank 0, a bounded piece at a time: the rank asks rank 0 to write or to read values, and rank 0 serves such requests
while it waits for the rank's answer to a command.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from p2p_diloco import errors
from p2p_diloco.errors import P2PDilocoError, RankDied
from p2p_diloco.node.channel import ChannelClosed, Message, TrainerEnd
from p2p_diloco.node.shared import SharedMemory, borrow, create, numel_of, shareable
from p2p_diloco.peer.hook import Hook
from p2p_diloco.peer.local import LocalModel
from p2p_diloco.peer.metrics import Standing
from p2p_diloco.peer.progress import Blend
from p2p_diloco.tensors import flat as flats
from p2p_diloco.tensors.flat import as_bytes, tensor_over

RANK_S = 600.0
"""Deadline for a rank to make the call that the others have made; torch's collectives have the same deadline."""
TELL_EVERY_S = 30.0
"""Seconds between two log lines that name the rank that rank 0 waits for."""
WAIT_S = 60.0
"""Seconds of each wait for rank 0. Waits are repeated without a limit, because rank 0 may wait for other peers."""
LEAVING = "close(), or the end of the with block,"
"""The name of the call by which a rank leaves the run."""

log = logging.getLogger("p2p_diloco")


class RankLink:
    """One end of the connection. `who` is the name of the rank at the other end."""

    def __init__(self, who: str, sock: socket.socket) -> None:
        self._who, self._connection = who, TrainerEnd(sock)

    def send(self, kind: str, **values: object) -> None:
        """Send a message to the other rank.

        Raises:
            RankDied: the other rank has ended.
        """
        try:
            self._connection.send({"kind": kind, **values})
        except ChannelClosed:
            raise self.died() from None

    def receive(self, timeout_s: float) -> Message | None:
        """Wait for the other rank's next message. None if no message comes in time.

        Raises:
            RankDied: the other rank has ended.
            P2PDilocoError: the error with which the other rank failed.
        """
        try:
            message = self._connection.receive(timeout_s)
        except ChannelClosed:
            raise self.died() from None
        if message is not None and message["kind"] == "error":
            raise errors.from_wire(message["error"])
        return message

    def fail(self, error: P2PDilocoError) -> None:
        """Send the error with which this rank failed, if the other rank still listens."""
        with suppress(ChannelClosed):
            self._connection.send({"kind": "error", "error": error.to_wire()}, timeout_s=1.0)

    def died(self) -> RankDied:
        """The error to raise because the other rank has ended."""
        return RankDied(f"{self._who} has ended", mend="see its log, and start the group again")

    def close(self) -> None:
        """Close the connection. The other rank notices it at its next call."""
        self._connection.close()


class Rank0Client(RankLink):
    """This rank's connection to rank 0."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        super().__init__("rank 0, which speaks for this peer,", sock)
        self._rank, self._socket = rank, sock

    @property
    def is_near(self) -> bool:
        """Whether rank 0 is on this machine."""
        return shareable(self._socket)

    def memory(self, numel: int) -> SharedMemory:
        """Receive the memory that rank 0 shares with its node; from another machine, make memory of this rank's own,
        for `numel` elements. Call this before anything else is received.

        Raises:
            RankDied: rank 0 has ended.
        """
        try:
            fd = borrow(self._socket) if self.is_near else create(numel)
        except OSError:
            raise self.died() from None
        try:
            return SharedMemory(fd, numel_of(fd))
        finally:
            os.close(fd)

    def next(self) -> Message:
        """Wait for rank 0's next message. There is no deadline, because rank 0 may wait for other peers.

        Raises:
            RankDied: rank 0 has ended.
            P2PDilocoError: the error with which rank 0 ended the call.
        """
        while (message := self.receive(WAIT_S)) is None:
            pass
        return message

    def failed(self, error: BaseException) -> None:
        """Tell rank 0 that this rank can't go on, if rank 0 still listens."""
        if not isinstance(error, P2PDilocoError):
            error = P2PDilocoError(f"rank {self._rank} failed: {error!r}", mend="see the log of that rank")
        self.fail(error)


class RankHook(ABC):
    """What the hooks of all ranks have in common: the calls that every rank makes, with the methods of `Hook`. Between
    two calls all ranks see the same position in the run, so that a loop that ends with the run ends at the same step on
    all ranks."""

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        """The position of all ranks in the run at the end of the last call."""
        self._reported: dict[str, Any] = {}

    def report(self, loss: float | None, samples: int | None, held_out_loss: float | None = None) -> None:
        """Record the loss and the samples of this rank's share of the next step. The peer reports the samples of all
        ranks together, their mean loss, and rank 0's held-out loss."""
        self._reported |= {} if loss is None else {"loss": loss}
        self._reported |= {} if samples is None else {"samples": samples}

    def step(self) -> None:
        """Called after each inner step."""
        reported, self._reported = self._reported, {}
        self._call("optimizer.step()", _step, **reported)

    def synchronise(self) -> None:
        """Exchange the whole model now, as `Hook.synchronise` does."""
        self._call("force_sync()", lambda hook, _: hook.synchronise())

    def global_values(self) -> dict[str, Tensor]:
        """A copy of this rank's part of the global parameters. The node writes none of them during the copy."""
        values: dict[str, Tensor] = self._call("global_state_dict()", lambda hook, _: hook.global_values())
        return values

    def leave(self, last: Callable[[Hook], None]) -> None:
        """Have rank 0 call `last`, which makes the peer's last exchange."""
        self._call(LEAVING, lambda hook, _: last(hook))

    @abstractmethod
    def _call(self, name: str, act: Callable[[Hook, Sequence[Message]], Any], **values: object) -> Any:
        """Make a call that every rank makes. Rank 0 calls `act` with its hook and the `values` of all ranks, while the
        others carry out its commands. Returns what the call has on this rank."""


def _step(hook: Hook, reports: Sequence[Message]) -> None:
    losses, samples = ([one[key] for one in reports if key in one] for key in ("loss", "samples"))
    hook.report(sum(losses) / len(losses) if losses else None, sum(samples) if samples else None)
    hook.step()


class RankNHook(RankHook):
    """The hook of a rank other than 0. Its `standing` is the position that rank 0 sent last. `save`:
    `InnerState.save`."""

    def __init__(self, rank0: Rank0Client, local: LocalModel | FarModel, save: Callable[..., None]) -> None:
        super().__init__(Standing())
        self._rank0, self._local, self._save = rank0, local, save
        self.uncounted = 0  # rank 0 warns for all
        self._read: dict[str, Tensor] = {}  # the global values that the last call has read

    def pause(self) -> AbstractContextManager[None]:
        """A block in which no inner step is made. It does nothing here, because rank 0 tells the node."""
        return nullcontext()

    def count_on(self, totals: Mapping[str, float]) -> None:
        """Do nothing, because rank 0 counts for all ranks."""

    def serve(self) -> None:
        """Carry out rank 0's commands until rank 0 tells all ranks to go on."""
        while (message := self._rank0.next())["kind"] != "go on":
            try:
                result = self._carried_out(message)
            except BaseException as error:
                self._rank0.failed(error)
                raise
            self._rank0.send("done", result=result)
        self.standing = Standing.from_wire(message["standing"])

    def _call(self, name: str, act: object, **values: object) -> Any:
        self._rank0.send("call", call=name, **values)
        self.serve()
        read, self._read = self._read, {}
        return read

    def _carried_out(self, command: Message) -> object:
        """Carry out a command, which is the name of a method of `LocalModel`, or `save`. Returns the method's result;
        global values stay here."""
        kind = command.pop("kind")
        if kind == "save":
            self._save(**command)
            return None
        values = command["values"]
        if kind == "merge":
            values[0] = {index: Blend(blend) for index, blend in values[0].items()}
        result: Any = getattr(self._local, kind)(*values)
        if kind != "global_values":
            return result
        self._read = result
        return None


# -- a rank on another host than rank 0

PIECE_BYTES = 8 << 20
"""The most bytes of values in a message."""

Range = tuple[int, int]
"""Elements of the flat vector: start, stop."""


class FarModel:
    """The part of a model's parameters that a rank on another host holds. Its methods are those of `LocalModel`.

    `theta`, `base`, `delta`: this rank's own memory, [layout.numel] each, on which `own` computes. Between two calls,
    this `theta` has the values that the model loaded last, even of slices whose θ has changed since on rank 0; so a
    base never has to be sent.
    """

    def __init__(self, own: LocalModel, rank0: Rank0Client, theta: Tensor, base: Tensor, delta: Tensor) -> None:
        self._own, self._rank0 = own, rank0
        self._theta, self._base, self._delta = theta, base, delta

    def write_theta(self) -> None:
        """Copy this rank's parameters into the peer's θ."""
        self._own.write_theta()
        self._give("theta", self._theta, self._own.ranges(self._own.slices, spoken=True))

    def merge(self, blends: Mapping[int, Blend], kept: Collection[int] = ()) -> None:
        """Load new global values, as `LocalModel.merge` does. If that needs the Δ of a parameter that several ranks
        hold, and another rank has written it, that Δ comes from rank 0, too."""
        del kept  # `base` of this rank has the loaded values of every slice in `blends`
        changed = self._own.ranges(blends)
        _copy(self._theta, self._base, changed)
        self._get("theta", self._theta, changed)
        sent = [index for index, blend in blends.items() if blend.reads_sent]
        self._get("delta", self._delta, self._own.ranges(sent, spoken=False))
        self._own.merge(blends, blends.keys())

    def write_delta(self, slices: Collection[int], kept: Collection[int] = ()) -> bool:
        """Compute this rank's pseudo-gradients, and write them into the peer's memory. Returns whether they may be
        sent."""
        del kept
        sound = self._own.write_delta(slices)
        self._give("delta", self._delta, self._own.ranges(slices, spoken=True))
        return sound

    def global_values(self, kept: Collection[int] = ()) -> dict[str, Tensor]:
        """A copy of this rank's part of the global parameters, as `LocalModel.global_values` makes it."""
        self._look(kept)
        return self._own.global_values(self._own.slices)

    def keep_values(self, kept: Collection[int] = ()) -> None:
        """Keep this rank's part of the global parameters, as `LocalModel.keep_values` does."""
        self._look(kept)
        self._own.keep_values(self._own.slices)
        self._theta = self._base = self._delta = torch.empty(0, dtype=torch.float32, device="cpu")

    def _look(self, kept: Collection[int]) -> None:
        """Put into `base` the values that a rank on rank 0's host would read: for the `kept` slices the values that
        were loaded last, for all other slices the values of the peer's θ."""
        _copy(self._theta, self._base, self._own.ranges(kept))
        self._get("theta", self._base, self._own.ranges(set(self._own.slices) - set(kept)))

    # -- what is sent

    def _give(self, which: str, values: Tensor, ranges: Iterable[Range]) -> None:
        """Write these ranges of values into the peer's memory `which`. A piece is sent only after rank 0 is ready to
        read it, because rank 0 serves one rank after another, and a connection that nobody reads would break."""
        for piece in pieces(ranges, values.element_size()):
            self._rank0.send("put", which=which, ranges=piece)
            self._rank0.next()
            self._rank0.send("values", values=packed(values, piece))

    def _get(self, which: str, values: Tensor, ranges: Iterable[Range]) -> None:
        """Read these ranges of the peer's memory `which` ("theta" or "delta") into the same ranges of `values`."""
        for piece in pieces(ranges, values.element_size()):
            self._rank0.send("get", which=which, ranges=piece)
            unpack(self._rank0.next()["values"], values, piece)


def pieces(ranges: Iterable[Range], element_bytes: int) -> Iterator[list[Range]]:
    """Cut ranges into lists of at most `PIECE_BYTES` together."""
    room = most = PIECE_BYTES // element_bytes
    piece: list[Range] = []
    for start, stop in ranges:
        while start < stop:
            end = min(stop, start + room)
            piece.append((start, end))
            room -= end - start
            start = end
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def packed(values: Tensor, ranges: Iterable[Range]) -> bytes:
    """The bytes of these ranges of `values`, one range after another."""
    return b"".join(as_bytes(values[start:stop]) for start, stop in ranges)


def unpack(sent: bytes, values: Tensor, ranges: Iterable[Range]) -> None:
    """Write the bytes `sent`, which `packed` has made from these ranges, into the same ranges of `values`."""
    flat, at = tensor_over(sent).view(values.dtype), 0
    for start, stop in ranges:
        values[start:stop] = flat[at : at + stop - start]
        at += stop - start


def _copy(source: Tensor, target: Tensor, ranges: Iterable[Range]) -> None:
    for start, stop in ranges:
        flats.copy(source[start:stop], target[start:stop])


# -- rank 0


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


Local = LocalModel | Rank0Model
"""The parameters of a peer: in this process, or of all its ranks."""


class Rank0Hook(RankHook):
    """Rank 0's hook."""

    def __init__(self, hook: Hook, ranks: OtherRanks) -> None:
        super().__init__(hook.standing)
        self._hook, self._ranks = hook, ranks

    def _call(self, name: str, act: Callable[[Hook, Sequence[Message]], Any], **values: object) -> Any:
        """Wait until all other ranks have made the call `name`, and call `act`. Then tell them the peer's position in
        the run, and all ranks go on.

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
            made = act(self._hook, [values, *said])
            self.standing = self._hook.standing
            self._ranks.tell("go on", standing=self.standing)
        return made

    def report(self, loss: float | None, samples: int | None, held_out_loss: float | None = None) -> None:
        """The same; the held-out loss is recorded at once."""
        if held_out_loss is not None:
            self._hook.report(None, None, held_out_loss)
        super().report(loss, samples)

    def pause(self) -> AbstractContextManager[None]:
        """A block in which no inner step is made, as in `Hook.pause`."""
        return self._hook.pause()

    @property
    def uncounted(self) -> int:
        """The inner steps whose progress no merged commit has counted."""
        return self._hook.uncounted

    def count_on(self, totals: Mapping[str, float]) -> None:
        """Add the totals from before a restart to the counters, as `Hook.count_on` does."""
        self._hook.count_on(totals)
        self.standing = self._hook.standing
