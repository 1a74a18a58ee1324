"""TLS between peers: both sides show a certificate of the run's authority for the very key that signs their uploads."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from ...errors import FedKSeedError
from ...files import part_of, write_atomically
from ..protocol.certs import require_valid
from ..protocol.signatures import certificate, fingerprint, private_key


def contexts(key: Path, cert: Path, ca: Path, directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a peer as a server, and as a client of other peers.

    Args:
        directory: of the peer, for a copy of the key in a form that OpenSSL reads, which is gone when this returns.

    Raises:
        FedKSeedError: a file can't be read, or the certificate is not for this key and of this authority.
    """
    certified, authority, private = certificate(cert), certificate(ca), private_key(key)
    if _fingerprint_of(certified) != fingerprint(private.public_key()):
        raise FedKSeedError(f"{cert} is not for the key {key}; let the authority's owner sign it: fedkseed certs sign")
    try:
        certified.verify_directly_issued_by(authority)
    except Exception as error:  # of several packages' own kinds
        raise FedKSeedError(f"{cert} is not signed by the authority in {ca}; take both from one owner") from error
    require_valid(cert, certified, datetime.now(UTC))
    form, encoding = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
    pem = private.private_bytes(encoding, form, serialization.NoEncryption())
    copy = part_of(directory / "identity")
    write_atomically(copy, pem + certified.public_bytes(encoding))
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3  # what it signs can't be taken for an upload
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cafile=str(ca))
            context.load_cert_chain(copy)
    finally:
        copy.unlink(missing_ok=True)
    server.num_tickets = 0  # a ticket has the other side's certificate in it, and connections are kept
    return server, client


def fingerprint_shown(connection: object) -> bytes:
    """The fingerprint of the key that the other side of a connection has shown; empty: none.

    Args:
        connection: an `SSLObject` or `SSLSocket`.
    """
    if not isinstance(connection, ssl.SSLObject | ssl.SSLSocket) or not (der := connection.getpeercert(True)):
        return b""
    return _fingerprint_of(x509.load_der_x509_certificate(der))


def _fingerprint_of(certificate: x509.Certificate) -> bytes:
    return fingerprint(certificate.public_key())
