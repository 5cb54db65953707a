"""`dashboard`: a page in the browser that shows a run.

Law: joins the parts; `observe` looks at the run, draws nothing that `status` doesn't show, decides who gets in, and
carries out what the page's buttons ask for.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from p2p_diloco.cli.flags import A_RUN, TOLD, with_settings
from p2p_diloco.cli.status import (
    BASELINE,
    BASELINE_BOUND,
    METRICS_HOST,
    METRICS_PORT,
    TOKENS_PER_SAMPLE,
    Watch,
    watched,
)
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import UsageError
from p2p_diloco.interrupts import run

if TYPE_CHECKING:
    from p2p_diloco.observe.web import Controls

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@with_settings(
    (*A_RUN, "identity_path", "otlp_endpoint"),
    {**TOLD, "identity_path": "Identity file of the run's founder; with it the page can set, save and stop."},
)
def dashboard(
    flags: dict[str, Any],
    config: Path | None,
    host: str = Option("127.0.0.1", help="Address of this machine that browsers can reach.", metavar="ADDR"),
    port: int = Option(9465, min=0, max=65535, help="TCP port; 0: any.", metavar="N"),
    interval: float = Option(1.0, min=0.01, help="Seconds between two looks.", metavar="X"),
    baseline: Path | None = BASELINE,
    baseline_bound: float = BASELINE_BOUND,
    tokens_per_sample: float | None = TOKENS_PER_SAMPLE,
    key: Path | None = Option(
        None, help="File of the run's key; with it the page can set, save, stop and put peers out.", metavar="PATH"
    ),
    metrics_port: int | None = METRICS_PORT,
    metrics_host: str = METRICS_HOST,
) -> None:
    """Show a run in the browser: prints a link. Takes no part in the run, and needs no internet.

    It only shows the run unless the founder's identity file or the run's key is given.
    """
    watch = watched(flags, config, baseline, baseline_bound, tokens_per_sample)
    founder = watch.peer.identity_path if "identity_path" in flags else None  # a config file has that of a peer
    controls = _controls(watch.peer, founder, key)
    if controls.offered and host not in LOOPBACK:
        wrong = "would show other machines a page that can change the run, unencrypted"
        mend = "leave --identity-path and --key out, or keep 127.0.0.1 and reach it through `ssh -L`"
        raise UsageError(wrong, key="--host", value=host, mend=mend)
    with watch.telling(metrics_host, metrics_port):  # first: the link is printed only if this port is free, too
        run(_serve(host, port, watch, interval, controls))


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
    from p2p_diloco.observe.snapshot import observer
    from p2p_diloco.observe.web import Controls

    invitation, own = None if peer.invite is None else read_invitation(peer), None
    if key is not None:
        Issued.beside(key)
        of_it = RunKey.load(key)
        own = of_it if invitation is not None and of_it.public == invitation.grant.run else None
    asker, invitation = founder_of(invitation, founder, own)

    async def kick(name: str) -> str:
        assert key is not None, "it is not offered otherwise"
        made = await put_out(name, key, peer.initial_peers)
        left = f"; it can come back with another of these, if it holds one: {made.others}" if made.others else ""
        return f"{made.told}{left}"

    records = partial(observer, peer.initial_peers, invitation)
    return Controls(peer.run_id, asker, records, None if key is None else kick)


async def _serve(host: str, port: int, watch: Watch, interval_s: float, controls: Controls) -> None:
    from p2p_diloco.observe.feed import Feed
    from p2p_diloco.observe.web import Door, Server, application, listening

    feed = Feed()
    with listening(host, port) as listener:
        shown = f"http://{host}:{listener.getsockname()[1]}/"
        if host not in LOOPBACK:
            log.warning("the page is sent unencrypted: anyone between %s and the browser can read it", host)
        log.info("open this link in a browser; it works once, and when it has been used the next link is printed:")
        server = Server(application(feed, Door(lambda token: typer.echo(f"{shown}?token={token}")), controls))
        follow = watch.follow(feed.saw, interval_s, feed.knew)
        tasks = [asyncio.create_task(server.serve([listener])), asyncio.create_task(follow)]
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
