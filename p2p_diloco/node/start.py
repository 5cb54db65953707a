"""A node from the trainer's first message until its end: the one way in which it founds a run, joins one, starts again
from a checkpoint, or finds that its run has ended.

Law: each step is complete before the next one begins.

    1  the trainer's settings and model come over the channel                 `run_node`
    2  the transport is opened, to an open run or as a private run's member   `swarm.entered`
    3  a checkpoint is read, if there is one                                  `take_part`
    4  the run is found, or founded                                           `Joining.find_run`
    5  the trainer learns the run's settings, and writes its parameters       `take_part`
    6  the parts are made, and exchange messages with other peers             `Participation`
    7  the first state: the checkpoint's, the founder's or another peer's;
       the trainer may start, unless the run has ended                        `beginning`

An observer takes steps 1, 2 and 4, and then only reads (`observing`).
"""

from __future__ import annotations

import asyncio
import logging

import torch

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.net.invitation_used import on_this_machine
from p2p_diloco.node.channel import Message, NodeEnd
from p2p_diloco.node.common import Common
from p2p_diloco.node.joining import Joining
from p2p_diloco.node.observing import follow
from p2p_diloco.node.participation import Participation
from p2p_diloco.node.privacy import OPEN, keep_notice, watch_revocations
from p2p_diloco.node.saving import Checkpoint, read_checkpoint
from p2p_diloco.node.setup import Setup
from p2p_diloco.node.shared import SharedMemory
from p2p_diloco.node.signatures import Signatures
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.node.swarm import Swarm, entered, until_one_ends
from p2p_diloco.tensors.flat import Threads, usual

log = logging.getLogger(__name__)


async def run_node(channel: NodeEnd, messages: asyncio.Queue[Message], memory_fd: int) -> None:
    """Take part in a run, or observe it, until cancelled.

    Raises:
        P2PDilocoError: this peer can't take part in the run, or can't go on.
    """
    setup = Setup.from_wire((await messages.get())["setup"])
    run_id, observes = setup.local.run_id, setup.local.role == "observer"
    shared = SharedMemory(memory_fd, setup.numel)
    async with entered(setup, channel.progress) as swarm:
        transport = swarm.transport
        channel.send("transport", peer_id=transport.peer_id, addresses=transport.addresses())
        tasks = [(follow if observes else take_part)(setup, channel, messages, shared, swarm)]
        if swarm.access is not None:
            member = swarm.access.member
            tasks.append(watch_revocations(transport, run_id, member))
            if not observes:
                tasks.append(keep_notice(transport.plain, run_id, member.run))
        await until_one_ends(tasks, swarm.dead)


async def take_part(
    setup: Setup, channel: NodeEnd, messages: asyncio.Queue[Message], shared: SharedMemory, swarm: Swarm
) -> None:
    """Find or found the run, and take part in it until cancelled."""
    local, transport = setup.local, swarm.transport
    saved = await asyncio.get_running_loop().run_in_executor(None, _checkpoint, local)
    founding, founded = setup.asked, None
    if saved is not None:
        founding = RunConfig(**{**saved.config_for(local.run_id), **setup.asked.given})
        founded = saved.founded if saved.run_id == local.run_id else None
    joined = await Joining(setup, swarm, channel.progress).find_run(founding, founded)
    run = joined.run
    if swarm.access is None and not on_this_machine(local):
        log.warning("the run %s is OPEN: %s", run.run_id, OPEN)
    checkpoint = None if saved is None else str(saved.path)
    channel.send("run", config=run.config.to_wire(), layout=run.layout.to_wire(), checkpoint=checkpoint)
    theta, base = torch.zeros(run.layout.numel, device="cpu"), None
    if setup.specs is not None:
        answer = await messages.get()
        assert answer["kind"] == "theta", "the trainer writes its parameters before anything else"
        numel = run.layout.numel  # the memory is longer if the run keeps buffers local
        theta, base = shared.theta[:numel], shared.base[:numel]
    signatures = Signatures(transport.peer_id, transport, run.token)
    work = SliceWork(run, theta, signatures.of_mean, base, Threads(local.node_threads or usual()))
    grant = "" if swarm.access is None else swarm.access.member.own.id.hex()
    common = Common(local, joined, transport, shared, work, swarm.inbox.refusals, grant)
    await Participation(common, joined, saved, channel, swarm.inbox).live(messages)


def _checkpoint(local: PeerConfig) -> Checkpoint | None:
    """Read the checkpoint that this peer starts from; None if there is none."""
    if (saved := read_checkpoint(local)) is None:
        return None
    if local.from_checkpoint is None and saved.run_id != local.run_id:
        wrong, mend = f"holds checkpoints of the run {saved.run_id}", f"name another folder, or run_id={saved.run_id}"
        raise ConfigError(wrong, key="checkpoint_dir", value=local.checkpoint_dir, mend=mend)
    log.info("starting from the checkpoint %s", saved.path)
    return saved
