"""Settings: defaults, limits, what is refused and how, and what makes two runs the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from p2p_diloco.config import LIVE_KEYS, PeerConfig, RunConfig
from p2p_diloco.config.run import Codec
from p2p_diloco.errors import AddressError, ConfigError, Refused

ADDRESS = "/ip4/127.0.0.1/tcp/3/p2p/12D3KooWGrk7pQsQ8dDR8yu8vUuL1tCiBGHBvCVbx8fyR3zdYpuv"


@pytest.mark.parametrize(
    ("values", "key", "wrong"),
    [
        ({"sync_every": 0}, "sync_every", "must be at least 1"),
        ({"sync_every": 1.5}, "sync_every", "is not a whole number"),
        ({"sync_every": True}, "sync_every", "is not a whole number"),
        ({"sync_every": torch.ones(2)}, "sync_every", "is not a whole number"),
        ({"sync_every": np.float64(1.5)}, "sync_every", "is not a whole number"),
        ({"outer_lr": True}, "outer_lr", "is not a number"),
        ({"sync_every": 2, "num_fragments": 3}, "sync_every", "is less than num_fragments=3"),
        ({"codec": "zip"}, "codec", "is not known"),
        ({"reply_codec": "topk"}, "reply_codec", "leaves most of an averaged result out"),
        ({"rounding": "stochastic", "codec": "int8"}, "rounding", "is for codec=bf16, and codec is int8"),
        ({"step_limit": 0.5}, "step_limit", "would cut means of the usual length"),
        ({"step_limit": float("inf")}, "step_limit", "is not a finite number"),
        ({"outer_lr": -0.1}, "outer_lr", "must be at least 0"),
        ({"outer_momentum": 1.0}, "outer_momentum", "must be less than 1"),
        ({"round_timeout": 0}, "round_timeout", "must be more than 0"),
        ({"heartbeat_timeout": 0.5}, "heartbeat_timeout", "leaves no time for a probe"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout", "would switch off the detection of dead peers"),
        ({"merge_alpha": 1.1}, "merge_alpha", "must be at most 1"),
        ({"merge_alpha": 0.5, "merge": "rebase"}, "merge_alpha", "no meaning for merge=rebase"),
        ({"sync_every": 6, "num_fragments": 2, "overlap_steps": 4}, "overlap_steps", "more than the 3 steps between"),
        ({"nesterov": "perhaps"}, "nesterov", "is neither on nor off"),
        ({"outer_options": "{"}, "outer_options", "is not JSON"),
        ({"outer_options": "[" * 10**6}, "outer_options", "is not JSON"),
        ({"sync_evry": 5}, "sync_evry", "is not a setting; did you mean sync_every?"),
        ({"outer_optimizer": lambda params: None}, "outer_optimizer", "has no name by which the other peers"),
        ({"successors": 2}, "successors", "is for mode=async, and mode is sync"),
        ({"mode": "async", "round_timeout": 9}, "round_timeout", "is for mode=sync, and mode is async"),
        ({"mode": "async", "weighting": "samples"}, "weighting", "each submission counts one"),
        ({"mode": "async", "dn_buffer_size": 2, "nesterov": False}, "dn_buffer_size", "sgd with nesterov"),
        ({"mode": "async", "dn_buffer_size": 2, "outer_optimizer": "Adam"}, "dn_buffer_size", "sgd with nesterov"),
        ({"mode": "async", "dn_variant": "buffered"}, "dn_variant", "needs a buffer of 2 or more"),
    ],
)
def test_a_bad_run_config_is_one_sentence(values: dict[str, Any], key: str, wrong: str) -> None:
    """Each error names the key and the value, and says what to do. A setting that the mode does not use is never
    silently ignored."""
    with pytest.raises(ConfigError) as caught:
        RunConfig(**values)
    assert caught.value.key == key
    assert wrong in str(caught.value)
    assert caught.value.mend
    assert "\n" not in str(caught.value)


def test_a_class_of_outer_optimizers_is_named_as_others_can_import_it() -> None:
    for what, name in ((torch.optim.Adam, "Adam"), (RunConfig, "p2p_diloco.config.run:RunConfig"), ("adam", "adam")):
        assert RunConfig(outer_optimizer=what).outer_optimizer == name


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dn_buffer_size": 1, "outer_optimizer": "Adam"},
        {"dn_buffer_size": 3, "dn_variant": "buffered", "dylu": True, "async_grace": 0.5, "max_staleness": 0},
        {"successors": 0, "weighting": "uniform", "num_fragments": 5, "overlap_steps": 10, "codec": "int4"},
    ],
    ids=str,
)
def test_the_asynchronous_mode_accepts_its_settings(values: dict[str, Any]) -> None:
    """All of its own settings together, and the synchronous ones with the same meaning there."""
    config = RunConfig(mode="async", **values)
    assert RunConfig.from_wire(config.to_wire()) == config


runs = st.builds(
    lambda fragments, per_fragment, outer_lr, codec, stop: RunConfig(
        num_fragments=fragments,
        sync_every=fragments * per_fragment,
        outer_lr=outer_lr,
        codec=codec,
        stop_after_epochs=stop,
    ),
    st.integers(1, 9),
    st.integers(1, 999),
    st.floats(0, 10),
    st.sampled_from(get_args(Codec)),
    st.none() | st.integers(1, 10**9),
)


@given(runs)
def test_a_run_config_survives_the_wire(config: RunConfig) -> None:
    """Through msgpack and through JSON, the same settings and the same fingerprint come back."""
    for wire in (msgpack.unpackb(msgpack.packb(config.to_wire())), json.loads(json.dumps(config.to_wire()))):
        back = RunConfig.from_wire(wire)
        assert back == config
        assert back.fingerprint() == config.fingerprint()
        assert back.difference(config) == []


SHARED = {"sync_every": 100, "codec": "fp32", "reply_codec": "fp32", "nesterov": False, "rounding": "stochastic",
          "min_peers": 2, "slice_elements": 7, "fragment_layout": "strided", "weighting": "samples",
          "round_timeout": 5.0}  # fmt: skip


def test_shared_settings_are_in_the_fingerprint_and_others_are_not() -> None:
    """Peers that differ in a shared setting do not take each other for the same run. What may change during a run, as
    the outer learning rate, gives no other fingerprint, and no refusal of a joiner. It never changes between versions.
    """
    plain = RunConfig()
    assert plain.fingerprint() == "eaf3285dbfa2aed27ba151080fa4ef8a"
    for key, value in SHARED.items():
        other = RunConfig(**{key: value})
        assert other.fingerprint() != plain.fingerprint()
        assert other.difference(plain) == [(key, getattr(plain, key), value)]
    changed = RunConfig(outer_lr=0.1, outer_momentum=0.5, stop_after_epochs=3, stop_after_samples=9)
    assert changed.given.keys() == LIVE_KEYS
    assert changed.fingerprint() == plain.fingerprint()
    assert changed.difference(plain) == []


def test_only_given_settings_bind_a_joiner() -> None:
    """A joiner without settings fits every run; one with a value fits the runs that have it."""
    run, mine = RunConfig(sync_every=100, codec="fp32"), RunConfig(sync_every=200)
    assert RunConfig().difference(run, RunConfig().given) == []
    assert mine.difference(run, mine.given) == [("sync_every", 100, 200)]


@pytest.mark.parametrize("wire", [{"warp": 9}, {"mode": "later"}, {"sync_every": 0}])
def test_a_run_of_another_version_refuses(wire: dict[str, Any]) -> None:
    """If this version does not support the run's settings, the run refuses the peer: it is not the user's mistake."""
    with pytest.raises(Refused, match="install the version"):
        RunConfig.from_wire(wire)


@pytest.mark.parametrize(
    ("values", "key", "kind"),
    [
        ({"initial_peers": ["127.0.0.1:80"]}, "initial_peers", AddressError),
        ({"announce_maddrs": ["x"]}, "announce_maddrs", AddressError),
        ({"run_id": "a b"}, "run_id", ConfigError),
        ({"name": "x" * 65}, "name", ConfigError),
        ({"wait_timeout": 0}, "wait_timeout", ConfigError),
        ({"new_generation": True}, "new_generation", ConfigError),
    ],
)
def test_a_bad_peer_config_is_one_sentence(values: dict[str, Any], key: str, kind: type[Exception]) -> None:
    """As for the run config; wrong addresses are usage errors."""
    with pytest.raises(kind) as caught:
        PeerConfig(**values)
    assert getattr(caught.value, "key") == key  # noqa: B009 - both kinds have it, Exception doesn't
    assert "\n" not in str(caught.value)


def test_text_is_read_as_the_field_needs_it() -> None:
    """Flags and variables are text: lists, paths, switches, tables and 'none' come out of it."""
    peer = PeerConfig(initial_peers=f"{ADDRESS}, {ADDRESS}", identity_path="~/id", name="none", client_mode="yes")  # type: ignore[arg-type]
    assert peer.initial_peers == (ADDRESS,)
    assert peer.identity_path == Path.home() / "id"
    assert PeerConfig(checkpoint_dir=Path("saved")).checkpoint_dir == Path.cwd() / "saved"  # a script may go elsewhere
    assert peer.name is None
    assert peer.client_mode is True
    run = RunConfig(outer_options="{}", stop_after_epochs="none", outer_lr="0.5")  # type: ignore[arg-type]
    assert (run.outer_options, run.stop_after_epochs, run.outer_lr) == ({}, None, 0.5)


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({}, 0.0),
        ({"overlap_steps": 1}, 0.5),
        ({"overlap_steps": 1, "merge": "rebase"}, 0.0),
        ({"overlap_steps": 1, "merge_alpha": 0.0}, 0.0),
        ({"merge_alpha": 0.25}, 0.25),
    ],
    ids=str,
)
def test_half_of_the_local_values_stays_where_steps_are_made_meanwhile(values: dict[str, Any], share: float) -> None:
    """A given value counts; an unset one follows from the overlap, and stays unset in the run's settings."""
    config = RunConfig(**values)
    assert config.local_share == share
    assert RunConfig.from_wire(config.to_wire()).local_share == share
    assert config.to_wire()["merge_alpha"] == values.get("merge_alpha")


