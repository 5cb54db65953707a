"""A run beside its baseline: at equal samples, from each kind of file, and as a warning in every view."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p_diloco.errors import ConfigError, UsageError
from p2p_diloco.node.status import PeerStatus
from p2p_diloco.observe.baseline import Baseline
from p2p_diloco.observe.snapshot import Compared, Snapshot, snapshot
from p2p_diloco.observe.view import lines

CSV = "samples,loss\n0,4.0\n1000,2.0\n2000,1.0\n"


def seen(samples: int | None, loss: float | None, held_out: float | None = None, now: float = 100.0) -> Snapshot:
    told = {"counted_samples": samples, "loss": loss, "held_out_loss": held_out}
    peer = PeerStatus(name="alice", peer_id="a", time=now, state="training", **told)  # type: ignore[arg-type]
    return snapshot("main", None, [peer], now)


def written(folder: Path, text: str) -> Path:
    path = folder / "baseline"
    path.write_text(text)
    return path


def compared(folder: Path, text: str, looked: Snapshot) -> Compared | None:
    return Baseline.read(written(folder, text)).beside(looked).run.compared


@pytest.mark.parametrize(
    ("samples", "baseline"), [(0, 4.0), (500, 3.0), (1000, 2.0), (1500, 1.5), (2000, 1.0), (2001, None), (None, None)]
)
def test_losses_are_compared_at_equal_samples(tmp_path: Path, samples: int | None, baseline: float | None) -> None:
    """On straight lines between the baseline's points; outside them there is nothing to compare with."""
    found = compared(tmp_path, CSV, seen(samples, 3.0))
    assert (None if found is None else found.baseline) == baseline


@pytest.mark.parametrize(
    "text",
    [
        "samples, loss, note\n1000,3.0,x\n1000,1.0,y\n3000,2.0,\n2000,,\n",
        '{"samples": 1000, "loss": 2.0}\n\n{"samples": 3000, "loss": 2.0, "more": [1]}\n',
        '{"schema_version": 1, "run": {"samples": null, "loss": null}}\n'
        '{"run": {"samples": 1000, "loss": 2.0, "held_out_loss": null}, "peers": []}\n'
        '{"run": {"samples": 3000, "loss": 2.0}}\n',
    ],
)
def test_files_are_csv_or_json_lines(tmp_path: Path, text: str) -> None:
    """Other columns, empty values and the order don't matter; losses at the same samples are averaged."""
    found = compared(tmp_path, text, seen(1500, 2.1))
    assert found is not None
    assert (found.which, found.baseline, round(found.excess, 6), found.above) == ("loss", 2.0, 0.05, False)


def test_what_status_prints_is_a_baseline(tmp_path: Path) -> None:
    """So one run is compared with another without a further tool."""
    text = "\n".join(seen(count, 4.0 - count / 1000).to_json() for count in (0, 1000, 2000))
    found = compared(tmp_path, text, seen(1000, 3.3))
    assert found is not None
    assert found.baseline == 3.0


def test_tokens_become_samples(tmp_path: Path) -> None:
    path = written(tmp_path, "tokens,loss\n0,4.0\n1024000,2.0\n")
    found = Baseline.read(path, tokens_per_sample=1024).beside(seen(1000, 2.0)).run.compared
    assert found is not None
    assert found.baseline == 2.0
    with pytest.raises(ConfigError, match="--tokens-per-sample"):
        Baseline.read(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "has no line"), ("step,loss\n1,2.0\n", "has no line"), ("samples,loss\n1,nan\n", "line 2"),
     ("samples,loss\n1,0\n", "loss=0"), ("samples,loss\nx,1\n", "samples=x"), ("{}\n[1]\n", "line 2"),
     ('{"samples": [], "loss": 1}', "samples=")],
)  # fmt: skip
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """With what is wrong and how a file looks."""
    with pytest.raises(ConfigError, match="samples,loss") as raised:
        Baseline.read(written(tmp_path, text))
    assert told in str(raised.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Baseline.read(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is no text"):
        Baseline.read(tmp_path / "bytes")
    for bound, tokens in ((0.05, 0.0), (0.05, float("nan"))):
        with pytest.raises(UsageError, match="--"):
            Baseline.read(written(tmp_path, CSV), bound, tokens)


def test_a_loss_above_the_bound_is_told_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """5 % are allowed, 6 % are not: a line, an event since it began, a warning once, gauges. A look without a loss
    changes nothing; a good loss ends it."""
    baseline = Baseline.read(written(tmp_path, "samples,loss\n0,2\n2000,2\n"))
    good = baseline.beside(seen(1000, 2.1))
    assert lines(good)[1] == "  loss 2.1000: 5.0% above the baseline's 2.0000 at 1,000 samples"
    assert (good.run.events, caplog.records) == ((), [])
    assert "below the baseline's" in lines(baseline.beside(seen(1000, 1.9)))[1]
    bad = [baseline.beside(seen(1000, 2.12))]
    metrics = {family.name: family.samples[0].value for family in baseline.collect()}
    bad += [baseline.beside(one) for one in (seen(1000, None, now=101.0), seen(1200, 2.2, now=105.0))]
    told = [[(event.time, event.peer, event.text) for event in one.run.events] for one in bad]
    event = (100.0, "baseline", "the loss is more than 5 % above the baseline's")
    assert told == [[event], [], [event]]
    assert len(caplog.records) == 1
    assert {name: round(value, 6) for name, value in metrics.items()} == {
        "p2p_diloco_baseline_loss": 2.0, "p2p_diloco_baseline_excess_ratio": 0.06, "p2p_diloco_baseline_exceeded": 1.0,
    }  # fmt: skip
    assert json.loads(bad[0].to_json())["run"]["compared"] == {
        "which": "loss", "samples": 1000, "loss": 2.12, "baseline": 2.0, "excess": pytest.approx(0.06), "bound": 0.05,
        "above": True,
    }  # fmt: skip
    assert baseline.beside(seen(1300, 2.0)).run.events == ()
    assert baseline.beside(seen(1400, 2.3, now=200.0)).run.events[0].time == 200.0
