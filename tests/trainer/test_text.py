"""Text: split once and for all, drawn without a past."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest
import torch

from p2p_diloco.errors import ConfigError
from p2p_diloco.trainer import blocks as blocks_module
from p2p_diloco.trainer.blocks import BLOCK_BYTES, Block, Text, load_text
from p2p_diloco.trainer.train import Batches, held_out_batches, joined, own_part, training_part


def _prose(size: int, seed: int = 0) -> bytes:
    return bytes(random.Random(seed).choices(range(32, 127), k=size))


def _draw(content: bytes, key: str = "a", seed: int = 0) -> Batches:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Batches(tensor, batch_size=4, context=16, seed=seed, key=key)


def _names(blocks: tuple[Block, ...]) -> set[str]:
    return {block.name for block in blocks}


def test_the_standard_library_is_neither_its_tests_nor_what_is_installed_beside_it() -> None:
    text = load_text()
    folders = {part for name in _names(text.training) | _names(text.held_out) for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "idlelib", "__pycache__"}
    assert "json" in folders


def test_the_same_text_is_split_alike_wherever_it_lies(tmp_path: Path) -> None:
    """Copies under other folders and (for a lone file) other names hold out the same bytes."""
    content = _prose(40 * BLOCK_BYTES)
    files = tmp_path / "corpus.txt", tmp_path / "copy-on-another-machine"
    for file in files:
        file.write_bytes(content)
    first, second = (load_text(file) for file in files)
    assert first == second
    assert len(first.held_out) + len(first.training) == 40
    assert b"".join(block.content for block in sorted(
        first.held_out + first.training, key=lambda block: int(block.name.split(":")[1])
    )) == content  # fmt: skip


def test_a_short_text_has_a_held_out_part_too(tmp_path: Path) -> None:
    """The block first in line by its name, so that it is held out of longer texts too."""
    for size in (BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 5 * BLOCK_BYTES):
        (tmp_path / "short.txt").write_bytes(_prose(size))
        text = load_text(tmp_path / "short.txt")
        assert text.held_out
        assert text.training
        assert max(block.rank for block in text.held_out) < min(block.rank for block in text.training)


def test_no_more_is_read_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory is bounded, and the user is told."""
    monkeypatch.setattr(blocks_module, "MAX_TEXT_BYTES", 1000)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(_prose(400))
    text = load_text(tmp_path)
    assert sum(len(block.content) for block in text.training + text.held_out) == 1000
    assert "the rest is left out" in caplog.text


@pytest.mark.parametrize("names", [["a.txt"], [".a", "b.txt"], ["a.bin"], [".git/a", "b.bin", "c.bin", "d.txt"]])
def test_too_little_text_is_told(tmp_path: Path, names: list[str]) -> None:
    """The error says which files are left out, so that a user who sees files in the folder knows the reason."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0" if name.endswith(".bin") else b"short")
    with pytest.raises(ConfigError, match=r"too little \(hidden and binary files are left out\);"):
        load_text(tmp_path)


def test_an_error_while_reading_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "text.txt").write_bytes(_prose(500))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"can't be read \(permission denied\)"):
        load_text(tmp_path)


def test_targets_are_the_next_bytes_of_the_text() -> None:
    content = _prose(3000)
    tokens, targets = next(_draw(content))
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    for row, next_row in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert row[1:] == next_row[:-1]
        assert bytes([*row, next_row[-1]]) in content


def test_a_saved_position_is_all_it_takes_to_go_on() -> None:
    content = _prose(100_000)
    whole, resumed = _draw(content), _draw(content)
    drawn = [next(whole)[0] for _ in range(6)]
    resumed.position = 4
    assert torch.equal(next(resumed)[0], drawn[4])
    assert torch.equal(next(resumed)[0], drawn[5])
    assert resumed.position == 6
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(next(_draw(content, "b"))[0], drawn[0]), "another peer draws otherwise"
    assert not torch.equal(next(_draw(content, seed=1))[0], drawn[0])


def test_fixed_parts_are_disjoint_and_make_up_the_whole() -> None:
    text = Text(tuple(Block(f"{n}", bytes([n])) for n in range(7)), (Block("held", b"\xff"),))
    parts = [training_part(text, 3, index).tolist() for index in range(3)]
    assert sorted(byte for part in parts for byte in part) == list(range(7))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(ConfigError, match="num_shards=8 is more than the 7 blocks"):
        training_part(text, 8, 0)


def _own_blocks(text: Text, key: str) -> set[int]:
    """Which blocks a peer's part is made of, where each is one byte of its own."""
    return set(own_part(text, key, context=0).tolist())


def test_a_peers_own_part_is_a_third_that_differs_from_every_others() -> None:
    """Two peers share about a third of their parts, ten see nearly all; the same peer has the same again."""
    text = Text(tuple(Block(f"{n}", bytes([n])) for n in range(240)), (Block("held", b"\xff"),))
    parts = [_own_blocks(text, f"peer {n}") for n in range(10)]
    assert {len(part) for part in parts} == {80}
    common = [len(a & b) / 80 for a, b in combinations(parts, 2)]
    assert 0.15 < min(common) <= max(common) < 0.5
    assert sum(common) / len(common) == pytest.approx(1 / 3, abs=0.03)
    assert len(set[int]().union(*parts)) > 0.95 * 240
    assert _own_blocks(text, "peer 3") == parts[3]


def test_a_peers_own_part_is_never_shorter_than_a_window_if_the_text_is_not() -> None:
    """A text of few short blocks gives more than a third rather than nothing to draw from."""
    text = Text(tuple(Block(f"{n}", bytes([n]) * 10) for n in range(6)), ())
    assert len(own_part(text, "a", context=15)) == 20
    assert len(own_part(text, "a", context=20)) == 30
    assert len(own_part(text, "a", context=1000)) == 60


def test_a_text_shorter_than_a_window_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match="context=16 needs 17 bytes"):
        _draw(b"x" * 16)
    next(_draw(b"x" * 17))
    held_out = Text((Block("a", b"x" * 99),), (Block("b", b"x" * 16),))
    with pytest.raises(ConfigError, match="context=16 needs 17 bytes"):
        list(held_out_batches(held_out, count=1, batch_size=2, context=16))


def test_held_out_batches_are_always_the_same_and_of_held_out_text_alone() -> None:
    """They span the held-out text from its first byte to its last, and show none of the training text."""
    text = Text((Block("a", b"\0" * 500),), (Block("b", bytes(range(1, 101))), Block("c", bytes(range(101, 201)))))
    first, again = ([*held_out_batches(text, count=3, batch_size=5, context=8)] for _ in range(2))
    assert len(first) == 3
    for (x, y), (same_x, same_y) in zip(first, again, strict=True):
        assert x.shape == y.shape == (5, 8)
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
    seen = torch.cat([part for batch in first for part in batch])
    assert seen.min().item() == 1
    assert seen.max().item() == 200
    assert joined(text.held_out).tolist() == list(range(1, 201))
