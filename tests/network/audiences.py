"""The audiences of a made-up server, whose authority is that of the session's vectors."""

from cryptography import x509

from fedkseed.network.protocol.signatures import Audiences

from .protocol.vectors import certificate

AUDIENCES = Audiences(x509.load_der_x509_certificate(certificate("authority", "authority")), frozenset({"localhost"}))
