"""The dashboard's web server: one page, the events that keep it up to date, and what its buttons do: the founder's
changes of a run, one at a time, as the commands `set`, `stop`, `save` and `kick` make them.

Law: only reads, unless it is given `Controls`. A browser gets in with a link that works once and leaves a cookie; a
request with neither gets 401 and learns nothing. Requests that another site makes in the user's browser are refused,
and so are requests to a host name that isn't this machine's own: another site's DNS may point any name here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from importlib.resources import files

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from p2p_diloco.config import RunConfig
from p2p_diloco.core.revision import CHANGEABLE
from p2p_diloco.errors import ConfigError, P2PDilocoError, UsageError, reason
from p2p_diloco.net.interface import Records
from p2p_diloco.net.reach import names_this_machine
from p2p_diloco.observe.feed import Feed
from p2p_diloco.observe.revise import Asker, Outcome, revise, save, stop

COOKIE = "p2p_diloco_dashboard_{port}"
"""Browsers don't keep the cookies of two ports of one machine apart, so each dashboard names its cookie by its port."""
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The browser loads nothing from elsewhere, and no other page can frame this one."""
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}

END_S = 1
"""Seconds that browsers get to close their connections at the end."""
WITHIN_S = 30.0
"""The most seconds to wait until the peers know of a change."""

log = logging.getLogger(__name__)


class Door:
    """Decides which requests get in: hands these to the application, and answers all others itself."""

    def __init__(self, told: Callable[[str], None]) -> None:
        """`told` is called with each new token for a link."""
        self._told, self._session, self._token = told, secrets.token_urlsafe(32), ""
        self.renew()

    def renew(self) -> None:
        """Make the next link's token."""
        self._token = secrets.token_urlsafe(24)
        self._told(self._token)

    def before(self, app: ASGIApp) -> ASGIApp:
        """The application, behind this door."""

        async def asked(scope: Scope, receive: Receive, send: Send) -> None:
            await (self._answer(HTTPConnection(scope)) or app)(scope, receive, send)

        return asked

    def _answer(self, request: HTTPConnection) -> Response | None:
        """The door's own answer to a request: a refusal, or the redirect that sets the cookie. None if the application
        is to answer the request."""
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("another site asked for this", 403)
        if not names_this_machine(request.headers.get("host", "")):
            return PlainTextResponse("open the dashboard by an address or by this machine's name", 403)
        cookie = COOKIE.format(port=request.scope["server"][1])
        if secrets.compare_digest(request.cookies.get(cookie, "").encode(), self._session.encode()):
            return None
        token = request.query_params.get("token", "")
        if request.url.path == "/" and secrets.compare_digest(token.encode(), self._token.encode()):
            self.renew()
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, self._session, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse("open the link that `p2p-diloco dashboard` printed last; each works once", 401)