@pytest.mark.parametrize(
    ("values", "doubts"),
    [
        ({}, 0),
        ({"sync_every": 20, "overlap_steps": 5}, 0),
        ({"sync_every": 20, "overlap_steps": 6}, 1),
        ({"sync_every": 20, "overlap_steps": 19, "outer_momentum": 0.5}, 0),
        ({"stop_after_epochs": 49, "outer": "fixed"}, 1),
        ({"stop_after_epochs": 19}, 1),
        ({"stop_after_epochs": 19, "outer_momentum": 0.9}, 2),
        ({"stop_after_epochs": 20, "outer_momentum": 0.5}, 0),
        ({"stop_after_epochs": 20, "outer_optimizer": "Adam"}, 0),
        ({"stop_after_epochs": 9, "mode": "async", "dn_buffer_size": 3}, 0),
        ({"sync_every": 20, "overlap_steps": 20}, 1),
        ({"sync_every": 20, "num_fragments": 4, "overlap_steps": 5}, 0),
        ({"codec": "topk"}, 1),
        ({"mode": "async"}, 0),
        ({"mode": "async", "outer": "fixed"}, 1),
        ({"mode": "async", "outer_momentum": 0.5}, 0),
    ],
    ids=str,
)
def test_settings_that_train_badly_cause_a_warning(values: dict[str, Any], doubts: int) -> None:
    """Settings that were measured to be worse than training alone are accepted with a warning."""
    told = RunConfig(**values).doubts()
    assert len(told) == doubts
    assert all("measured" in text and "; use " in text for text in told)


def test_a_rate_that_is_set_is_used_from_the_first_step_on() -> None:
    """Only a run of which nobody has set a rate begins with averaging; `outer` itself decides before all else."""
    assert RunConfig().outer == RunConfig(nesterov=False).outer == "auto"
    for values in ({"outer_lr": 0.7}, {"outer_momentum": 0.9}, {"outer_optimizer": "adam"}):
        assert RunConfig(**values).outer == "fixed"
    assert RunConfig(outer="fixed").rates(0) == (0.7, 0.9)
    chosen = RunConfig(outer="auto", outer_lr=0.5, outer_momentum=0.8)
    assert (chosen.outer, chosen.rates(0), chosen.rates(1000)) == ("auto", (1.0, 0.0), (0.5, 0.8))
    assert RunConfig.from_wire(chosen.to_wire()) == chosen
    with pytest.raises(ConfigError, match="outer=auto is for outer_optimizer=sgd"):
        RunConfig(outer="auto", outer_optimizer="adam")


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ({"sync_every": 20}, {0: (1.0, 0.0), 10: (1 - 0.3 * 0.5 / 0.9, 0.5), 90: (0.7, 0.9), 500: (0.7, 0.9)}),
        (
            {"sync_every": 5},
            {0: (1.0, 0.0), 25: (1 - 0.3 * 0.5 / 0.9, 0.5), 224: (1 - 0.3 * 224 / 249 / 0.9, 224 / 249)},
        ),
        ({"sync_every": 100, "mode": "async"}, {0: (0.5, 0.0), 100: (0.5, 0.0)}),
        ({"sync_every": 100, "mode": "async", "dn_buffer_size": 4}, {0: (1.0, 0.0), 8: (0.85, 0.25), 24: (0.7, 0.5)}),
    ],
    ids=str,
)
def test_the_rates_rise_from_averaging_to_those_of_the_run(
    values: dict[str, Any], at: dict[int, tuple[float, float]]
) -> None:
    """The momentum is one half after 5 rounds and 100 inner steps; the learning rate falls as the momentum rises."""
    config = RunConfig(**values)
    for epoch, rates in at.items():
        assert config.rates(epoch) == pytest.approx(rates)
    momenta = [config.rates(epoch)[1] for epoch in range(300)]
    assert momenta == sorted(momenta)


