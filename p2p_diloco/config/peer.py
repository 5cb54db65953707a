"""The settings that each peer chooses for itself (`PeerConfig`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from p2p_diloco.addresses import check_listen_address, check_peer_address, split_addresses
from p2p_diloco.config.base import Seconds, Settings

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Place = Annotated[Path, AfterValidator(Path.absolute)]
"""A path. A relative one counts from the working directory in which the settings are made: a program may go to another
one before the path is used."""


class PeerConfig(Settings):
    """The settings that each peer chooses for itself; they may differ from peer to peer.

    Raises:
        ConfigError: a value can't be used; the error names the key, the value and the mend.
        AddressError: an address can't be read.
    """

    run_id: Label = "main"
    """The run to join, or to found (see found)."""
    initial_peers: tuple[str, ...] = ()
    """Addresses of bootstraps or peers to join through, as printed in a bootstrap's join line."""
    invite: str | None = None
    """Invitation to a private run: its file, or its one line of base64. It names the run and addresses."""
    open: bool = False
    """Take part in an open run: every peer that knows an address may join. Any run on loopback is open."""
    found: bool = False
    """Found the run if there is none. A peer that is given settings of the run, a checkpoint to start from, or no
    initial peers does so without this; any other peer waits until the run is founded."""
    name: Label | None = None
    """This peer's name in status and logs; unset: the name in its own invitation, or else the host's."""
    role: Literal["worker", "aggregator", "observer"] = "worker"
    """worker: trains and aggregates; aggregator: trains nothing; observer: only reads the global parameters, and no
    peer waits for it."""
    host_maddrs: tuple[str, ...] = ()
    """Addresses to listen on; unset: loopback if all initial peers are on it, else every interface."""
    announce_maddrs: tuple[str, ...] = ()
    """Addresses that other peers are told to dial; unset: those that it listens on."""
    identity_path: Place | None = None
    """File that keeps this peer's identity across restarts; unset: a new one each time."""
    client_mode: bool = False
    """Listen nowhere; this peer then aggregates only while no other peer can be dialled."""
    direct: bool = True
    """Send payloads over direct TLS connections where these can be made, otherwise over libp2p."""
    direct_port: int = Field(default=0, ge=0, le=65535)
    """TCP port for direct connections; 0: the system chooses one."""
    relay_mbit: Annotated[float, Field(ge=0)] = 50.0
    """Mbit/s that this peer passes on between peers that can't reach each other; 0: none."""
    map_port: bool = False
    """Ask the router to forward a port to this peer (UPnP or NAT-PMP)."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """TCP port for Prometheus; 0: the system chooses one; unset: none."""
    metrics_host: str = "127.0.0.1"
    """Address of this machine at which metrics_port listens; 0.0.0.0: all addresses."""
    otlp_endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^/]+")] | None = None
    """URL of an OpenTelemetry collector for the metrics, such as http://127.0.0.1:4318; unset: none."""
    node_threads: int | None = Field(default=None, ge=1, le=64)
    """Threads with which this peer's node computes means and outer steps; unset: a quarter of the cores, 8 at most."""
    checkpoint_dir: Place | None = None
    """Folder for checkpoints; unset: none are kept."""
    save_every: int = Field(default=10, ge=1)
    """Outer steps between two checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints to keep; older ones are deleted."""
    history_path: Place | None = None
    """Folder for this peer's history, which `p2p-diloco replay` tells; unset: p2p_diloco/history in $XDG_STATE_HOME or
    ~/.local/state."""
    history_bytes: int = Field(default=16 * 2**20, ge=0)
    """The most bytes on disk for the history of one start of this peer; 0: none is kept."""
    cache_dir: Place | None = None
    """Folder for slices of data that data nodes serve; unset: p2p_diloco/slices in $XDG_CACHE_HOME or ~/.cache. Peers
    of one machine may share it."""
    cache_bytes: int = Field(default=10 * 2**30, ge=1)
    """The most bytes in cache_dir; the slices used longest ago are deleted first."""
    from_checkpoint: Place | None = None
    """Checkpoint folder to start from."""
    new_generation: bool = False
    """Found the run anew from the checkpoint in from_checkpoint, even if the run has gone further."""
    restart_wait: Annotated[float, Field(ge=0)] = 30.0
    """Seconds to wait, after a start from a checkpoint, for as many peers as the last round had."""
    wait_timeout: Seconds = 300.0
    """Seconds to wait for the run to be founded, for each slice of its state, and for start_peers."""

    on_exit: Literal["sync", "warn", "drop"] = "sync"
    """What becomes of inner steps that no commit counts when this peer leaves normally. sync: a last exchange; warn: a
    warning; drop: nothing."""
    exit_timeout: Seconds = 60.0
    """Seconds that leaving waits for that last exchange; then, if this peer has trained alone, for a peer that takes
    over the run's state."""

    @field_validator("initial_peers")
    @classmethod
    def _can_be_dialled(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(check_peer_address(address) for address in split_addresses(addresses))

    @field_validator("host_maddrs", "announce_maddrs")
    @classmethod
    def _can_be_listened_on(cls, addresses: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        key = cast(str, info.field_name)
        return tuple(check_listen_address(address, key=key) for address in split_addresses(addresses))

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.new_generation and self.from_checkpoint is None:
            self._refuse("new_generation", "needs a checkpoint to start from", "give from_checkpoint too")
        if self.open and self.invite is not None:
            self._refuse("open", "contradicts invite, because a run is either open or private", "give one of the two")
        for key in ("found", "checkpoint_dir", "from_checkpoint") if self.role == "observer" else ():
            if getattr(self, key):
                self._refuse(key, "has no meaning for role=observer, which only reads", "leave it out")
        return self
