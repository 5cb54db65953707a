"""What reads bytes that come from outside, each with right ones to begin from.

Law: a target takes any bytes and returns, or raises what it promises. Anything else is a fault of the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import tarfile
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import msgspec
import numpy as np
import torch
import xxhash
from rich.console import Console
from safetensors.numpy import save as as_safetensors

from p2p_diloco.config import RunConfig
from p2p_diloco.core.revision import Revision
from p2p_diloco.core.state import founding
from p2p_diloco.core.version import ModelVersion, Version
from p2p_diloco.data.files import FORMATS, cut
from p2p_diloco.data.manifest import Manifest, Slice, hash_of
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.history.order import ordered
from p2p_diloco.history.reading import check, naming, read
from p2p_diloco.history.story import Story
from p2p_diloco.net.certificates import Stranger
from p2p_diloco.net.framing import Bulk, FrameDecoder, FrameError, Message, Refused, encode
from p2p_diloco.net.hello import any_run
from p2p_diloco.net.hivemind_library import DHTRecord
from p2p_diloco.net.interface import Refusal
from p2p_diloco.net.invitation import Invitation
from p2p_diloco.net.invited import Issued
from p2p_diloco.net.listener import KNOCK_BYTES, Offer
from p2p_diloco.net.membership import SealedRecords
from p2p_diloco.net.reach import _told
from p2p_diloco.net.records import SignedRecords, newest_records
from p2p_diloco.net.relay import unpacked
from p2p_diloco.net.signing import SigningKey, from_text, signed_by
from p2p_diloco.node import board, curves, fetching, privacy, wire
from p2p_diloco.node import run_end as ending
from p2p_diloco.node.fields import encoded
from p2p_diloco.node.headers import NO_RUN, opened, packed, unpack
from p2p_diloco.node.history import SUFFIX
from p2p_diloco.node.joining import Described
from p2p_diloco.node.privacy import Access
from p2p_diloco.node.run import Run
from p2p_diloco.node.run_record import Founding, RunRecord, read_revision
from p2p_diloco.node.saving import Checkpoint
from p2p_diloco.node.saving import Manifest as Saved
from p2p_diloco.node.status import Event, PeerStatus, RefusedPeer
from p2p_diloco.observe.snapshot import snapshot
from p2p_diloco.observe.view import lines
from p2p_diloco.remembered import file_of, remembered
from p2p_diloco.tensors.checkpoint import MANIFEST, save
from p2p_diloco.tensors.layout import Layout, ParamSpec
from p2p_diloco.tensors.outer_state import digest
from tests.history.recorded import RecordedWorld
from tests.net.members import KEY, invitation, membership
from tests.node.headers_world import RULES
from tests.node.headers_world import Run as HeadersRun

ME = SigningKey(b"m" * 32)
OTHER = SigningKey(b"o" * 32)
TOKEN = b"t" * wire.TOKEN_BYTES


@dataclass(frozen=True)
class Target:
    """`feed`: takes a case. `promised`: what it may raise."""

    name: str
    seeds: Sequence[bytes]
    feed: Callable[[bytes], object]
    promised: tuple[type[BaseException], ...] = ()


class Held:
    """`Records` that hold one value under each key, and a transport that dials nobody."""

    peer_id = ME.peer_id

    def __init__(self, value: bytes, name: str = "") -> None:
        self._found = {name or board.name_of(value): (value, time.time() + 60.0)}

    async def fetch(self, key: str) -> dict[str, tuple[bytes, float]]:
        return self._found

    async def introduce(self, peer: str, addresses: object) -> None: ...

    def signed_by(self, peer: str, proof: str, kind: bytes, statement: bytes) -> bool:
        try:
            return signed_by(peer, from_text(proof), kind, statement)
        except ValueError:
            return False


LOOP = asyncio.new_event_loop()


def now(reading: Coroutine[Any, Any, object]) -> None:
    LOOP.run_until_complete(reading)


# -- the network


def _headers() -> list[bytes]:
    mean = wire.OfMean(0, "c" * 32, 0, ME.peer_id, "e" * 64)
    said: list[wire.NodeMessage] = [
        wire.Describe(), wire.Description(100), wire.Nudge(3), wire.Audit(mean),
        wire.Copy(mean, OTHER.peer_id, b"s" * 64),
        wire.Accusation(mean, Version(0, 0, 0, "d" * 32), b"s" * 64, 100), wire.Contradicts(ME.peer_id, b"ready", 100),
        wire.ListSlices("train"), wire.SliceList("train", 100), wire.GetSlice("a" * 64, 0),
        wire.SliceBytes("a" * 64, 0, 100),
    ]  # fmt: skip
    return [packed(message, TOKEN) for message in said]


def _rounds() -> list[bytes]:
    """Each message of a round, of a run of four peers; of long ones the payload that they come as."""
    run = HeadersRun(4)
    return [encoded(message) for message in run.messages()]


def _message(case: bytes) -> None:
    unpack(case, RULES)


def _header(case: bytes) -> None:
    opened(case, TOKEN, NO_RUN)


def _frames(case: bytes) -> None:
    decoder = FrameDecoder(bytearray(case), header_bytes_max=4096)
    while decoder.next_frame() is not None:
        pass


def _network() -> Iterator[Target]:
    yield Target("headers", _headers(), _header, (Refusal,))
    yield Target("messages", _rounds(), _message, (Refusal,))
    said = (Message(b"?" + bytes(300)), Bulk(b"header", 1 << 20), Refused("no"))
    yield Target("frames", [encode(frame) for frame in said], _frames, (FrameError,))
    member = membership(ME.peer_id)
    hello = membership(OTHER.peer_id).chain
    yield Target("hello", [hello], lambda case: member.admit(OTHER.peer_id, case, time.time()), (Stranger,))
    yield Target("hello at a relay", [hello], lambda case: any_run(OTHER.peer_id, case), (Stranger,))
    offer = Offer(((4, 4001), (6, 4002)), bytes(KNOCK_BYTES))
    yield Target("offers", [offer.pack()], Offer.unpack, (FrameError,))
    there = f"/ip4/192.0.2.1/tcp/1/p2p/{ME.peer_id}"
    answer = {"seen": there, "reached": {there: None}}
    yield Target("dial backs", [msgpack.packb(answer)], lambda case: _told(unpacked(case), ME.peer_id), (FrameError,))
    packed = KEY.sign_revocations(3, [bytes(8)])
    yield Target("revocations", [packed], membership(ME.peer_id).revoke)


# -- records of the DHT


def _signed(case: bytes) -> None:
    """A case is [subkey, value], or a value."""
    content: object = None
    with contextlib.suppress(Exception):
        content = msgpack.unpackb(case)
    match content:
        case [bytes(subkey), bytes(value)]:
            pass
        case _:
            subkey, value = msgpack.packb(b"x"), case
    records = SignedRecords(ME)
    record = DHTRecord(bytes(20), subkey, value, time.time() + 60.0)
    if records.validate(record):
        records.strip_value(record)
    newest_records({subkey: (value, time.time() + 60.0)})


def _record_seeds() -> list[bytes]:
    records = SignedRecords(ME)
    name, value = msgpack.packb(records.owned(ME.peer_id.encode())), msgpack.packb(b"value")
    record = DHTRecord(bytes(20), name, value, time.time() + 60.0)
    return [msgpack.packb([name, records.sign_value(record)]), value, msgpack.packb([msgpack.packb(b"x"), value])]


def _layout() -> Layout:
    specs = (ParamSpec("a.weight", (3, 4), "float32"), ParamSpec("a.bias", (4,), "float32"))
    return Layout.build(specs, 1, "contiguous", None)


def _run_record() -> RunRecord:
    return RunRecord.founding(Run("r", RunConfig(sync_every=5), _layout()), ME.peer_id, 1.0)


def _status() -> PeerStatus:
    return PeerStatus(
        peer_id=ME.peer_id, name="alice", host="box", state="training", time=time.time(), epoch=12, step=600, loss=2.25,
        samples=480, steps_per_second=3.5, last_round=None, aggregates=(0, 1), addresses=("/ip4/192.0.2.1/tcp/1",),
        events=(Event(1.0, "joined"),), refused=(RefusedPeer("mallory", 3, "no"),),
    )  # fmt: skip


def _seen(case: bytes, record: RunRecord | None = None) -> None:
    made = snapshot("r", record, [PeerStatus.unpack(case)], time.time())
    made.to_json()
    Console(file=io.StringIO(), width=100).print("\n".join(lines(made)), markup=False)


def _settings(case: bytes) -> None:
    record = RunRecord.unpack(case)
    snapshot("r", record, [_status()], time.time()).to_json()
    RunConfig.from_wire(record.config)


def _opened(case: bytes) -> None:
    """A record that a member has sealed: what strangers can't write, and members can."""
    member = membership(ME.peer_id, invitation())
    place, hello = member.hidden("key"), member.chain
    for value in (case, hello + case):
        name = f"{ME.peer_id}/~x"
        sealed = member.seal(f"{place}/{name}".encode(), value)
        for stored in (value, sealed):
            now(SealedRecords(Held(stored, name), member).fetch("key"))  # type: ignore[arg-type]


