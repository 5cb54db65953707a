"""Histories are read as far as they are whole, and only those of one run together."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from p2p_diloco.errors import ConfigError
from p2p_diloco.history.reading import naming, read
from p2p_diloco.node import history
from p2p_diloco.node.history import FILES, FORM, SUFFIX
from tests.history.recorded import RUN, RecordedWorld, as_written

HEAD = {
    "history": FORM, "role": "worker", "eligible": True, "incarnation": 1, "began": 0.0, "peer": "px", "name": "px",
    "rules": {"run": "r", "fragments": [[0]]}, "started": 0.0, "file": 1, "ahead": 0.0, "names": {},
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event is written at once, because a file ends with the batch by which it has its length."""
    monkeypatch.setattr(history, "WAITS_S", 0.0)


def packed(text: str) -> bytes:
    return gzip.compress(text.encode() + b"\n")


def write(path: Path, **values: object) -> None:
    """Write a history that is a head alone."""
    path.write_bytes(packed(json.dumps({**RUN, **HEAD, **values})))


@pytest.fixture
def world(tmp_path: Path) -> RecordedWorld:
    made = RecordedWorld(tmp_path)
    made.run(10.0)
    return made


def test_a_history_may_end_at_any_byte(world: RecordedWorld, tmp_path: Path) -> None:
    """Of a file that is cut off, all whole records are read, and that is no error."""
    path = sorted(tmp_path.glob("p1*"))[0]
    whole, (life,) = path.read_bytes(), read([path])
    cut = tmp_path / "cut.history.gz"
    for length in (*range(len(whole) - 60, len(whole)), len(whole) // 2, len(whole) // 3):
        cut.write_bytes(whole[:length])
        (part,) = read([cut])
        assert not part.gap
        assert not part.head.left
        assert part.entries == life.entries[: len(part.entries)]
        assert len(part.entries) >= len(life.entries) * length // len(whole) // 2


def test_damage_is_said_and_what_comes_before_it_is_read(world: RecordedWorld, tmp_path: Path) -> None:
    """A file that is damaged in its middle is read up to there, and the life says so."""
    path = sorted(tmp_path.glob("p1*"))[0]
    content, before = bytearray(path.read_bytes()), len(read([path])[0].entries)
    content[len(content) // 2 : len(content) // 2 + 40] = bytes(40)
    path.write_bytes(content)
    (life,) = read([path])
    assert path.name in life.gap
    assert 0 < len(life.entries) < before


def test_only_the_oldest_files_are_lost(tmp_path: Path) -> None:
    """Under many events a history stays within its bound: whole files are deleted, the oldest first, and what is left
    is one piece that ends with the last event."""
    bound = 10_000
    world = RecordedWorld(tmp_path, bytes_max=bound)
    world.run(60.0)
    for life in world.lives():
        paths = sorted(tmp_path.glob(f"{life.peer}-*"))
        assert 2 <= len(paths) <= FILES
        assert bound / 2 < sum(path.stat().st_size for path in paths) < 1.1 * bound
        assert life.first > 1
        assert not life.gap
        told = [entry for entry in world.trace or () if entry.peer == life.peer]
        assert as_written(life.entries) == as_written(told[-len(life.entries) :])
    sorted(tmp_path.glob("p0*"))[1].unlink()  # between two others
    assert [life.peer for life in world.lives() if "missing" in life.gap] == ["p0"]


def test_of_a_folder_one_run_is_taken(world: RecordedWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a folder with several runs, or several foundings of one, the newest is taken, or the one that is named. A
    warning names the histories of other foundings, and a file that is named beside those of a newer run. An unknown
    name lists those there."""
    for number, changed in enumerate(({"run_id": "other", "started": -1.0}, {"founded": -5.0, "started": -5.0})):
        write(tmp_path / f"{number}{SUFFIX}", **changed)
    for wanted in (None, "r"):
        assert {life.peer for life in read([tmp_path], wanted)} == {"p0", "p1", "p2"}
        assert caplog.messages.pop() == "left out: 1.history.gz is of another run or founding than r"
    assert {life.peer for life in read([tmp_path], "other")} == {"px"}
    with pytest.raises(ConfigError, match=r"no history of the run third; runs there: other, r"):
        read([tmp_path], "third")
    assert {life.peer for life in read([*tmp_path.glob("p*"), tmp_path / f"0{SUFFIX}"])} == {"p0", "p1", "p2"}
    assert caplog.messages[-1] == "left out: 0.history.gz is of another run or founding than r"


@pytest.mark.parametrize(
    "content", [b"", b"no history", packed("no map"), packed("[1]"), packed("[" * 100_000)], ids=range(5)
)
def test_what_is_no_history_is_refused(tmp_path: Path, content: bytes) -> None:
    """Any other file is refused in one sentence that names it."""
    path = tmp_path / "other.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"other.txt is no history"):
        read([path])


def test_a_made_history_takes_little_memory(tmp_path: Path) -> None:
    """Of a file of 4 kB that would become 4 MB of text and 0.3 GB of lists, and a longer one many GB, only the
    beginning is unpacked."""
    path = tmp_path / f"x{SUFFIX}"
    path.write_bytes(packed(json.dumps({**HEAD, **RUN}) + "\n" + "[" * 2**22))
    (life,) = read([path])
    assert "100 times as long as the file" in life.gap


@pytest.mark.parametrize(
    "line",
    [
        *[
            '[1,["Wakeup"]',
            '[1,["Wakeup"],[["Wakeup"]]]',
            '[1,["Received","p",7],[]]',
            "[]",
            "7",
            "{}",
            '{"history":5}',
        ],
        *['[1,["Wakeup",1],[]]', '["x",["Wakeup"],[]]', '["other",1]', "[" * 5000],
    ],
)
def test_any_other_line_is_damage(tmp_path: Path, line: str) -> None:
    """What comes before it is read, and the life says what is wrong."""
    path = tmp_path / f"x{SUFFIX}"
    path.write_bytes(packed("\n".join((json.dumps({**HEAD, **RUN}), '[1.5,["Wakeup"],[]]', line))))
    (life,) = read([path])
    assert [entry.time for entry in life.entries] == [1.5]
    assert life.gap.startswith(f"{path.name} is damaged before its end: ")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        *[(key, value, rf".* at `\$.{key}") for key, value in (
            ("peer", []), ("name", 7), ("started", 1e300), ("began", None), ("names", None),
            ("file", "1"), ("rules", None), ("rules", {}), ("rules", {"run": "r", "fragments": [0]}), ("founder", None),
            ("ahead", float("inf")), ("ahead", float("nan")),
            ("rules", {"run": "r", "fragments": [[0]], "stop_after_samples": "soon"}),
        )],
        ("rules", {"run": "r", "fragments": []}, "its rules name no fragment"),
        ("history", 99, f".* in form 99; this version reads form {FORM}"),
    ],
)  # fmt: skip
def test_a_damaged_head_is_named(tmp_path: Path, key: str, value: object, says: str) -> None:
    path = tmp_path / "x.history.gz"
    write(path, **{key: value})
    with pytest.raises(ConfigError, match=rf"x.history.gz is no history: {says}"):
        read([path])


def test_what_can_not_be_read_in_a_folder_is_left_out(
    world: RecordedWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer whose disk was full leaves an empty file. The story of the others is told."""
    (tmp_path / "full.history.gz").write_bytes(b"")
    assert len(read([tmp_path])) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no history"):
        read([tmp_path / "empty"])
    (message,) = caplog.messages
    assert "full.history.gz is no history: it does not begin" in message
    with pytest.raises(ConfigError, match=r"full.history.gz is no history"):
        read([tmp_path, tmp_path / "full.history.gz"])


def test_peers_are_called_by_their_names(world: RecordedWorld) -> None:
    """Names stand in place of ids; of two peers of one name, and of one without a name, the id's last letters are
    shown. No text gives the terminal commands."""
    lives = world.lives()
    ids = [f"12D3KooW{letter * 44}" for letter in "abc"]
    for life, peer in zip(lives, ids, strict=False):
        life.head = replace(life.head, peer=peer, name="box" if peer != ids[2] else "alice")
    other = "12D3KooW" + "z" * 44
    named = naming(lives)
    assert named(" ".join([*ids, other])) == "box-aaaaaa box-bbbbbb alice …zzzzzz"
    assert named("a\x1b[2Jb") == "a [2Jb"
