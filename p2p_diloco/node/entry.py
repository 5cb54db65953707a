"""Brings a node into its run, from the trainer's first message on: opens the transport, reads the checkpoint, finds
the run, and makes the tensors.

Law: each step is made once, in order, and is complete before the next one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import torch

from p2p_diloco.addresses import is_loopback
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError, GaveUpWaiting, NoBootstrapReached, NodeDied, P2PDilocoError
from p2p_diloco.net.certificates import RunKey
from p2p_diloco.net.hivemind import HivemindTransport
from p2p_diloco.net.interface import Limits, Transport, Unreachable
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.invitation_used import on_this_machine
from p2p_diloco.net.invited import (
    check_role,
    founders_key,
    founders_own,
    key_of,
    read_invitation,
    revocations_of,
    write_files,
)
from p2p_diloco.node import ends, revoking
from p2p_diloco.node.access import Access
from p2p_diloco.node.channel import Message, NodeEnd
from p2p_diloco.node.common import Common
from p2p_diloco.node.inbox import Inbox
from p2p_diloco.node.joining import Joining
from p2p_diloco.node.observing import Observer
from p2p_diloco.node.participation import Participation, until_one_ends
from p2p_diloco.node.privacy import OPEN, claim, founds_privately, keep_notice, refuse_if_private
from p2p_diloco.node.records import read_peers
from p2p_diloco.node.saving import Checkpoint, read_checkpoint
from p2p_diloco.node.setup import Setup
from p2p_diloco.node.shared import SharedMemory
from p2p_diloco.node.signatures import Signatures
from p2p_diloco.node.slice_work import SliceWork
from p2p_diloco.remembered import met_through, remembered
from p2p_diloco.tensors.threads import Threads, usual

PEERS_S, LOOK_EVERY_S = 5.0, 0.5
"""The most seconds for which `observing` looks for a peer of the run, and the seconds between two looks."""
CLOSE_S = 2.0
"""Deadline for closing the transport."""
LIMITS = Limits(header_bytes_max=2**20)
"""The transport's limits. Headers may be longer than usual, because a fetch lists every shard."""

log = logging.getLogger(__name__)


async def run_node(channel: NodeEnd, messages: asyncio.Queue[Message], memory_fd: int) -> None:
    """Take part in a run, or observe it, until cancelled.

    Raises:
        P2PDilocoError: this peer can't take part in the run, or can't go on.
    """
    setup = Setup.from_wire((await messages.get())["setup"])
    shared = SharedMemory(memory_fd, setup.numel)
    inbox = Inbox()
    dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    transport, access = await enter_swarm(setup, inbox, partial(_tell, channel), dead)
    inbox.knows(transport)
    try:
        channel.send("transport", peer_id=transport.peer_id, addresses=transport.addresses())
        takes_part = follow if setup.local.role == "observer" else take_part
        tasks = [takes_part(setup, channel, messages, shared, transport, inbox, access)]
        if access is not None:
            run_id, member = setup.local.run_id, access.member
            tasks.append(revoking.watch(transport, run_id, member))
            if setup.local.role != "observer":
                tasks.append(keep_notice(transport.plain, run_id, member.run))
        await until_one_ends([asyncio.create_task(task) for task in tasks], dead)
    finally:
        if dead.done():
            dead.exception()
        await close(transport)


def _tell(channel: NodeEnd, text: str) -> None:
    channel.send("progress", text=text)


async def enter_swarm(
    setup: Setup, inbox: Inbox, tell: Callable[[str], None], dead: asyncio.Future[None]
) -> tuple[HivemindTransport, Access | None]:
    """Start a transport, and become a member of the run if it is private. A peer that founds a private run also writes
    the run key and an invitation to disk. `tell` is called with a text about each step. If the transport dies later,
    the future `dead` gets an exception. Returns the transport, and the access to a private run; None in an open run.

    Raises:
        Refused: the run is private, and this peer has no invitation. ConfigError: an invitation or a run key can't be
        used. `_open_transport` raises further errors.
    """
    transport, access = await _entered(setup, inbox, tell, dead)
    transport.tell_reach()  # only of the transport that is kept
    return transport, access