def _records() -> Iterator[Target]:
    run, status = _run_record(), _status()
    yield Target("DHT records", _record_seeds(), _signed)
    yield Target("sealed records", [status.pack(), msgpack.packb(b"x")], _opened)
    yield Target("statuses", [status.pack()], _seen, (ValueError,))
    access = Access(membership(ME.peer_id), KEY)
    records = [run.pack(), access.signed("r", run)]
    yield Target("run records", records, _settings, (ValueError, P2PDilocoError))
    yield Target("signed run records", records, lambda case: access.founded_by_the_key("r", case))
    points = [curves.Point(*(float(at + place) for place in range(len(curves.Point._fields)))) for at in range(3)]
    yield Target("curves", [curves.pack(points)], curves.unpack, (ValueError,))
    founding = Founding("r", ME.peer_id, 1.0, b"")
    signer: Any = SimpleNamespace(sign=lambda kind, said: ME.sign(kind, said).hex(), peer_id=ME.peer_id)
    end = ending.signed(signer, founding, ModelVersion(0, 8, 1, "e" * 32), 2, 1.0)
    reads: dict[str, tuple[bytes, Callable[[Any], Coroutine[Any, Any, object]]]] = {
        "ends": (
            board.pack(end),
            lambda dht: ending.BOARD.read(dht, "r", ending.End, lambda end: ending._proven(end, dht, "r")),
        ),
        "revisions": (board.pack(Revision(1, outer_lr=0.5)), lambda dht: read_revision(dht, founding)),
        "notices": (KEY.public, lambda dht: privacy.is_private(dht, "r")),
        "revocation records": (
            KEY.sign_revocations(3, [bytes(8)]),
            lambda dht: privacy.read_revocations(dht, "r", access.member),
        ),
    }
    for name, (seed, reading) in reads.items():
        yield Target(name, [seed], lambda case, reading=reading: now(reading(Held(case))))
    node = fetching.DataNodeRecord(peer_id=OTHER.peer_id, label="disk", data_set="a" * 64)
    nodes = lambda case: now(fetching.find_data_nodes(Held(case, OTHER.peer_id), "r", "train"))  # type: ignore[arg-type]  # noqa: E731
    yield Target("data nodes", [node.pack()], nodes)


