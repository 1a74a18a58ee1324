"""Identities of a federation's parties: a certificate authority, the server's certificate, a key for each client.

ca.pem, ca.key            the authority; every client gets a copy of ca.pem; ca.key signs server.pem, and is needed for
                          nothing else: keep it elsewhere
server.pem, server.key    the server's certificate, for the names that clients dial
client-0.pub …            public keys of clients 0, 1, … in OpenSSH's format
client-0 …                private keys, where clients have not made their own: client 0 gets client-0
"""

import ipaddress
import re
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ...errors import FedKSeedError
from ...files import border, own_folder, private
from .masking_keys import COMMENT, masking_comment, masking_key_in
from .signatures import certificate, fingerprint, private_key, public_key

OWN = ("localhost", "127.0.0.1")  # the server's own processes talk over loopback
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
BEHIND = timedelta(hours=1)  # by which the clocks of clients may be behind that of the authority
AUTHORITY = timedelta(days=3650)  # every client has a copy: it must outlive many certificates of the server


def make(directory: Path, clients: int, hosts: Sequence[str], days: int, now: datetime | None = None) -> list[Path]:
    """Make the missing keys and certificates of a federation; existing files are never overwritten.

    Args:
        clients: number of clients that have a public key in the end; whoever makes the private keys here could act as
            these clients, and `request` and `add` do without.
        hosts: names and addresses under which clients reach the server; needed if there is no certificate yet.
        days: number of days for which the server's certificate is valid. To renew it, remove server.pem and
            server.key first. The authority is valid for ten years, and clients need nothing new until then.

    Returns:
        The files made.

    Raises:
        FedKSeedError: the directory can't be written, a pair of files is incomplete, the server's certificate is for
            other hosts, or the authority has expired.
    """
    now = now or datetime.now(UTC)
    made: list[Path] = []
    for host in hosts:
        _alternative(host)
    own_folder(directory)
    ca, ca_key = directory / "ca.pem", directory / "ca.key"
    if not _there(ca, ca_key):  # ca.key alone may be elsewhere
        key = ec.generate_private_key(ec.SECP256R1())
        issued = _issued("federation", key.public_key(), key, now, now + AUTHORITY)
        made += [_write(ca_key, _pem(key)), _write(ca, issued)]
    path, path_of_key = directory / "server.pem", directory / "server.key"
    if _there(path, path_of_key) and _there(path_of_key, path):
        names = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        addresses = map(str, names.get_values_for_type(x509.IPAddress))
        if missing := {*hosts} - {*names.get_values_for_type(x509.DNSName), *addresses}:
            raise FedKSeedError(
                f"{path} is not for {', '.join(sorted(missing))}; remove it and server.key to make another"
            )
    else:
        if not hosts:
            raise FedKSeedError(f"{path} is to be made: under which name do clients reach the server? Give --host")
        if not ca_key.exists():
            raise FedKSeedError(f"{path} is to be made, and {ca_key} must sign it: bring it back until then")
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH
        issued = _by_authority(directory, "server", key.public_key(), hosts, days, now, usage)
        made += [_write(path_of_key, _pem(key)), _write(path, issued)]
    for number in range(clients):
        own, public = directory / f"client-{number}", directory / f"client-{number}.pub"
        made += [] if _there(public, own) else _make_pair(own, public)
    return made


def request(path: Path) -> Path:
    """Make a client's key pair on the client's own machine, and return the public file: `path` with .pub after it.

    Raises:
        FedKSeedError: one of the two files exists, or can't be written.
    """
    public = path.with_name(path.name + ".pub")
    if there := [file for file in (path, public) if file.exists()]:
        raise FedKSeedError(f"there is a file {there[0]} already and keys are never written over; choose another --key")
    own_folder(path.parent)
    _make_pair(path, public)
    return public


def _make_pair(own: Path, public: Path) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())  # of the curves that Flower takes, the shortest headers
    return [_write(own, _pem(key, PrivateFormat.OpenSSH)), _write(public, _line(key))]


def add(directory: Path, file: Path) -> Path:
    """Give the owner of a public key the first free number, and return the key's file in a server's directory.

    Raises:
        FedKSeedError: the file holds no public key on P-256, or one that has a number already or was revoked, or a
            key for masks that hides nothing; or the directory can't be written.
    """
    with border(f"can't read {file}"):
        line = file.read_bytes()
    key, masks = public_key(line, file), masking_key_in(line.decode(errors="replace"), f"{file}: ")
    for known in [*directory.glob("client-*.pub"), *directory.glob("revoked/client-*.pub")]:
        if public_key(known.read_bytes(), known) == key:
            raise FedKSeedError(f"the key in {file} has or had a number already: it is {known}; ask for a new one")
    number = next(number for number in count() if not (directory / f"client-{number}.pub").exists())
    name = re.sub(r"[^\w.@-]+", "-", file.stem)  # for the server's log
    own = [_openssh(key).decode(), *([] if masks is None else [f"{COMMENT}{masks.hex()}"]), name]
    return _write(directory / f"client-{number}.pub", f"{' '.join(own)}\n".encode())


def revoke(directory: Path, number: int) -> Path:
    """Take a client's public key out of a server's directory, and return the place where it is kept.

    A server with a round under way refuses the key within seconds, and takes it never again for its run.

    Raises:
        FedKSeedError: there is no such key, or it can't be moved.
    """
    path = directory / f"client-{number}.pub"
    if not path.is_file():
        raise FedKSeedError(f"there is no {path}: client {number} has no key here (any more)")
    kept = directory / "revoked" / f"client-{number}-{shown_fingerprint(path).replace(':', '')[:16]}.pub"
    with border(f"can't move {path}"):
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        path.replace(kept)
    return kept


def shown_fingerprint(public: Path) -> str:
    """The fingerprint of a public file, for two people to compare."""
    return fingerprint(public_key(public.read_bytes(), public)).hex(":", 4)


def members(directory: Path) -> str:
    """The public lines of clients 0, 1, …, for their owners to compare with each other and to give to `--members`."""
    lines = [path.read_text(errors="replace").split() for path in public_keys(directory)]
    of_masks = [[word for word in line[2:3] if word.startswith(COMMENT)] for line in lines]
    return "".join(" ".join(line[:2] + masks) + "\n" for line, masks in zip(lines, of_masks, strict=True))


def public(path: Path) -> str:
    """The line of a private key's public file, with the key of masked uploads.

    Raises:
        FedKSeedError: the file can't be read, or holds no private key on P-256.
    """
    return _line(private_key(path)).decode()


def sign(directory: Path, number: int, hosts: Sequence[str], days: int, now: datetime | None = None) -> Path:
    """Sign a certificate for a client's own key, and return its file: with it, the client can serve other peers.

    It has no extended key usage, so that no client takes it for the certificate of a server that hands out tasks.

    Args:
        hosts: names and addresses under which others reach the client; none, if it only dials them.

    Raises:
        FedKSeedError: ca.key or the client's public key is missing, the authority has expired, or the file exists.
    """
    path, made = directory / f"client-{number}.pub", directory / f"client-{number}.pem"
    for needed in (path, directory / "ca.key", directory / "ca.pem"):
        if not needed.is_file():
            raise FedKSeedError(f"there is no {needed}, which is needed to sign a certificate for client {number}")
    if made.exists():
        raise FedKSeedError(f"there is a file {made} already; remove it to sign another")
    key = public_key(path.read_bytes(), path)
    return _write(made, _by_authority(directory, f"peer {number}", key, hosts, days, now or datetime.now(UTC)))


def check(directory: Path, now: datetime | None = None) -> str | None:
    """Check that the server's certificate is valid now; returns a warning if it expires within 30 days.

    Raises:
        FedKSeedError: files are missing, or a certificate has expired or is not valid yet.
    """
    for name in ("ca.pem", "server.pem", "server.key"):
        if not (directory / name).is_file():
            raise FedKSeedError(f"there is no {directory / name}; make it with: fedkseed certs {directory} --host NAME")
    now, path, ca = now or datetime.now(UTC), directory / "server.pem", directory / "ca.pem"
    require_valid(ca, certificate(ca), now)
    require_valid(path, own := certificate(path), now)
    if (left := own.not_valid_after_utc - now) < timedelta(days=30):
        time = f"{left.days} more days" if left.days > 1 else f"{left / timedelta(hours=1):.0f} more hours"
        return f"{path} is valid for {time}; `fedkseed docs deploy` says how to renew it"
    return None


def require_identity(ca: Path, key: Path, now: datetime | None = None) -> None:
    """Refuse files of a client's identity that can't serve as that.

    Raises:
        FedKSeedError: one is missing or holds something else, others can read the key, or the authority has expired.
    """
    for path in (ca, key):
        if not path.is_file():
            raise FedKSeedError(
                f"there is no file {path}; `fedkseed certs request` makes a key, and whoever runs the server has ca.pem"
            )
    private_key(key)
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        raise FedKSeedError(f"others can read the key {key}; keep it to yourself: chmod 600 {key}")
    authority = certificate(ca)
    constraints = [e.value for e in authority.extensions if isinstance(e.value, x509.BasicConstraints)]
    if not any(constraint.ca for constraint in constraints):
        raise FedKSeedError(f"{ca} is a certificate of a server or a peer; --ca takes the authority's own, ca.pem")
    require_valid(ca, authority, now or datetime.now(UTC))


def public_keys(directory: Path) -> list[Path]:
    """The public keys of clients 0, 1, … in the order of their numbers.

    Raises:
        FedKSeedError: there is no key, or the key of one client is missing.
    """
    found = {path.name for path in directory.glob("client-*.pub")}
    ordered = [f"client-{number}.pub" for number in range(len(found))]
    if not found or set(ordered) != found:
        lacking = next((name for name in ordered if name not in found), "client-0.pub")
        raise FedKSeedError(f"there is no {directory / lacking}; add it with: fedkseed certs add {directory} FILE.pub")
    return [directory / name for name in ordered]


def _there(file: Path, half: Path) -> bool:
    """Whether a file is there; its other half alone is refused."""
    if half.exists() and not file.exists():
        raise FedKSeedError(f"there is {half} but no {file}; bring it back, or remove the other to make both")
    return file.exists()


def _by_authority(
    directory: Path,
    name: str,
    key: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    days: int,
    now: datetime,
    *usages: x509.ObjectIdentifier,
) -> bytes:
    """A certificate that a directory's authority has signed."""
    ca, ca_key = certificate(directory / "ca.pem"), private_key(directory / "ca.key")
    require_valid(directory / "ca.pem", ca, now)
    names = x509.SubjectAlternativeName([_alternative(host) for host in dict.fromkeys([*hosts, *OWN])])
    more = [x509.ExtendedKeyUsage(usages)] if usages else []
    end = min(now + timedelta(days=min(days, AUTHORITY.days)), ca.not_valid_after_utc)
    return _issued(name, key, ca_key, now, end, ca, names, *more)


def _issued(
    name: str,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    now: datetime,
    end: datetime,
    ca: x509.Certificate | None = None,
    *more: x509.ExtensionType,
) -> bytes:
    """A certificate in PEM, with more extensions; of an authority, if none has signed it."""
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only"), False,
    )  # fmt: skip
    subject, is_ca = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedkseed {name}")]), ca is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if ca is None else ca.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEHIND)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.KeyUsage(not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, **usage), critical=True)
    )
    for extension in more:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST.fullmatch(host):
            raise FedKSeedError(f"no host is called {host!r}; give a name as fl.example.org, or an address") from None
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey, form: PrivateFormat = PrivateFormat.PKCS8) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _openssh(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def _line(key: ec.EllipticCurvePrivateKey) -> bytes:
    return _openssh(key.public_key()) + f" {masking_comment(key)}\n".encode()


def require_valid(path: Path, own: x509.Certificate, now: datetime) -> None:
    begin, end = own.not_valid_before_utc, own.not_valid_after_utc
    if not begin <= now <= end:
        raise FedKSeedError(
            f"{path} is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, and today is {now:%Y-%m-%d}; make another, or "
            "set the clock right"
        )


def _write(path: Path, data: bytes) -> Path:
    """Write a new file that only this user can read."""
    with border(f"can't write {path}"), open(path, "xb", opener=private) as file:
        file.write(data)
    return path
