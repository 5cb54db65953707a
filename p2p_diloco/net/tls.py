"""TLS 1.3 connections with a certificate that both ends know beforehand.

Law: knows certificates and connections, but no peers and no frames. The certificate is pinned: the listener must prove
that it holds the key of exactly this certificate. The event loop's own TLS encrypts (docs/decisions/0031).
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
from p2p_diloco.net.pipe import Pipe

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
        self._pem = secret + made.public_bytes(serialization.Encoding.PEM)
        _load(self.context, self._pem)

    async def accept(self, sock: socket.socket) -> Connection:
        """Do the TLS handshake, as the listening end, on a connection that was just accepted. The caller sets the
        deadline, by cancelling this call.

        Raises:
            OSError: the other end closed the connection, or doesn't speak TLS 1.3.
        """
        reader = asyncio.StreamReader()
        loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(reader)
        tcp.set_up(sock)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self.context)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    def mutual(self, other: bytes, *, dials: bool) -> ssl.SSLContext:
        """Make the TLS context for a connection on which both ends show their certificates. `other` is the certificate
        of the other end (DER); `dials` says whether this end is TLS's client.

        Raises:
            OSError: `other` can't be read.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if dials else ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        _pin(context, other)
        _load(context, self._pem)
        if not dials:
            context.num_tickets = 0
        return context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load a key and its certificate into a context. Python reads them only from files, so a private file is written,
    and deleted at once."""
    file, path = tempfile.mkstemp(prefix="p2p-diloco-")
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(pem)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)


def _pin(context: ssl.SSLContext, certificate: bytes) -> None:
    """Make a context trust this certificate (DER). Raises OSError if the certificate can't be read."""
    try:
        context.load_verify_locations(cadata=certificate)
    except ValueError as error:  # it is empty
        raise OSError(str(error)) from None


async def connect(host: str, port: int, family: int, certificate: bytes) -> Connection:
    """Connect to a listener, which must hold the key of this certificate (DER), and do the TLS handshake. The caller
    sets the deadline, by cancelling this call.

    Raises:
        OSError: the dial failed, the other end showed another certificate, or `certificate` can't be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies chain and name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _pin(context, certificate)
    reader, writer = await asyncio.open_connection(host, port, family=family, ssl=context, server_hostname=_NAME)
    try:
        tcp.set_up(writer.get_extra_info("socket"))
        if writer.get_extra_info("ssl_object").getpeercert(True) != certificate:
            raise OSError("the other end showed another certificate than the one in its offer")
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def secured(pipe: Pipe, certificate: Certificate, other: bytes, *, dials: bool) -> Pipe:
    """Encrypt a stream from now on, at the same time as the other end. `other` is the certificate that the other end
    must show (DER); `dials` says whether this end is TLS's client. The caller sets the deadline, by cancelling this
    call.

    Raises:
        OSError: the handshake failed, or the other end holds another certificate.
    """
    context = certificate.mutual(other, dials=dials)
    if not pipe.quiet:
        raise ConnectionResetError(pipe.ended or "bytes came before the handshake")
    reader = asyncio.StreamReader()
    loop, protocol = asyncio.get_running_loop(), asyncio.StreamReaderProtocol(reader)
    transport = await loop.start_tls(
        pipe.transport, protocol, context, server_side=not dials, server_hostname=_NAME if dials else None
    )
    if transport is None:
        raise ConnectionResetError("the stream ended during the handshake")
    try:
        if transport.get_extra_info("ssl_object").getpeercert(True) != other:
            raise PermissionError("the other end showed another certificate than the one that it signed")
        return await Pipe.adopt(reader, asyncio.StreamWriter(transport, protocol, reader, loop), below=pipe)
    except BaseException:
        transport.abort()
        raise