# -- formats


def _tar() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("a.txt", "a.json", "b.txt"):
            entry = tarfile.TarInfo(name)
            entry.size = 20
            tar.addfile(entry, io.BytesIO(bytes(range(20))))
        link = tarfile.TarInfo("c.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "nowhere"
        tar.addfile(link)
    return made.getvalue()


def _file(folder: Path, form: str) -> Callable[[bytes], None]:
    path = folder / f"case.{form}"

    def cut_and_read(case: bytes) -> None:
        path.write_bytes(case)
        for _ in cut(path, form, 64):
            pass
        for sample in FORMATS[form].read(path):
            assert sample is not None

    return cut_and_read


def _formats(folder: Path) -> Iterator[Target]:
    manifest = Manifest("tar", (Slice("a.tar", 100, 3, hash_of(b"x")), Slice("b.tar", 10, 1, hash_of(b"y"))))
    yield Target("manifests", [manifest.packed], Manifest.unpack, (ValueError,))
    described = (ValueError, TypeError, msgpack.UnpackException)
    yield Target("descriptions", [bytes(Described(_layout(), b"card").packed)], Described.unpack, described)
    invited = invitation()
    texts = [invited.pack().encode(), invited.line().encode()]
    yield Target("invitations", texts, lambda case: Invitation.unpack(case.decode(errors="replace")), (P2PDilocoError,))
    samples = {
        "tar": _tar(), "text": b"one\ntwo\nthree\n" * 20,
        "safetensors": as_safetensors({"x": np.zeros((3, 2), np.float32), "y": np.zeros(3, np.int64)}),
    }  # fmt: skip
    for form, seed in samples.items():
        yield Target(form, [seed], _file(folder, form), (P2PDilocoError,))
    issued = folder / "r.issued"
    known = json.dumps([{"id": "00" * 8, "name": "a", "role": "worker", "expires": 1, "peer": None, "revoked": 2}])
    yield Target(
        "issued",
        [known.encode()],
        lambda case: (issued.write_bytes(case), Issued.beside(issued.with_suffix(".key"))),
        (P2PDilocoError,),
    )
    met = file_of("fuzzed")
    met.parent.mkdir(parents=True, exist_ok=True)
    there = f"/ip4/192.0.2.1/tcp/1/p2p/{ME.peer_id}"
    yield Target(
        "addresses",
        [json.dumps({ME.peer_id: {there: 9e9}}).encode()],
        lambda case: (met.write_bytes(case), remembered("fuzzed", [there])),
    )
    yield _checkpoints(folder / "checkpoints")
    yield _histories(folder / "histories")


def _checkpoints(folder: Path) -> Target:
    layout = _layout()
    state = founding(0, Version(0, 0, 0, "e" * 32), ME.peer_id, 1)
    theta, outer = {spec.name: torch.zeros(spec.shape) for spec in layout.params}, {"m": torch.zeros(16)}
    told = Saved(
        "r", 0, 8, RunConfig().to_wire(), layout.to_wire(), [encoded(state)],
        [digest(torch.zeros(16), outer)], (ME.peer_id, 1.0),
    )  # fmt: skip
    tensors = {"theta": theta, "outer": {f"0.{name}": tensor for name, tensor in outer.items()}}
    where = save(folder, 1, tensors, msgspec.to_builtins(told), 3) / MANIFEST
    bare = json.dumps({key: value for key, value in json.loads(where.read_bytes()).items() if key != "seal"})

    def load(case: bytes) -> None:
        """The manifest's seal is no signature: whoever changes a manifest can make it anew."""
        try:
            content = json.loads(case)
            seal = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
            case = json.dumps({**content, "seal": seal}).encode()
        except (ValueError, TypeError, RecursionError):
            pass
        where.write_bytes(case)
        loaded = Checkpoint(where.parent)
        loaded.run_config, loaded.revision, loaded.config_for("other")

    return Target("checkpoints", [bare.encode()], load, (P2PDilocoError,))


def _histories(folder: Path) -> Target:
    world = RecordedWorld(folder / "seeds")
    world.run(3.0)
    world.lives()
    packed = [
        zlib.decompressobj(wbits=31).decompress(file.read_bytes()) for file in (folder / "seeds").rglob(f"*{SUFFIX}")
    ]
    path = folder / f"case{SUFFIX}"

    def replay(case: bytes) -> None:
        path.write_bytes(gzip.compress(case))
        lives = read([path])
        check(lives[0])
        found = ordered(lives)
        list(Story(found.entries, len(lives[-1].head.rules.fragments)).text(naming(lives), 100))

    return Target("histories", packed, replay, (P2PDilocoError,))


def targets(folder: Path) -> list[Target]:
    """All of them. Those that read files write them into this folder."""
    return [*_network(), *_records(), *_formats(folder)]
