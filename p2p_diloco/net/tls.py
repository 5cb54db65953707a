"""TLS 1.3 between two peers of a run: each shows its chain, and must be the peer that the other one expects.

Law: knows connections and certificates, but no frames. OpenSSL checks the chain; what it can't check, `admit` checks
before a byte is read. The event loop's own TLS encrypts (docs/decisions/0031).
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from p2p_diloco.net import tcp
from p2p_diloco.net.certificates import Stranger, admit, authority, split
from p2p_diloco.net.membership import Membership
from p2p_diloco.net.pipe import Pipe
from p2p_diloco.net.signing import SigningKey


class Tls:
    """This peer's end of the handshake in one run. `key`: the peer's identity; `clock` returns seconds since 1970."""

    def __init__(self, membership: Membership, key: SigningKey, clock: Callable[[], float] = time.time) -> None:
        self._membership, self._clock = membership, clock
        self._server, self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._client.check_hostname = False  # a peer has an id and no name: `admit` checks it
        self._server.num_tickets = 0  # sessions are never resumed
        for context in (self._server, self._client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.verify_flags |= ssl.VERIFY_X509_STRICT
            context.load_verify_locations(cadata=authority(membership.run).public_bytes(Encoding.DER))
            _load(context, membership.chain, key)

    async def secured(self, below: socket.socket | Pipe, peer: str, *, server: bool) -> Pipe:
        """Encrypt a connection from now on, at the same time as the other end, which must be `peer`. `server`: whether
        this end is TLS's server. The caller sets the deadline, by cancelling this call.

        Raises:
            OSError: the handshake failed, or the other end is not this peer of this run.
        """
        loop, context = asyncio.get_running_loop(), self._server if server else self._client
        pipe = Pipe(below=below)
        if isinstance(below, Pipe):
            if not below.quiet:
                raise ConnectionResetError(below.ended or "bytes came before the handshake")
            name = None if server else ""
            transport = await loop.start_tls(below.transport, pipe, context, server_side=server, server_hostname=name)
            if transport is None:
                raise ConnectionResetError("the stream ended during the handshake")
            pipe.connection_made(transport)
        else:
            tcp.set_up(below)
            if server:
                await loop.connect_accepted_socket(lambda: pipe, below, ssl=context)
            else:
                await loop.create_connection(lambda: pipe, sock=below, ssl=context, server_hostname="")
        try:
            leaf, own = pipe.transport.get_extra_info("ssl_object").getpeercert(True), self._membership
            admit(leaf, own.run, peer, self._clock(), own.banned)
        except BaseException as error:
            pipe.abort()
            if isinstance(error, Stranger):
                raise PermissionError(f"the other end isn't {peer}, or isn't a member of this run") from None
            raise
        return pipe


def _load(context: ssl.SSLContext, chain: bytes, key: SigningKey) -> None:
    """Load a key and its chain into a context. Python reads them only from files, so a file is written, and deleted at
    once. In it the key is encrypted under a random password, so that the identity never lies readable on a disk."""
    password = os.urandom(32).hex().encode()
    granted, leaf = (x509.load_der_x509_certificate(one).public_bytes(Encoding.PEM) for one in split(chain))
    file, path = tempfile.mkstemp(prefix="p2p-diloco-")
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(key.pem(password) + leaf + granted)
        context.load_cert_chain(path, password=password)
    finally:
        os.unlink(path)
