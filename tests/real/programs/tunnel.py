"""A tunnel for TCP between two machines that no network joins, as `ssh -L` makes one: both ends share a socket file.

`tunnel.py near PORT FILE` listens at 127.0.0.1; `tunnel.py far FILE HOST PORT` dials for it. Each prints a line when it
is ready, and runs until it is killed.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading


def pour(source: socket.socket, target: socket.socket) -> None:
    """Copy all bytes, and then the end."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def joined(one: socket.socket, other: socket.socket) -> None:
    """Join two connections in threads that end with them."""
    for source, target in ((one, other), (other, one)):
        threading.Thread(target=pour, args=(source, target), daemon=True).start()


def main(end: str, *words: str) -> None:
    """Carry connections on."""
    if end == "near":
        listening = socket.create_server(("127.0.0.1", int(words[0])))
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(words[0])
        listening.listen()
    print(json.dumps({"what": "ready"}), flush=True)
    while True:
        taken, _ = listening.accept()
        try:
            if end == "near":
                beyond = socket.socket(socket.AF_UNIX)
                beyond.connect(words[1])
            else:
                beyond = socket.create_connection((words[1], int(words[2])), timeout=10)
                beyond.settimeout(None)
        except OSError:
            taken.close()
        else:
            joined(taken, beyond)


main(*sys.argv[1:])
