"""Options that several commands share.

Law: holds texts and defaults only; reads and checks nothing.
"""

from __future__ import annotations

from typer import Option

from p2p_diloco.cli.logs import FORMS

LOGS = Option("auto", help="Form of the log on stderr.", metavar=f"[{'|'.join(FORMS)}]")
DEBUG = Option(False, "--debug", help="Log more, and show where an error comes from.")
CONFIG = Option(None, help="TOML file with settings; flags and environment come first.", metavar="PATH")
INVITE = Option(None, help="Invitation to a private run; names the run and addresses.", metavar="PATH")
KEY = Option(None, help="File of the run's key; unset: the only *.key in this folder.", metavar="PATH")
RUN_ID = Option(None, help="The run to change.", show_default="main", metavar="NAME")
FOUNDER = Option(
    None, help="Identity file of the run's founder; unset: the run's key, beside the invitation.", metavar="PATH"
)
WAIT = Option(60.0, help="Seconds to wait until the peers know of the change.", metavar="X")
OUTCOME = Option(False, "--json", help="Print the outcome as one JSON object.")
BASELINE = Option(None, help="Losses of another run, to compare at equal samples (docs/metrics.md).", metavar="PATH")
BASELINE_BOUND = Option(0.05, help="Warn if the loss is above the baseline's by more than this fraction.", metavar="X")
TOKENS_PER_SAMPLE = Option(None, help="For a baseline by tokens: tokens of one sample of the run.", metavar="X")
INITIAL_PEERS = Option(None, help="Addresses to look through, with spaces or commas between.", metavar="ADDR...")
METRICS_PORT = Option(
    None, min=0, max=65535, help="TCP port at which Prometheus gets the metrics of all peers; 0: any.", metavar="N"
)
METRICS_HOST = Option("127.0.0.1", help="Address at which --metrics-port listens.", metavar="ADDR")
OTLP_ENDPOINT = Option(None, help="OpenTelemetry collector that gets these metrics.", metavar="URL")
