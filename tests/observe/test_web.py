"""The dashboard: who gets in, what a browser shows, and what its buttons do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from p2p_diloco.cli import carry_out, dashboard
from p2p_diloco.cli.status import Watch
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.node.run_record import RunRecord
from p2p_diloco.node.status import Event, LastRound, PeerStatus, RefusedPeer
from p2p_diloco.observe.baseline import Baseline
from p2p_diloco.observe.feed import Feed
from p2p_diloco.observe.revise import Asker
from p2p_diloco.observe.snapshot import Snapshot, snapshot
from p2p_diloco.observe.web import COOKIE, Controls, Door, Server, application, listening
from tests.net.memory import MemoryTransport
from tests.net.patience import awaited
from tests.observe.test_revise import Identity, Swarm
from tests.observe.test_revise import looks_are_quick as looks_are_quick

Answer = tuple[int, dict[str, str], str]
NASTY = "<script>document.title='broken'</script>"


class Browser:
    """Asks an application as a browser does, without a network."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.feed = Feed()
        self.wishes: list[object] = []
        self.app = application(self.feed, Door(self.tokens.append), cast(Controls, self))

    offered = ("set", "save", "stop", "kick")

    async def carry_out(self, wish: object) -> str:
        self.wishes.append(wish)
        if wish == {"do": "fail"}:
            raise UsageError("can't be done", key="do", value="fail")
        return f"done {NASTY}"

    def session(self) -> str:
        """A cookie that lets in."""
        return self.get("/", f"token={self.tokens[-1]}")[1]["set-cookie"].partition(";")[0]

    def get(self, path: str, query: str = "", method: str = "GET", body: bytes | None = b"", **headers: str) -> Answer:
        sent = {"host": "127.0.0.1:9465", **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()], "http_version": "1.1",
            "scheme": "http", "server": ("127.0.0.1", 9465), "client": ("127.0.0.1", 1), "root_path": "", "state": {},
        }  # fmt: skip
        told: list[Any] = []
        gone = asyncio.Event()

        bodies = [body] if body is not None else []
        if body is None:
            gone.set()

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            told.append(message)
            if message.get("body"):
                gone.set()  # an endless answer ends after its first part

        async def ask() -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.app(scope, receive, send), 10.0)

        asyncio.run(ask())
        found = {name.decode(): value.decode() for name, value in told[0]["headers"]}
        return told[0]["status"], found, b"".join(message.get("body", b"") for message in told[1:]).decode()


@pytest.fixture
def browser() -> Browser:
    made = Browser()
    peers = [
        PeerStatus(
            name=name, peer_id=f"id-{name}", time=100.0 + number, state="training", role="worker", epoch=3, step=60,
            loss=2.5, held_out_loss=2.75, samples=480,
            last_round=LastRound(9.0, 0.2, 0.4, 0.3, 0.08, 0.02, 0.3333, 90.0),
            events=(Event(90.0, f"{NASTY} joined"),), refused=(RefusedPeer("mallory", 3, NASTY),),
            waits_for="waiting for the contributions of carol",
        )
        for number, name in enumerate(("alice", "bob", NASTY))
    ]  # fmt: skip
    run = RunRecord({"mode": "sync", "sync_every": 20}, "model", "cut", 4, 10, 1, "id-alice", 0.0)
    for second in range(30):
        moved = [replace(peer, time=peer.time + second, step=60 + second, loss=2.5 - second / 50) for peer in peers]
        made.feed.saw(snapshot("main", run, moved, 140.0))
    return made


def test_without_the_link_there_is_nothing(browser: Browser) -> None:
    """Neither the page nor its data, nor whether a path exists."""
    for path in ("/", "/events", "/change", "/nothing"):
        for query, headers in (("", {}), ("token=wrong", {}), ("", {"cookie": f"{COOKIE.format(port=9465)}=wrong"})):
            status, _, text = browser.get(path, query, **headers)
            assert (status, text) == (401, "open the link that `p2p-diloco dashboard` printed last; each works once")


