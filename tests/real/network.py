"""Machines of a test: those that `p2p-diloco bench --link` uses."""

from p2p_diloco.cli.bench.network import Network as Network
from p2p_diloco.cli.bench.network import NoNetwork as NoNetwork