async def _entered(
    setup: Setup, inbox: Inbox, tell: Callable[[str], None], dead: asyncio.Future[None]
) -> tuple[HivemindTransport, Access | None]:
    """Do the work of `enter_swarm`."""
    local = setup.local
    if local.invite is not None:
        invitation, packed = read_invitation(local), None
        if (key := key_of(local, invitation)) is not None:
            invitation, packed = founders_own(local.run_id, key), revocations_of(local, local.run_id, key)
        check_role(local, invitation)
        transport = await _open_transport(local, inbox, tell, dead, invitation)
        access = _access(transport, key)
        if packed is not None:
            access.member.revoke(packed)
        return transport, access
    transport = await _open_transport(local, inbox, tell, dead)
    try:
        if not await founds_privately(setup, transport):
            return transport, None
        key = founders_key(local.run_id)
        await claim(transport, local.run_id, key.public)
    except BaseException:
        await close(transport)
        raise
    await transport.close()  # this open transport would take messages of peers that are no members
    invitation = founders_own(local.run_id, key)
    transport = await _open_transport(local, inbox, tell, dead, invitation)
    try:
        stays = local.identity_path is not None and not transport.reach.private
        own = transport.addresses() if stays or not local.initial_peers else ()
        write_files(local.run_id, key, _named(local.initial_peers, own))
    except BaseException:
        await close(transport)
        raise
    return transport, _access(transport, key)


def _named(initial_peers: Sequence[str], own: Sequence[str]) -> Sequence[str]:
    """The addresses that an invitation names: the initial peers', and the founder's own as far as other machines may
    reach them. A machine without a network has only some for itself; they will do for a try."""
    return [*initial_peers, *(address for address in own if not is_loopback(address))] or own


def _access(transport: HivemindTransport, key: RunKey | None) -> Access:
    assert transport.membership is not None, "it was opened with an invitation"
    return Access(transport.membership, key)


