"""`dashboard`: a page in the browser that shows a run.

Law: joins the parts; `observe` looks at the run, draws nothing that `status` doesn't show, decides who gets in, and
carries out what the page's buttons ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer
import uvicorn

from p2p_diloco.cli.status import looks, watched
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.interrupts import run
from p2p_diloco.observe.feed import Feed
from p2p_diloco.observe.web import Controls, Door, application

if TYPE_CHECKING:
    from p2p_diloco.observe.baseline import Baseline
    from p2p_diloco.observe.snapshot import Snapshot

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
END_S = 1
"""Seconds that browsers get to close their connections at the end."""


class Server(uvicorn.Server):
    """A server that leaves signals to `interrupts.run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signal."""
        yield


def show(
    flags: Mapping[str, object],
    config_file: Path | None,
    *,
    host: str,
    port: int,
    interval_s: float,
    baseline: Baseline | None,
    key: Path | None,
    metrics: tuple[str, int] | None,
) -> None:
    """Serve the page until an interrupt. With the founder's identity file in the flags the page can change the run's
    settings, save and stop. `key`: the file of the run's key, with which the page can do so, too, and put peers out.
    `baseline`, `metrics`: as in `looks`.

    Raises:
        UsageError, ConfigError: the flags can't be used. NoBootstrapReached: no peer answers.
    """
    peer = watched(flags, config_file)
    founder = peer.identity_path if "identity_path" in flags else None  # one from a config file is that of a peer
    controls = _controls(peer, founder, key)
    if controls.offered and host not in LOOPBACK:
        wrong = "would show other machines a page that can change the run, unencrypted"
        mend = "leave --identity-path and --key out, or keep 127.0.0.1 and reach it through `ssh -L`"
        raise UsageError(wrong, key="--host", value=host, mend=mend)
    feed = Feed()
    run(_serve(host, port, feed, looks(peer, interval_s, baseline, metrics, feed.knew), controls))


def _controls(peer: PeerConfig, founder: Path | None, key: Path | None) -> Controls:
    """What the page can change. `founder`: the founder's identity file; `key`: the file of the run's key; None: not
    given.

    Raises:
        ConfigError: a key can't be read.
    """
    from p2p_diloco.cli.invite import put_out
    from p2p_diloco.cli.revise import founder_of
    from p2p_diloco.net.certificates import RunKey
    from p2p_diloco.net.invited import Issued, read_invitation
    from p2p_diloco.observe.look import observer

    invitation, own = None if peer.invite is None else read_invitation(peer), None
    if key is not None:
        Issued.beside(key)
        of_it = RunKey.load(key)
        own = of_it if invitation is not None and of_it.public == invitation.grant.run else None
    asker, invitation = founder_of(invitation, founder, own)
    kick = None if key is None else lambda name: put_out(name, key, peer.initial_peers)
    return Controls(peer.run_id, asker, lambda: observer(peer.initial_peers, invitation), kick)


async def _serve(host: str, port: int, feed: Feed, seen_in_turn: AsyncIterator[Snapshot], controls: Controls) -> None:
    async def follow() -> None:
        async for seen in seen_in_turn:
            feed.saw(seen)

    with _listening(host, port) as listener:
        shown = f"http://{host}:{listener.getsockname()[1]}/"

        def tell(token: str) -> None:
            typer.echo(f"{shown}?token={token}")

        if host not in LOOPBACK:
            log.warning("the page is sent unencrypted: anyone between %s and the browser can read it", host)
        log.info("open this link in a browser; it works once, and when it has been used the next link is printed:")
        app = application(feed, Door(tell), controls)
        server = Server(uvicorn.Config(app, log_config=None, log_level="warning", lifespan="off",
                                       timeout_graceful_shutdown=END_S))  # fmt: skip
        tasks = [asyncio.create_task(server.serve([listener])), asyncio.create_task(follow())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            server.should_exit = True
            feed.end()
            tasks[1].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket.

    Raises:
        ConfigError: the address can't be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"can't be listened on: {error.strerror or error}", key="--port", value=f"{host}:{port}",
            mend="choose another port, or 0 for any",
        ) from error  # fmt: skip
    with listener:
        yield listener