def test_a_link_works_once_and_leaves_a_cookie(browser: Browser) -> None:
    """The cookie is for this site alone and hidden from scripts; the next link is told when one is used."""
    (token,) = browser.tokens
    status, headers, _ = browser.get("/", f"token={token}")
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"]
    assert cookie.startswith("p2p_diloco_dashboard_9465=")  # another dashboard of this machine has another port
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert browser.get("/", f"token={token}")[0] == 401
    assert len(set(browser.tokens)) == 2
    session = cookie.partition(";")[0]
    status, headers, page = browser.get("/", cookie=session)
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["content-security-policy"].count("NONCE") == page.count("NONCE") == 0
    assert NASTY not in page
    assert '"alice"' in page
    status, headers, text = browser.get("/events", cookie=session)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert text.startswith("event: all\ndata: {")
    assert '"alice"' in text


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"sec_fetch_site": "cross-site"}, 403), ({"sec_fetch_site": "same-site"}, 403),
     ({"sec_fetch_site": "same-origin"}, 200), ({"host": "evil.example:9465"}, 403), ({"host": ""}, 403),
     ({"host": "[::1"}, 403), ({"host": "[::1]:9465"}, 200), ({"host": "localhost"}, 200)],
)  # fmt: skip
def test_other_sites_are_refused(browser: Browser, headers: dict[str, str], status: int) -> None:
    """Even with the cookie: a page elsewhere can neither ask in the user's name nor point a name of its own here."""
    _, answer, _ = browser.get("/", f"token={browser.tokens[0]}")
    assert browser.get("/", cookie=answer["set-cookie"].partition(";")[0], **headers)[0] == status


OWN = {"origin": "http://127.0.0.1:9465", "content_type": "application/json"}


def test_a_button_does_what_its_browser_asks_for(browser: Browser) -> None:
    """The outcome, or why not, comes back as JSON."""
    session = browser.session()
    wish = {"do": "set", "values": {"outer_lr": 0.5}}
    status, _, told = browser.get("/change", "", "POST", json.dumps(wish).encode(), cookie=session, **OWN)
    assert (status, json.loads(told), browser.wishes) == (200, {"done": f"done {NASTY}"}, [wish])
    for body, why in ((b'{"do": "fail"}', "do=fail can't be done"), (b"{", "Expecting"), (b"[" * 4000, "")):
        status, _, told = browser.get("/change", "", "POST", body, cookie=session, **OWN)
        assert status == 400
        assert why in json.loads(told)["refused"]


def test_a_request_that_is_cut_off_is_no_fault(browser: Browser, caplog: pytest.LogCaptureFixture) -> None:
    """The browser went away: one line in the log, and no traceback."""
    assert browser.get("/change", "", "POST", None, cookie=browser.session(), **OWN)[0] == 400
    assert [record.getMessage() for record in caplog.records] == ["refused: the request was cut off"]


@pytest.mark.parametrize(
    "headers",
    [{**OWN, "cookie": ""}, {"content_type": "application/json"}, {**OWN, "origin": "http://evil.example"},
     {**OWN, "content_type": "text/plain"}, {**OWN, "sec_fetch_site": "cross-site"}, {**OWN, "host": "evil.example"}],
)  # fmt: skip
def test_no_other_page_can_press_a_button(browser: Browser, headers: dict[str, str]) -> None:
    """Without the cookie, from another origin, or as a form of another site would ask."""
    headers = {"cookie": browser.session(), **headers}
    assert browser.get("/change", "", "POST", b'{"do": "save"}', **headers)[0] in (401, 403)
    assert browser.wishes == []


def test_a_port_in_use_is_named() -> None:
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="--port"), listening("127.0.0.1", port):
            pass


FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-component-update", "--disable-background-networking",
         "--enable-logging=stderr", "--timeout=5000")  # fmt: skip