def test_numbers_of_other_libraries_are_read() -> None:
    """They become Python's own, so a run's settings can be written down."""
    made = RunConfig(sync_every=np.int64(20), outer_lr=np.float32(0.5), nesterov=np.bool_(False))
    made = RunConfig(**{**made.given, "num_fragments": torch.tensor(2), "outer_momentum": np.float64(0.25)})
    assert json.loads(json.dumps(made.given)) == {
        "sync_every": 20, "num_fragments": 2, "outer": "fixed", "outer_lr": 0.5, "outer_momentum": 0.25,
        "nesterov": False,
    }  # fmt: skip


@pytest.mark.parametrize("several", [list, tuple, set, iter])
def test_addresses_may_be_objects(several: Any) -> None:
    """One or several of the multiaddr package's, as `get_visible_maddrs` of Hivemind returns them."""
    assert PeerConfig(initial_peers=Multiaddr(ADDRESS)).initial_peers == (ADDRESS,)
    assert PeerConfig(initial_peers=several([Multiaddr(ADDRESS)])).initial_peers == (ADDRESS,)
    with pytest.raises(AddressError, match="initial_peers=5 is no multiaddr"):
        PeerConfig(initial_peers=5)


@pytest.mark.parametrize(("key", "value"), [("name", "Zo\udceb"), ("checkpoint_dir", Path("/c\udcff"))])
def test_bytes_that_are_no_text_are_refused_in_one_sentence(key: str, value: object) -> None:
    """From a command line or a path in another encoding; records, messages and files have UTF-8."""
    with pytest.raises(ConfigError, match=rf"{key}='.*udc..' is no UTF-8 text in this locale; .*LC_ALL=C\.UTF-8"):
        PeerConfig.model_validate({key: value})
