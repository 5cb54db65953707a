"""How much of a link slices use: beside plain TCP on the same throttled link, in turns."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cables import Cables
from swarm import Swarm
from test_data_nodes import data_node

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(400)]

MBIT, MEGABYTES = 100.0, 64
LEAST_SHARE = 0.7
SENDS = """
import socket
with socket.create_server(("0.0.0.0", 4000)) as server:
    print("listens", flush=True)
    one, _ = server.accept()
    one.sendall(bytes({nbytes}))
    one.close()
"""
RECEIVES = """
import socket, time
with socket.create_connection(("{host}", 4000)) as one:
    began, count = time.monotonic(), 0
    while data := one.recv(1 << 20):
        count += len(data)
print(count / (time.monotonic() - began))
"""


def plain_tcp(network: Cables, source: str, to: str, nbytes: int) -> float:
    """Bytes a second of a plain TCP connection between two machines."""
    sender = [*network.machine(source), sys.executable, "-c", SENDS.format(nbytes=nbytes)]
    with subprocess.Popen(sender, stdout=subprocess.PIPE, text=True) as sending:
        assert sending.stdout is not None
        sending.stdout.readline()
        receiver = [*network.machine(to), sys.executable, "-c", RECEIVES.format(host=network.machines[source])]
        done = subprocess.run(receiver, capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout)


@pytest.mark.parametrize(("nodes", "slice_bytes"), [(1, "1M"), (2, "8M")])
def test_slices_use_the_link(swarm: Swarm, network: Cables, tmp_path: Path, nodes: int, slice_bytes: str) -> None:
    """At least 70 % of what plain TCP carries."""
    swarm.bootstrap("10.77.0.1", network.machine("seed"))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "random.txt").write_bytes(base64.encodebytes(os.urandom(MEGABYTES * 740_000)))
    of = (str(corpus), "--slice-bytes", slice_bytes, "--run-id", "test", "--open", "--initial-peers", *swarm.addresses)
    for name in "ab"[:nodes]:
        data_node(swarm, name, *of, on=network.machine(name))
    options = {"slices": "corpus", "cache": str(tmp_path / "cache")}
    reader = swarm.start("reader", "slices.py", on=network.machine("reader"), **options)
    reader.wait_for("in")
    for name in (*"ab"[:nodes], "reader"):
        network.throttle(name, MBIT)
    before = plain_tcp(network, "a", "reader", 25_000_000)
    reader.tell("go")
    read = reader.wait_for("read", 120.0)
    after = plain_tcp(network, "a", "reader", 25_000_000)
    rate, plain = read["nbytes"] / read["seconds"], (before + after) / 2
    told = {"data nodes": nodes, "slice bytes": slice_bytes, "Mbit/s": round(rate * 8e-6, 1)}
    print({**told, "plain TCP": round(plain * 8e-6, 1), "share": round(rate / plain, 3)})
    assert read["nbytes"] == (corpus / "random.txt").stat().st_size
    assert rate >= LEAST_SHARE * plain