def shown(link: str, width: int, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """What a browser makes of the page."""
    own = (f"--user-data-dir={folder}", f"--window-size={width},1200", *(flags or ("--dump-dom",)))
    return subprocess.run(["chromium", *FLAGS, *own, link], capture_output=True, text=True, timeout=120.0)


@contextlib.contextmanager
def served(browser: Browser) -> Iterator[Callable[[], str]]:
    """Within the block, a function that returns the next link."""
    with listening("127.0.0.1", 0) as listener:
        server = Server(browser.app)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield lambda: f"http://127.0.0.1:{listener.getsockname()[1]}/?token={browser.tokens[-1]}"
        server.should_exit = True
        thread.join(20.0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (Debian: chromium)")
@pytest.mark.parametrize("width", [400, 1400])
def test_a_real_browser_shows_the_run(browser: Browser, width: int, tmp_path: Path) -> None:
    """At three widths: every peer, curve and round, no error in the console, and a hostile name is only text."""
    with served(browser) as link:
        done = shown(link(), width, tmp_path)
    assert "<title>main: outer step 3</title>" in done.stdout
    assert "CONSOLE" not in done.stderr
    waits = "waiting for the contributions of carol"
    for told in (">alice<", ">bob<", waits, "sync_every <b>20</b>", ">90.0%<"):
        assert told in done.stdout
    assert done.stdout.count("<polyline") == 2 * 3
    assert "Stop for all" in done.stdout
    assert done.stdout.count("<circle") == 3
    assert done.stdout.count("<rect") == 3 * 6
    assert done.stdout.count('class="hidden"') == 3


def test_prometheus_is_told_of_the_run_while_the_page_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own address and port, of what the page shows, the comparison among it."""
    alice = PeerStatus(name="alice", peer_id="id-a", time=100.0, state="training", epoch=3, loss=2.5, counted_samples=5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scraped = []

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20.0) as answer:
            return str(answer.read().decode())

    async def serve(host: str, port: int, watch: Watch, *_: object) -> None:
        await watch.follow(lambda seen: None)
        assert watch.newest is not None
        assert watch.newest.run.compared is not None
        scraped.append(await asyncio.to_thread(scrape))

    async def look(*_: object) -> Snapshot:
        return snapshot("main", None, [alice], 100.0)

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr(dashboard, "_serve", serve)
    watch = Watch(PeerConfig(), Baseline({"loss": [(0, 2.0), (10, 2.0)]}))
    monkeypatch.setattr(dashboard, "watched", lambda *_: watch)
    monkeypatch.setattr("p2p_diloco.cli.status._warn", nothing)
    monkeypatch.setattr("p2p_diloco.observe.snapshot.observer", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("p2p_diloco.observe.snapshot.look", look)
    assert carry_out(["dashboard", "--metrics-port", str(port)]) == 0
    assert 'p2p_diloco_epoch{peer="alice",peer_id="id-a",run="main"} 3.0' in scraped[0]
    assert 'p2p_diloco_baseline_loss{run="main"} 2.0' in scraped[0]


def test_no_link_is_printed_if_the_port_for_prometheus_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error stands alone."""
    monkeypatch.setattr(dashboard, "watched", lambda *_: Watch(PeerConfig()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert carry_out(["dashboard", "--port", "0", "--metrics-port", str(port)]) == 3
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert f"--metrics-port=127.0.0.1:{port} can't be listened on" in told.err


# -- the buttons


async def kicked(name: str) -> str:
    return f"revoked {name}"


def controls(swarm: Swarm, *, founder: bool = True, key: bool = True) -> Controls:
    @contextlib.asynccontextmanager
    async def records() -> AsyncIterator[MemoryTransport]:
        yield swarm.eyes

    asker: Any = Asker(Identity("alice-id")) if founder else None
    return Controls("main", asker, records, kicked if key else None)


@awaited
async def test_a_setting_is_changed_as_by_the_command() -> None:
    """The sentence names the values and the peers that know of them; asking again changes nothing."""
    swarm = Swarm(outer_lr=0.6)
    await swarm.begin([0, 0.6, 0.9, 0])
    asking = asyncio.create_task(controls(swarm).carry_out({"do": "set", "values": {"outer_lr": 0.5}}))
    await swarm.stored(1, asking)
    await swarm.publish([1, 0.5, 0.9, 1])
    assert await asking == "revision 1: outer_lr=0.5; known by alice"
    again = await controls(swarm).carry_out({"do": "set", "values": {"outer_lr": 0.5}})
    assert again == "outer_lr=0.5: it is so already, and nothing was changed"
    assert await controls(swarm).carry_out({"do": "kick", "name": "bob"}) == "revoked bob"


@pytest.mark.parametrize(
    "wish",
    [None, [], {}, {"do": "dance"}, {"do": "set"}, {"do": "set", "values": {}},
     {"do": "set", "values": {"codec": "fp32"}},
     {"do": "set", "values": {"outer_lr": "much"}}, {"do": "stop"}, {"do": "stop", "save": "yes"},
     {"do": "kick"}, {"do": "kick", "name": ""}, {"do": ["set"]}],
)  # fmt: skip
@awaited
async def test_a_wish_that_means_nothing_is_refused(wish: object) -> None:
    """Also one for a setting that can't change; nothing is stored."""
    swarm = Swarm()
    await swarm.begin([0, 0.7, 0.9, 0])
    with pytest.raises((UsageError, ConfigError)):
        await controls(swarm).carry_out(wish)
    assert (await swarm.there()).number == 0
