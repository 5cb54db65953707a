"""TLS 1.3 connections with a certificate that both ends know beforehand.

Law: certificates and connections; neither peers nor frames. The certificate is pinned: the listener must prove that it
holds the key of exactly this certificate. The event loop's own TLS encrypts (docs/decisions/0031).
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from p2p_diloco.net import tcp

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_NAME = "peer.p2p-diloco.invalid"


class Certificate:
    """A new key and its self-signed certificate, both kept only in this process."""

    def __init__(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime(2000, 1, 1))  # always: the other end's clock may be wrong
            .not_valid_after(datetime.datetime(9999, 12, 31))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        self.der = made.public_bytes(serialization.Encoding.DER)
        """The certificate in DER, which the other end pins."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # sessions are never resumed
        plain = serialization.NoEncryption()
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        _load(self.context, secret + made.public_bytes(serialization.Encoding.PEM))

    async def accept(self, sock: socket.socket) -> Connection:
        """Accept a connection and do the handshake as its listener. The caller sets the deadline, by cancelling.

        Raises:
            OSError: the other end closed the connection, or doesn't speak TLS 1.3.
        """
        reader = asyncio.StreamReader()
        loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(reader)
        tcp.set_up(sock)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self.context)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a key and certificate into a context. Python reads them only from files: this file is private, and deleted
    at once."""
    file, path = tempfile.mkstemp(prefix="p2p-diloco-")
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(pem)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)


async def connect(host: str, port: int, family: int, certificate: bytes) -> Connection:
    """Connect to the holder of a certificate (DER) and do the handshake. The caller sets the deadline, by cancelling.

    Raises:
        OSError: the dial failed, the other end showed another certificate, or `certificate` can't be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies chain and name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=certificate)
    reader, writer = await asyncio.open_connection(host, port, family=family, ssl=context, server_hostname=_NAME)
    try:
        tcp.set_up(writer.get_extra_info("socket"))
        if writer.get_extra_info("ssl_object").getpeercert(True) != certificate:
            raise OSError("the other end showed another certificate than the one in its offer")
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer
