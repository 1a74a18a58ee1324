"""Signatures of tasks by the server and of uploads by clients: ECDSA on P-256 over SHA-256, 64 raw bytes r ‖ s.

    audience                 SHA-256 of AUDIENCE, the fingerprint of the authority's key (32), and the name that the
                             client dialled
    statement of a client    CLIENTS, audience (32), challenge (32), fingerprint of the client's public key (32)
    statement of a task      TASKS, audience (32), nonce (16), issued u64, fingerprint of the client's public key (32),
                             SHA-256 of the encoded task without its signature
    statement of an upload   UPLOADS, audience (32), nonce (16), client u32, head of the run's history (32), SHA-256 of
                             the broadcast, SHA-256 of the upload

So a client that takes part in two federations with one key proves nothing to the one by what it signs for the other,
and nothing to another server of the same authority. A renewed certificate keeps the authority's key. Over Flower, where
a client dials no server of ours, the name is empty.

The nonce belongs to a run. The fingerprint is not sent, since each client knows its own key: a task that is forwarded
to another client is refused there. The broadcast is the whole message with which a client has trained, or for a `Lack`
the message as it was received.
"""

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509.oid import ExtendedKeyUsageOID

from ...errors import FedKSeedError
from ...files import border, read_table, write_table
from .carrier import TRANSPORTS
from .envelope import UNSIGNED, Reply, Status, Task, printable
from .masking_keys import COMMENT, masking_key_in
from .run_history import MOST_RUNS, RunHistory

AUDIENCE = b"fedkseed, version 3: whom a signature is for\n"
# Longer than 32 bytes: with the same key TLS 1.2 signs 32 bytes of the client's choice, then 32 of the server's.
CLIENTS = b"fedkseed, version 3: a client proves its key to a server over HTTPS\n"
TASKS = b"fedkseed, version 3: a server asks one client for its answer\n"
UPLOADS = b"fedkseed, version 3: a client answers a broadcast of the server\n"
UPLOADS_2 = b"fedkseed, version 2: a client answers a broadcast of the server\n"  # named no audience
HASH = ec.ECDSA(hashes.SHA256())
HALF = len(UNSIGNED) // 2  # bytes of r, and of s
SIGNING = "signing.json"  # in the folder of a transport
Key = TypeVar("Key", ec.EllipticCurvePublicKey, ec.EllipticCurvePrivateKey)


def audience(authority: x509.Certificate, name: str) -> bytes:
    """The audience of a statement, 32 bytes: a federation, by its authority, and the name that a client dials there."""
    return hashlib.sha256(AUDIENCE + fingerprint(authority.public_key()) + name.encode()).digest()


def proof_of(key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, dialled: str, challenge: bytes) -> bytes:
    """The proof of a client's key, for a server that it has dialled by a name.

    Challenge (32 bytes), fingerprint of the key (32), signature of `client_statement` (64), the name.
    """
    name = fingerprint(key.public_key())
    signature = sign(key, client_statement(audience(authority, dialled), challenge, name))
    return challenge + name + signature + dialled.encode()


def client_statement(audience: bytes, challenge: bytes, fingerprint: bytes) -> bytes:
    """The statement by which a client proves to a server that it has the key of a fingerprint."""
    return CLIENTS + audience + challenge + fingerprint


def task_statement(audience: bytes, task: Task, fingerprint: bytes) -> bytes:
    """The statement that a server signs: a task, and the fingerprint of the key of the client that is to answer it."""
    return TASKS + audience + task.nonce + struct.pack("<Q", task.issued) + fingerprint + task.hashed()


def upload_statement(audience: bytes, nonce: bytes, client: int, head: bytes, broadcast: bytes, upload: bytes) -> bytes:
    """The statement that a client signs: its answer to a broadcast of a run, after the history that it knows.

    Args:
        audience: empty: the statement of version 2, for the receipts of rounds that were signed by it.
    """
    digests = hashlib.sha256(broadcast).digest() + hashlib.sha256(upload).digest()
    return (UPLOADS if audience else UPLOADS_2) + audience + nonce + struct.pack("<I", client) + head + digests


def sign(key: ec.EllipticCurvePrivateKey, statement: bytes) -> bytes:
    """The signature of a statement, 64 bytes."""
    r, s = decode_dss_signature(key.sign(statement, HASH))
    return r.to_bytes(HALF, "big") + s.to_bytes(HALF, "big")


def verify(key: ec.EllipticCurvePublicKey, statement: bytes, signature: bytes) -> bool:
    """Whether a signature is of this statement and by the private half of `key`."""
    if len(signature) == len(UNSIGNED):
        r, s = (int.from_bytes(half, "big") for half in (signature[:HALF], signature[HALF:]))
        with suppress(InvalidSignature):
            key.verify(encode_dss_signature(r, s), statement, HASH)
            return True
    return False


def fingerprint(key: CertificatePublicKeyTypes) -> bytes:
    """SHA-256 of a public key, as X.509 encodes it."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).digest()


def public_key(text: bytes, where: object) -> ec.EllipticCurvePublicKey:
    """The public key in a line of OpenSSH's format.

    Args:
        where: the place of the text, for the error.

    Raises:
        FedKSeedError: the text is no public key on the curve P-256.
    """
    made = "`fedkseed certs request` makes one, in the file that ends with .pub"
    with _expecting("public key in OpenSSH's format", where, text, made):
        key = serialization.load_ssh_public_key(text)
    return _on_p256(key, where, ec.EllipticCurvePublicKey)


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in a file, in PEM or OpenSSH's format; only the curve P-256 is taken, and no locked key."""
    with border(f"can't read {path}"):
        data = path.read_bytes()
    load = serialization.load_ssh_private_key if b"BEGIN OPENSSH" in data else serialization.load_pem_private_key
    made = "`fedkseed certs request` makes one, in the file without .pub"
    with _expecting("private key that can be read", path, data, made):
        key = load(data, None)
    return _on_p256(key, path, ec.EllipticCurvePrivateKey)


def _on_p256(key: object, where: object, kind: type[Key]) -> Key:
    if isinstance(key, kind) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise FedKSeedError(f"{where} holds another key than ecdsa-sha2-nistp256; `fedkseed certs request` makes one")


def certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file.

    Raises:
        FedKSeedError: the file can't be read, or holds none.
    """
    with border(f"can't read {path}"):
        data = path.read_bytes()
    made = "`fedkseed certs` makes them, in files that end with .pem"
    with _expecting("certificate that can be read", path, data, made):
        return x509.load_pem_x509_certificate(data)


@contextmanager
def _expecting(what: str, where: object, data: bytes, made: str) -> Iterator[None]:
    """Say of a file of keys that was taken for another what it holds instead, and how one of the right kind is made."""
    try:
        yield
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FedKSeedError(f"{where} holds no {what}, but {_kind_of(data)}; {made}") from error


def _kind_of(data: bytes) -> str:
    kinds = {b"PRIVATE KEY-": "a private key", b"BEGIN CERTIFICATE-": "a certificate", b"PUBLIC KEY-": "a public key"}
    if data.lstrip()[:6] in (b"ecdsa-", b"ssh-rs", b"ssh-ed"):
        return "a public key"
    named = next((kind for mark, kind in kinds.items() if mark in data), "something else")
    return f"{named}, locked by a password" if b"ENCRYPTED" in data else named


@dataclass(frozen=True, slots=True)
class Audiences:
    """The audiences of what is signed for and by one server."""

    authority: x509.Certificate
    names: frozenset[str]  # in the server's certificate: those by which clients may dial it, also through a proxy

    @classmethod
    def of(cls, certs: Path) -> "Audiences":
        """Those of the server whose files `fedkseed certs` has made in a folder.

        Raises:
            FedKSeedError: a file can't be read.
        """
        return cls.by(certificate(certs / "ca.pem"), certificate(certs / "server.pem"))

    @classmethod
    def by(cls, authority: x509.Certificate, server: x509.Certificate) -> "Audiences":
        """Those of a server with a certificate, which an authority has signed."""
        try:
            named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return cls(authority, frozenset())
        hosts = (*named.get_values_for_type(x509.DNSName), *named.get_values_for_type(x509.IPAddress))
        return cls(authority, frozenset(str(host).lower() for host in hosts))

    def dialled(self, name: str) -> bytes:
        """The audience of a client that dials this server by a name.

        Raises:
            FedKSeedError: the server's certificate does not have the name.
        """
        if name not in self.names and "*." + name.partition(".")[2] not in self.names:
            raise FedKSeedError(
                f"this server is not called {printable(name)!r}: its certificate has {', '.join(sorted(self.names))}; "
                "dial one of these, or make a certificate with the name (`fedkseed certs --host`)"
            )
        return audience(self.authority, name)

    def all(self) -> list[bytes]:
        """Those of all names, and of clients that dial none."""
        return [audience(self.authority, name) for name in ("", *sorted(self.names))]


class ServerSigning:
    """The signing of a server's tasks, and the verification of its clients' answers.

    Args:
        authority: the certificate of the one that has signed the server's.
        clients: public keys of clients 0, 1, …; None for one whose key was removed.
        nonce: 16 bytes drawn once for the run.
        masks: public X25519 keys of the clients that have one, for masked uploads.
    """

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, authority: x509.Certificate,
        clients: Sequence[ec.EllipticCurvePublicKey | None], nonce: bytes, masks: Mapping[int, bytes] | None = None,
    ) -> None:  # fmt: skip
        self.audiences = Audiences.by(authority, certificate)
        self.key, self.clients, self.nonce, self.masks = key, tuple(clients), nonce, masks or {}
        self.names: Mapping[int, str] = {}  # of the keys that have one
        self.certificate = certificate.public_bytes(serialization.Encoding.DER)
        self._fingerprints = [fingerprint(client) if client else b"" for client in self.clients]
        self._issued = 0

    @staticmethod
    def write(folder: Path, certs: Path, clients: Sequence[str]) -> None:
        """Write down in a transport's folder which files sign, and the public keys that are registered.

        Args:
            clients: public keys by number; empty for a client whose key was removed. Keys that were replaced are kept
                as `former` ones: by them, uploads of earlier rounds are verified.
        """
        former: list[list[str]] = [[] for _ in clients]
        if (folder / SIGNING).exists():
            old = read_table(folder / SIGNING)
            for number, (before, key) in enumerate(zip(old["clients"], clients, strict=False)):
                replaced = before.split()[:2] != key.split()[:2]  # what follows is a comment
                former[number] = old["former"][number] + [before] * (replaced and before != "")
        table = {"key": "server.key", "certificate": "server.pem", "authority": "ca.pem"}
        files = {name: str(certs / file) for name, file in table.items()}
        write_table(folder / SIGNING, files | {"clients": [*clients], "former": former})

    @classmethod
    def read(cls, folder: Path, nonce: bytes) -> "ServerSigning | None":
        """The signing that `write` has written down; None if it has not: tasks then travel unsigned.

        Raises:
            FedKSeedError: a file can't be read, or a key is of another kind.
        """
        if not (folder / SIGNING).exists():
            return None
        table = read_table(folder / SIGNING)
        lines = enumerate(table["clients"])
        clients = [public_key(text.encode(), f"the entry of client {k}") if text else None for k, text in lines]
        # A client whose key was removed keeps its place in masked rounds and is missing there: by their recipe, the
        # others expect it.
        lines = [now or "".join(former[-1:]) for now, former in zip(table["clients"], table["former"], strict=True)]
        masks = {number: key for number, text in enumerate(lines) if (key := masking_key_in(text)) is not None}
        proofs = certificate(Path(table["certificate"])), certificate(Path(table["authority"]))
        signing = cls(private_key(Path(table["key"])), *proofs, clients, nonce, masks)
        signing.names = {number: name for number, text in enumerate(lines) if (name := name_in(text))}
        return signing

    def signed(self, task: Task, dialled: str = "") -> Task:
        """A task for client `task.client`, signed; one with a recipe carries the server's certificate, too.

        Args:
            dialled: the name by which the client has dialled this server.
        """
        self._issued = max(self._issued + 1, time.time_ns())
        certificate = self.certificate if task.recipe else b""
        dated = replace(task, nonce=self.nonce, issued=self._issued, certificate=certificate)
        statement = task_statement(audience(self.audiences.authority, dialled), dated, self._fingerprints[task.client])
        return replace(dated, signature=sign(self.key, statement))

    def require(
        self, client: int, head: bytes, broadcast: bytes, upload: bytes, signature: bytes, dialled: str = ""
    ) -> None:
        """Refuse an answer that is not signed with its client's key.

        Args:
            head: of the history that the client was sent.
            dialled: the name for which its task was signed.

        Raises:
            FedKSeedError: the signature is missing or wrong.
        """
        if signature == UNSIGNED:
            raise FedKSeedError(f"its answer is not signed; client {client} must be started with its key")
        key = self.clients[client]
        of = audience(self.audiences.authority, dialled)
        if key is None or not verify(key, upload_statement(of, self.nonce, client, head, broadcast, upload), signature):
            raise FedKSeedError(f"its answer is not signed with the key of client {client} for this run and broadcast")


def name_in(line: str) -> str:
    """The name in a line of OpenSSH's format: the first word of its comment that is no key for masks, or nothing."""
    return next((printable(word)[:40] for word in line.split()[2:] if not word.startswith(COMMENT)), "")


