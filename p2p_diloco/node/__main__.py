"""Runs the node's process.

Law: this process always ends when the channel ends, so it never outlives the trainer. A peer starts it, with two
inherited descriptors (the channel and the shared memory); it is not started by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

import uvloop

from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.node.channel import ChannelClosed, Message, NodeEnd

LEAVE_WITHIN_S = 5.0
"""Seconds that the node has to leave the run after the trainer's end; then the node's process ends."""

MMAPPED_FROM = 32 * 2**20
"""Bytes. A longer piece of memory is returned to the kernel once it is freed; glibc allows no higher value."""
FREE_KEPT = 256 * 2**20
"""Bytes of free memory that are kept at the end of the heap."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

PARENT_EVERY_S = 0.25
"""Seconds between two checks whether the trainer's process is alive."""

_running = threading.Event()
"""Set once the event loop watches for the trainer's end."""

log = logging.getLogger("p2p_diloco.node")


def main() -> int:
    """Run a node until it ends; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m p2p_diloco.node", description="Runs the node's process.")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--log-level", type=int, default=logging.INFO)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the trainer, which tells the node what to do
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("p2p_diloco").setLevel(options.log_level)
    threading.Thread(target=_end_with, args=(options.parent_pid,), daemon=True).start()
    gc.disable()  # while modules are loaded: there is no garbage to collect yet
    torch = import_torch()
    torch.set_num_threads(1)  # the other cores are for the trainer
    _keep_freed_memory()
    sock = socket.socket(fileno=options.channel_fd)
    return uvloop.run(_run(sock, options.memory_fd, options.parent_pid))


TORCH_LATER = ("torch._meta_registrations", "torch._native")
"""Parts of torch that give the shapes of results to graphs that are traced, and some operations to GPUs. They take a
quarter of the time in which torch is imported, and 18 MB. They are loaded at the first question for one of their names;
in a node, which computes on the CPU and traces nothing, nobody asks. The second one imports the first one in versions
of torch that have it."""


class _Later(MetaPathFinder):
    """Finds the modules in `TORCH_LATER`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in TORCH_LATER else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def import_torch() -> ModuleType:
    """Import torch, without those of its parts that no node uses. This takes seconds, in which the trainer may end."""
    sys.meta_path.insert(0, later := _Later())
    import torch

    sys.meta_path.remove(later)
    return torch


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory, so that the tensor work on one slice can use the memory that the slice before has
    freed.

    By default glibc returns large pieces of memory to the kernel and gets them back page by page, which takes longer
    than the work. Without glibc this has no effect.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, MMAPPED_FROM)
    mallopt(_M_TRIM_THRESHOLD, FREE_KEPT)


def _end_with(parent_pid: int) -> None:
    """Watch the parent process, in a thread, and end this process once the parent has ended. This works even while this
    process still starts, and when its event loop is stuck."""
    while os.getppid() == parent_pid:
        time.sleep(PARENT_EVERY_S)
    if _running.is_set():  # the loop has noticed too, and leaves the run
        time.sleep(LEAVE_WITHIN_S + 1.0)
    os._exit(1)


async def _run(sock: socket.socket, memory_fd: int, parent_pid: int) -> int:
    from p2p_diloco.node.participation import run_node

    gc.freeze()  # scanning all of torch's objects again and again would delay the loop by 0.1 s each time
    gc.enable()
    _running.set()
    channel = await NodeEnd.over(sock)
    messages: asyncio.Queue[Message] = asyncio.Queue()
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    departing = asyncio.create_task(asked.wait())
    alone = asyncio.create_task(_until_left_alone(channel, messages, asked, parent_pid))
    running = asyncio.create_task(run_node(channel, messages, memory_fd))
    await asyncio.wait({running, departing, alone}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        channel.left_alone = not asked.is_set()
        running.cancel()  # cancelled, it leaves the run
        await asyncio.wait({running, alone}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({running}, timeout=LEAVE_WITHIN_S)
    status = await _explain(running, channel)
    await channel.close()
    return status


async def _until_left_alone(
    channel: NodeEnd, messages: asyncio.Queue[Message], asked: asyncio.Event, parent_pid: int
) -> None:
    """Put the trainer's messages into the queue `messages`; return when the trainer's process has ended. Set the event
    `asked` when the trainer asks the node to leave the run.

    A process that the trainer forked may keep the channel open after the trainer's end, so the trainer's process id is
    watched too.
    """

    async def read() -> None:
        with contextlib.suppress(ChannelClosed):
            while (message := await channel.receive())["kind"] != "depart":
                messages.put_nowait(message)
            asked.set()
            await channel.receive()

    reading = asyncio.create_task(read())
    while not reading.done() and os.getppid() == parent_pid:
        await asyncio.wait({reading}, timeout=PARENT_EVERY_S)


async def _explain(running: asyncio.Task[None], channel: NodeEnd) -> int:
    """If the node ended with an error, send the error to the trainer. Returns the exit status."""
    error = None if not running.done() or running.cancelled() else running.exception()
    if error is None:
        return 0
    if isinstance(error, P2PDilocoError):
        log.debug("the node ends with an error: %s", error)
        reason = error
    else:
        log.error("the node failed", exc_info=error)
        reason = P2PDilocoError(f"the node failed: {error!r}", mend="report this with the log above")
    channel.send("error", error=reason.to_wire())
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(channel.flush(), 1.0)
    return reason.exit_code


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)  # at once: neither threads nor clean-up may delay the end once the trainer has ended