class Controls:
    """Carries out the changes of a run that a browser asks for, in the founder's name.

    Args:
        run_id: the run to change.
        asker: the founder's identity, or the run key. If None, the dashboard can't change, save or stop the run.
        records: opens the DHT for one change.
        kick: revokes an invitation, which disconnects the peers that use it. Its argument is the invitation's name, its
            grant's id, or the id of the peer that it was made for. If `kick` is None, the dashboard can't revoke any.
    """

    def __init__(
        self,
        run_id: str,
        asker: Asker | None,
        records: Callable[[], AbstractAsyncContextManager[Records]],
        kick: Callable[[str], Awaitable[str]] | None,
    ) -> None:
        self._run_id, self._asker, self._records, self._kick = run_id, asker, records, kick
        self._one_at_a_time = asyncio.Lock()

    @property
    def offered(self) -> tuple[str, ...]:
        """The names of what can be done."""
        return (*(("set", "save", "stop") if self._asker else ()), *(("kick",) if self._kick else ()))

    async def carry_out(self, wish: object) -> str:
        """Carry out a wish such as {"do": "set", "values": {"outer_lr": 0.5}}; returns the outcome as a sentence.

        Raises:
            UsageError, ConfigError: the wish can't be read or can't be done. Refused, GaveUpWaiting: as `revise`.
        """
        asked = wish.get("do") if isinstance(wish, Mapping) else None
        if asked not in self.offered:
            mend = "start the dashboard with --identity-path or --key, and reload the page"
            raise UsageError("can't be done from here", key="do", value=asked, mend=mend)
        log.info("asked for in the browser: %s", wish)
        async with self._one_at_a_time:
            match wish:
                case {"do": "kick", "name": str(name)} if self._kick and name:
                    return await self._kick(name)
                case {"do": "set", "values": dict(values)} if values.keys() <= set(CHANGEABLE) and values:
                    given = RunConfig.model_validate(values).given
                    changes = {key: given[key] for key in values}
                    return await self._asked(lambda dht, run_id, asker: revise(dht, run_id, asker, changes, WITHIN_S))
                case {"do": "save"}:
                    return await self._asked(lambda dht, run_id, asker: save(dht, run_id, asker, WITHIN_S))
                case {"do": "stop", "save": bool(keep)}:
                    return await self._asked(lambda dht, run_id, asker: stop(dht, run_id, asker, WITHIN_S, save=keep))
        raise UsageError("can't be read", key="wish", value=wish, mend="reload the page")

    async def _asked(self, ask: Callable[[Records, str, Asker], Awaitable[Outcome]]) -> str:
        assert self._asker is not None, "it is not offered otherwise"
        async with self._records() as dht:
            made = await ask(dht, self._run_id, self._asker)
        if not made.news:
            return f"{made.told}: it is so already, and nothing was changed"
        return f"revision {made.revision.number}: {made.told}; known by {', '.join(made.known_by) or 'no peer yet'}"


def application(feed: Feed, door: Door, controls: Controls) -> ASGIApp:
    """The dashboard as an ASGI application."""
    offered = json.dumps({"controls": controls.offered})
    page = files("p2p_diloco.observe").joinpath("page.html").read_text(encoding="utf-8")

    def index(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {"content-security-policy": POLICY.format(nonce=nonce)}
        known = feed.whole.replace("<", "\\u003c")  # no text of a peer can end the script that it stands in
        text = page.replace("NONCE", nonce).replace("OFFERED", offered).replace("KNOWN", known)
        return HTMLResponse(text, headers={**HEADERS, **headers})

    async def events(request: Request) -> Response:
        return StreamingResponse(feed.follow(), media_type="text/event-stream", headers=HEADERS)

    async def change(request: Request) -> Response:
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        if request.headers.get("origin") != own or request.headers.get("content-type") != "application/json":
            return PlainTextResponse("another page asked for this", 403)  # this page's script can't have made it
        try:
            return JSONResponse({"done": await controls.carry_out(await request.json())}, headers=HEADERS)
        except (P2PDilocoError, ValueError, RecursionError, ClientDisconnect) as error:
            log.warning("refused: %s", str(error) or "the request was cut off")
            return JSONResponse({"refused": str(error)}, 400, headers=HEADERS)

    routes = [Route("/", index), Route("/events", events), Route("/change", change, methods=["POST"])]
    return door.before(Starlette(routes=routes))


class Server(uvicorn.Server):
    """A server of the application that leaves signals to `interrupts.run`."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(uvicorn.Config(app, log_config=None, log_level="warning", lifespan="off",
                                        timeout_graceful_shutdown=END_S))  # fmt: skip

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signal."""
        yield


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket.

    Raises:
        ConfigError: the address can't be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        mend = "choose another port, or 0 for any"
        wrong = f"can't be listened on ({reason(error)})"
        raise ConfigError(wrong, key="--port", value=f"{host}:{port}", mend=mend) from error
    with listener:
        yield listener