async def close(transport: HivemindTransport) -> None:
    """Close a transport, in bounded time."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(transport.close(), CLOSE_S)


async def _open_transport(
    local: PeerConfig,
    inbox: Inbox,
    tell: Callable[[str], None],
    dead: asyncio.Future[None],
    invitation: Invitation | None = None,
) -> HivemindTransport:
    """Start a transport through the initial peers. If none of them answers, use addresses remembered from this run in
    their swarm; if one does, meet the peers at these addresses, too. If the transport's daemon dies later, the future
    `dead` gets an exception. `invitation`: to a private run; None for an open run.

    Raises:
        NoBootstrapReached: no initial peer and no remembered address answers.
    """

    def daemon_died(why: str) -> None:
        if not dead.done():
            dead.set_exception(NodeDied(why, mend="start this peer again"))

    async def through(initial_peers: Sequence[str]) -> HivemindTransport:
        settings = local.model_copy(update={"initial_peers": tuple(initial_peers)})
        transport = await HivemindTransport.create(
            inbox, settings, limits=LIMITS, invitation=invitation, on_daemon_death=daemon_died
        )
        transport.meet(remembered(local.run_id, met_through(local.initial_peers, transport.peer_id)))
        return transport

    tell("connecting to the swarm" if local.initial_peers else "starting a swarm of its own")
    try:
        return await through(local.initial_peers)
    except NoBootstrapReached as error:
        if not (known := remembered(local.run_id, local.initial_peers)):
            raise
        log.warning("none of the initial peers answers; trying %d addresses remembered from this run", len(known))
        try:
            return await through(known)
        except NoBootstrapReached:
            raise error from None  # name only the addresses that the user gave and can correct


async def take_part(
    setup: Setup,
    channel: NodeEnd,
    messages: asyncio.Queue[Message],
    shared: SharedMemory,
    transport: Transport,
    inbox: Inbox,
    access: Access | None = None,
) -> None:
    """Find or found the run, and take part in it until cancelled. `access`: to a private run; None in an open run."""
    saved = await _read_checkpoint(setup.local)
    founding, founded = setup.asked, None
    if saved is not None:
        founding = RunConfig(**{**saved.config_for(setup.local.run_id), **setup.asked.given})
        founded = saved.founded if saved.run_id == setup.local.run_id else None
    joining = Joining(setup, transport, inbox, lambda text: channel.send("progress", text=text), access)
    joined = await joining.find_run(founding, founded)
    run = joined.run
    if access is None and not on_this_machine(setup.local):
        log.warning("the run %s is OPEN: %s", run.run_id, OPEN)
    checkpoint = None if saved is None else str(saved.path)
    channel.send("run", config=run.config.to_wire(), layout=run.layout.to_wire(), checkpoint=checkpoint)
    threads = Threads(setup.local.node_threads or usual())
    theta, base = torch.zeros(run.layout.numel, device="cpu"), None
    if setup.specs is not None:
        answer = await messages.get()
        assert answer["kind"] == "theta", "the trainer writes its parameters before anything else"
        numel = run.layout.numel  # the memory is longer if the run keeps buffers local
        theta, base = shared.theta[:numel], shared.base[:numel]
    work = SliceWork(run, theta, Signatures(transport.peer_id, transport, run.token).of_mean, base, threads)
    grant = "" if access is None else access.member.own.id.hex()
    common = Common(setup.local, joined, transport, shared, work, inbox.refusals, grant)
    await Participation(common, joined, saved, channel, inbox).live(messages)


async def follow(
    setup: Setup,
    channel: NodeEnd,
    messages: asyncio.Queue[Message],
    shared: SharedMemory,
    transport: Transport,
    inbox: Inbox,
    access: Access | None = None,
) -> None:
    """Find the run, and read its global parameters whenever the trainer's process asks for them, until cancelled."""
    observer = await _observer(setup, transport, inbox, partial(_tell, channel), access)
    run, wait_s = observer.run, setup.local.wait_timeout
    channel.send("run", config=run.config.to_wire(), layout=run.layout.to_wire(), checkpoint=None)

    async def refreshed() -> dict[str, Any]:
        came = await observer.refresh(wait_s)
        shared.theta[: run.layout.numel].copy_(observer.theta)
        peers, traffic = await observer.peers(), transport.traffic
        shared.peers, shared.bytes_sent, shared.bytes_received = len(peers), traffic.bytes_sent, traffic.bytes_received
        return {
            "came": came,
            "epoch": observer.epoch,
            "digest": observer.model.digest,
            "finished": observer.finished,
        }

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
    inbox, dead = Inbox(), asyncio.get_running_loop().create_future()
    setup = Setup(RunConfig(), local, None)
    transport, access = await enter_swarm(setup, inbox, tell, dead)
    inbox.knows(transport)
    try:
        if access is not None:
            await _refuse_if_out(transport, local.run_id, access)
        elif not local.open:
            await refuse_if_private(transport, local.run_id)
        await _refuse_without_peers(transport, local.run_id)
        yield await _observer(setup, transport, inbox, tell, access)
    finally:
        if dead.done():
            dead.exception()
        await close(transport)


async def _refuse_if_out(transport: Transport, run_id: str, access: Access) -> None:
    """Raises Refused if this peer's invitation was revoked or has expired: no member would answer it."""
    with contextlib.suppress(Unreachable):
        await revoking.read(transport, run_id, access.member)
    revoking.refuse_if_out(access.member)


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
        with contextlib.suppress(Unreachable):
            if (end := await ends.read_any(transport, run_id)) is not None:
                raise ends.unreadable(run_id, end)
        mend = "start one, check the run's name, or export a checkpoint (--checkpoint)"
        raise GaveUpWaiting(f"no peer of the run {run_id} is there", mend=mend)


async def _observer(
    setup: Setup, transport: Transport, inbox: Inbox, tell: Callable[[str], None], access: Access | None
) -> Observer:
    joined = await Joining(setup, transport, inbox, tell, access).find_run(setup.asked)
    observer = Observer(transport, joined, tell)
    inbox.handler = observer
    return observer


async def _read_checkpoint(local: PeerConfig) -> Checkpoint | None:
    """Read the checkpoint that this peer starts from; None if there is none."""
    saved = await asyncio.get_running_loop().run_in_executor(None, read_checkpoint, local)
    if saved is None:
        return None
    if local.from_checkpoint is None and saved.run_id != local.run_id:
        mend = f"name another folder, or run_id={saved.run_id}"
        raise ConfigError(
            f"holds checkpoints of the run {saved.run_id}",
            key="checkpoint_dir",
            value=local.checkpoint_dir,
            mend=mend,
        )
    log.info("starting from the checkpoint %s", saved.path)
    return saved
