"""Options that several commands share.

Law: holds texts and defaults only; reads and checks nothing.
"""

from __future__ import annotations

from typer import Option

from p2p_diloco.cli.logs import FORMS

LOGS = Option("auto", help="Form of the log on stderr.", metavar=f"[{'|'.join(FORMS)}]")
DEBUG = Option(False, "--debug", help="Log more, and show where an error comes from.")
CONFIG = Option(None, help="TOML file with settings; flags and environment come first.", metavar="PATH")
KEY = Option(None, help="File of the run's key; unset: the only *.key in this folder.", metavar="PATH")
WAIT = Option(60.0, min=0, help="Seconds to wait until the peers know of the change.", metavar="X")
OUTCOME = Option(False, "--json", help="Print the outcome as one JSON object.")
BASELINE = Option(None, help="Losses of another run, to compare at equal samples (docs/metrics.md).", metavar="PATH")
BASELINE_BOUND = Option(
    0.05, min=0, help="Warn if the loss is above the baseline's by more than this fraction.", metavar="X"
)
TOKENS_PER_SAMPLE = Option(None, help="For a baseline by tokens: tokens of one sample of the run.", metavar="X")
METRICS_PORT = Option(
    None, min=0, max=65535, help="TCP port at which Prometheus gets the metrics of all peers; 0: any.", metavar="N"
)
METRICS_HOST = Option("127.0.0.1", help="Address at which --metrics-port listens.", metavar="ADDR")

A_RUN = ("initial_peers", "run_id", "invite")
"""The settings that name a run and the way to it."""
TOLD = {
    "initial_peers": "Addresses of the run's peers or bootstraps, with spaces or commas between.",
    "run_id": "The run; unset: main.",
    "invite": "Invitation to a private run; names the run and addresses.",
    "otlp_endpoint": "OpenTelemetry collector that gets the metrics of all peers.",
}
"""What these settings mean for a command that is no peer."""
FOUNDER = {
    **TOLD,
    "identity_path": "Identity file of the run's founder; unset: the run's key, beside the invitation.",
    "outer_lr": "Learning rate of the outer optimizer.",
    "outer_momentum": "Momentum of the outer optimizer.",
    "sync_every": "H: inner steps between two exchanges.",
    "min_peers": "Contributions that an outer step needs at least.",
    "stop_after_epochs": "Outer steps after which the run ends for all; none: never.",
    "stop_after_samples": "Samples after which the run ends for all; none: never.",
}
"""What they mean for a command that changes a run."""

OFTEN_SET = "Often set"
JOIN = {
    OFTEN_SET: (
        "initial_peers", "invite", "run_id", "name", "open", "sync_every", "start_peers", "stop_after_epochs",
        "checkpoint_dir", "from_checkpoint",
    ),
    "All peers agree: inner and outer steps": (
        "mode", "pace", "outer", "outer_optimizer", "outer_options", "outer_lr", "outer_momentum", "nesterov",
        "weighting", "aggregation", "step_limit", "audit_rate", "buffers", "stop_after_samples",
    ),
    "All peers agree: exchanges": (
        "num_fragments", "fragment_layout", "slice_elements", "overlap_steps", "merge", "merge_alpha", "codec",
        "reply_codec", "rounding",
    ),
    "All peers agree: waiting for each other": (
        "min_peers", "round_timeout", "pause_timeout", "heartbeat_interval", "heartbeat_timeout", "successors",
    ),
    "All peers agree: asynchronous runs": (
        "dn_buffer_size", "dn_variant", "dylu", "async_grace", "max_staleness", "carry_rounds",
    ),
    "This peer": (
        "found", "role", "identity_path", "node_threads", "wait_timeout", "on_exit", "exit_timeout", "restart_wait",
        "new_generation",
    ),
    "This peer's network": (
        "host_maddrs", "announce_maddrs", "client_mode", "direct", "direct_port", "relay_mbit", "map_port",
    ),
    "This peer's files": ("save_every", "keep", "history_path", "history_bytes", "cache_dir", "cache_bytes"),
    "This peer's metrics": ("metrics_port", "metrics_host", "otlp_endpoint"),
    "The built-in trainer": (
        "data", "num_shards", "shard_index", "layers", "width", "heads", "context", "steps", "warm_start", "batch_size",
        "lr", "warmup_steps", "min_lr_ratio", "weight_decay", "clip", "seed", "eval_every_epochs", "eval_batches",
        "threads", "device", "pause_s", "log_path", "summary_json",
    ),
}  # fmt: skip
"""The settings that `join` has flags for, by the panel of its help text; every setting is in one."""