def keys_of_run(directory: Path) -> list[list[ec.EllipticCurvePublicKey]]:
    """The public keys that each client of a run has had, from the folder of its transport; empty if they have none."""
    kept = next((path for folder in TRANSPORTS if (path := directory / folder / SIGNING).exists()), None)
    if kept is None:
        return []
    table = read_table(kept)
    return [
        [public_key(text.encode(), f"an entry of client {number}") for text in (*former, now) if text]
        for number, (now, former) in enumerate(zip(table["clients"], table["former"], strict=True))
    ]


@dataclass(slots=True)
class ClientSigning:
    """The verification of a server's tasks, and the signing of a client's answers."""

    key: ec.EllipticCurvePrivateKey
    ca: x509.Certificate  # of the authority that must have signed the server's
    history: RunHistory | None = None  # None: tasks' histories are not checked
    dialled: str = ""  # the name by which this client dials its server; empty: it dials none
    _server: x509.Certificate | None = None  # of the last task that was accepted with one
    _issued: dict[bytes, int] = field(default_factory=dict)  # nonce of a run -> `issued` of its last accepted task

    def refusal(self, task: Task, now: datetime | None = None) -> Reply | None:
        """The reply to a task that must not be answered; None for a task of the server, meant for this client, and new.

        A task that is older than the last one is FAILED and not REFUSED: two messages may have overtaken each other,
        and a server that asks again signs another task.
        """
        try:
            if task.signature == UNSIGNED:
                raise FedKSeedError("the task is not signed; this client takes tasks of a server that signs")
            server = self._server
            if task.certificate:
                try:
                    server = x509.load_der_x509_certificate(task.certificate)
                except (ValueError, x509.InvalidVersion) as error:
                    raise FedKSeedError(f"the server's certificate in the task can't be read: {error}") from error
            if server is None:
                return Reply(Status.UNPREPARED)
            key = _key_of_a_server(server, self.ca, now or datetime.now(UTC))
            statement = task_statement(self.audience, task, fingerprint(self.key.public_key()))
            if not verify(key, statement, task.signature):
                of = f", dialled as {self.dialled}" * bool(self.dialled)
                raise FedKSeedError(f"the task is not signed by the server for this client's key{of}")
            if task.issued <= (last := self._issued.get(task.nonce, 0)):
                return Reply(
                    Status.FAILED,
                    text=f"the task was issued at {task.issued}, this client has taken one of {last} (ns since 1970): "
                    "it comes a second time, or the server's clock was set back",
                )
            self._server, self._issued[task.nonce] = server, task.issued
            for old in [*self._issued][:-MOST_RUNS]:  # of the runs that began first
                del self._issued[old]
            known = self.history is None or self.history.follow(task, self.audience)
        except FedKSeedError as error:
            return Reply(Status.REFUSED, text=str(error))
        return None if known else Reply(Status.UNPREPARED)

    def signature(self, task: Task, broadcast: bytes, upload: bytes) -> bytes:
        """The signature of the answer to a task.

        Args:
            broadcast: the message with which the client has trained.
        """
        statement = upload_statement(self.audience, task.nonce, task.client, task.head, broadcast, upload)
        return sign(self.key, statement)

    @property
    def audience(self) -> bytes:
        return audience(self.ca, self.dialled)


def _key_of_a_server(certificate: x509.Certificate, ca: x509.Certificate, now: datetime) -> ec.EllipticCurvePublicKey:
    """The public key of a server's certificate; refuses one of another authority, or use, or not valid now."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError) as error:
        raise FedKSeedError("the server's certificate is not signed by the authority of this client's --ca") from error
    begin = max(certificate.not_valid_before_utc, ca.not_valid_before_utc)
    end = min(certificate.not_valid_after_utc, ca.not_valid_after_utc)
    if not begin <= now <= end:
        raise FedKSeedError(
            f"the server's certificate is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, and here it is "
            f"{now:%Y-%m-%d}; renew it (`fedkseed docs deploy`), or set the clock right"
        )
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        usage = ()
    if ExtendedKeyUsageOID.SERVER_AUTH not in usage:
        raise FedKSeedError("the certificate in the task is not one of a server; `fedkseed certs` makes server.pem")
    return _on_p256(certificate.public_key(), "the server's certificate", ec.EllipticCurvePublicKey)
