"""Keys and certificates: OpenSSL accepts them, nobody else can read them, nothing is written over, dates count."""

import shutil
import socket
import ssl
import stat
import subprocess
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from typer.testing import CliRunner

from fedkseed import FedKSeedError
from fedkseed.cli import app
from fedkseed.network.protocol.certs import (
    add,
    check,
    make,
    members,
    public_keys,
    request,
    require_identity,
    revoke,
    shown_fingerprint,
)
from fedkseed.network.protocol.certs import public as public_line
from fedkseed.network.protocol.masking_keys import COMMENT, masking_key_in
from fedkseed.network.protocol.signatures import certificate, name_in, private_key

from ...secure.test_key_exchange import LOW_ORDER

NOW = datetime.now(UTC)


def without_server(folder: Path) -> None:
    for name in ("server.pem", "server.key"):
        (folder / name).unlink()


def test_a_client_that_has_the_authority_trusts_the_server_by_name_and_by_address(tmp_path):
    make(tmp_path, 1, ["fl.example.org", "192.0.2.7"], 365)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    for name, good in (("fl.example.org", True), ("192.0.2.7", True), ("localhost", True), ("evil.org", False)):
        here, there = socket.socketpair()
        with here, there:

            def accept(there=there):
                with suppress(OSError):
                    server.wrap_socket(there, server_side=True).close()

            thread = threading.Thread(target=accept)
            thread.start()
            if good:
                client.wrap_socket(here, server_hostname=name).close()
            else:
                with pytest.raises(ssl.SSLCertVerificationError):
                    client.wrap_socket(here, server_hostname=name)
                here.close()
            thread.join()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_openssl_verifies_the_chain_for_a_tls_server(tmp_path):
    make(tmp_path, 1, ["localhost"], 365)
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", tmp_path / "ca.pem"]
    done = subprocess.run([*command, tmp_path / "server.pem"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_are_for_their_owner_alone_and_keys_are_pairs(tmp_path):
    made = make(tmp_path / "keys", 2, ["localhost"], 365)
    assert {path.name for path in made} == {path.name for path in (tmp_path / "keys").iterdir()}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in made)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    for public in public_keys(tmp_path / "keys"):
        private = load_ssh_private_key(public.with_suffix("").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert load_ssh_public_key(public.read_bytes()) == private.public_key()


def test_nothing_is_written_over_and_what_is_missing_is_made(tmp_path):
    make(tmp_path, 2, ["localhost"], 365)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert make(tmp_path, 2, ["localhost"], 365) == []
    assert {path.name for path in make(tmp_path, 3, ["localhost"], 365)} == {"client-2", "client-2.pub"}
    assert {path: path.read_bytes() for path in before} == before
    without_server(tmp_path)
    assert {path.name for path in make(tmp_path, 3, ["new.example.org"], 365)} == {"server.pem", "server.key"}


def test_the_servers_certificate_is_renewed_and_clients_trust_it_with_the_authority_that_they_have(tmp_path):
    make(tmp_path, 1, ["localhost"], 100, NOW)
    later = NOW + timedelta(days=120)
    with pytest.raises(FedKSeedError, match="make another"):
        check(tmp_path, later)
    without_server(tmp_path)
    with pytest.raises(FedKSeedError, match="under which name do clients reach the server"):
        make(tmp_path, 1, [], 100, later)
    assert {path.name for path in make(tmp_path, 1, ["localhost"], 100, later)} == {"server.pem", "server.key"}
    assert check(tmp_path, later + timedelta(days=60)) is None
    assert make(tmp_path, 2, [], 100, later) != [], "more clients need no name"


def test_half_a_pair_another_host_and_bad_names_are_refused(tmp_path):
    make(tmp_path, 1, ["localhost"], 365)
    with pytest.raises(FedKSeedError, match=r"is not for other.org; remove it and server.key"):
        make(tmp_path, 1, ["localhost", "other.org"], 365)
    with pytest.raises(FedKSeedError, match="no host is called 'localhost:8443'"):
        make(tmp_path, 1, ["localhost:8443"], 365)
    (tmp_path / "client-0.pub").unlink()
    with pytest.raises(FedKSeedError, match=r"there is .*client-0 but no .*client-0.pub;"):
        make(tmp_path, 1, ["localhost"], 365)
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(FedKSeedError, match=r"there is .*ca.key but no .*ca.pem;"):
        make(tmp_path, 0, ["localhost"], 365)
    with pytest.raises(FedKSeedError, match="no host is called 'a b'"):
        make(tmp_path / "other", 1, ["a b"], 365)
    make(tmp_path / "third", 1, ["localhost"], 365)
    (tmp_path / "third" / "ca.key").write_text("nonsense")
    without_server(tmp_path / "third")
    with pytest.raises(FedKSeedError, match="holds no private key that can be read"):
        make(tmp_path / "third", 1, ["localhost"], 365)


def test_dates_are_checked_when_a_server_starts(tmp_path):
    make(tmp_path, 1, ["localhost"], 100, NOW)
    assert check(tmp_path, NOW) is None
    assert "valid for 9 more days" in str(check(tmp_path, NOW + timedelta(days=90, hours=1)))
    assert "valid for 23 more hours" in str(check(tmp_path, NOW + timedelta(days=99, hours=1)))
    for when in (NOW + timedelta(days=101), NOW - timedelta(days=1)):
        with pytest.raises(FedKSeedError, match="make another, or set the clock right"):
            check(tmp_path, when)


def test_a_server_without_certificates_is_told_how_to_make_them(tmp_path):
    with pytest.raises(FedKSeedError, match=r"there is no .*ca.pem; make it with: fedkseed certs"):
        check(tmp_path)
    with pytest.raises(FedKSeedError, match=r"there is no .*client-0.pub"):
        public_keys(tmp_path)
    make(tmp_path, 3, ["localhost"], 365)
    (tmp_path / "client-1.pub").unlink()
    with pytest.raises(FedKSeedError, match=r"there is no .*client-1.pub"):
        public_keys(tmp_path)


def test_clients_make_their_own_keys_and_the_servers_machine_has_no_private_key_of_theirs(tmp_path):
    """As many clients as ask, with no word of `make` about them."""
    keys = tmp_path / "keys"
    make(keys, 0, ["localhost"], 365)
    for number, name in enumerate(("alice", "bob", "carol")):
        public = request(tmp_path / name / "key")
        assert public == tmp_path / name / "key.pub"
        assert stat.S_IMODE((tmp_path / name / "key").stat().st_mode) == 0o600
        assert add(keys, public) == keys / f"client-{number}.pub"
        assert shown_fingerprint(public) == shown_fingerprint(keys / f"client-{number}.pub")
        private = load_ssh_private_key((tmp_path / name / "key").read_bytes(), None)
        assert load_ssh_public_key(public_keys(keys)[number].read_bytes()) == private.public_key()
        assert masking_key_in(public_keys(keys)[number].read_text()) == masking_key_in(public.read_text()) is not None
    assert [name_in(path.read_text()) for path in public_keys(keys)] == ["key"] * 3, "the name of the file"
    assert members(keys).splitlines()[1] == public_line(tmp_path / "bob" / "key").strip()
    named = keys / "client-2.pub"  # as by ssh-keygen: no key for masks, and a comment
    named.write_text(f"{' '.join((own := named.read_text()).split()[:2])} eve@clinic\n")
    assert members(keys).splitlines()[2] == " ".join(own.split()[:2]), "no name"
    named.write_text(own)
    held = [path.name for path in keys.iterdir() if b"PRIVATE" in path.read_bytes()]
    assert sorted(held) == ["ca.key", "server.key"]
    assert make(keys, 3, [], 365) == [], "a public key alone is a client"
    assert check(keys) is None


def test_a_server_whose_authority_is_kept_elsewhere_takes_clients_in_and_starts(tmp_path):
    """What is left there signs no certificate: whoever breaks in can't act as another server for longer than this."""
    keys = tmp_path / "keys"
    make(keys, 1, ["localhost"], 100, NOW)
    (keys / "ca.key").rename(tmp_path / "ca.key")
    assert check(keys, NOW) is None
    assert {path.name for path in make(keys, 2, [], 100)} == {"client-1", "client-1.pub"}
    assert add(keys, request(tmp_path / "own")) == keys / "client-2.pub"
    without_server(keys)
    with pytest.raises(FedKSeedError, match=r"ca.key must sign it: bring it back until then"):
        make(keys, 2, ["localhost"], 100)
    (tmp_path / "ca.key").rename(keys / "ca.key")
    assert {path.name for path in make(keys, 2, ["localhost"], 100)} == {"server.pem", "server.key"}


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no OpenSSH here")
def test_a_key_of_openssh_is_taken_if_it_is_of_the_right_curve(tmp_path):
    make(tmp_path, 0, ["localhost"], 365)
    for kind in (["ecdsa", "-b", "384"], ["ed25519"], ["ecdsa", "-b", "256"]):
        file = tmp_path / "-".join(["key", *kind])
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", file, "-t", *kind], check=True)
        if "256" in kind:
            assert add(tmp_path, file.with_suffix(".pub")) == tmp_path / "client-0.pub"
        else:
            with pytest.raises(FedKSeedError, match="another key than ecdsa-sha2-nistp256"):
                add(tmp_path, file.with_suffix(".pub"))


@pytest.mark.parametrize("masks", LOW_ORDER, ids=bytes.hex)
def test_keys_of_low_order_are_refused(tmp_path, masks):
    make(tmp_path / "keys", 0, ["localhost"], 365)
    public = request(tmp_path / "own")
    line, _, _ = public.read_text().partition(COMMENT)
    public.write_text(f"{line}{COMMENT}{masks.hex()}\n")
    with pytest.raises(FedKSeedError, match=f"own.pub: {masks.hex()} is no public key for masks: everybody would know"):
        add(tmp_path / "keys", public)
    assert not [*(tmp_path / "keys").glob("client-*")]


def test_keys_that_are_there_twice_private_or_nonsense_are_refused(tmp_path):
    keys = tmp_path / "keys"
    make(keys, 1, ["localhost"], 365)
    public = request(tmp_path / "own")
    add(keys, public)
    with pytest.raises(FedKSeedError, match=r"has or had a number already: it is .*client-1.pub"):
        add(keys, public)
    with pytest.raises(FedKSeedError, match="holds no public key in OpenSSH's format"):
        add(keys, tmp_path / "own")
    with pytest.raises(FedKSeedError, match=r"can't read .*nothing.pub: No such file"):
        add(keys, tmp_path / "nothing.pub")
    with pytest.raises(FedKSeedError, match="own already and keys are never written over"):
        request(tmp_path / "own")
    revoke(keys, 1)
    with pytest.raises(FedKSeedError, match=r"has or had a number already: it is .*client-1-\w+.pub; ask for"):
        add(keys, public)
    assert add(keys, request(tmp_path / "third")).name == "client-1.pub", "a number that is free"


def certs(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["certs", *map(str, arguments)], env={"COLUMNS": "300", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_lead_from_the_servers_keys_to_a_client_with_a_number(tmp_path):
    said = certs(tmp_path / "keys", "--host", "localhost")
    assert "ca.key can act as the server" in said
    assert "private keys" not in said
    requested = certs("request", "--key", tmp_path / "my-key")
    added = certs("add", tmp_path / "keys", tmp_path / "my-key.pub")
    assert "client-0.pub" in added
    assert requested.split()[-1] == added.split()[-1], "the fingerprint, for two people to compare"
    assert "the clients' private keys were made here" in certs(tmp_path / "keys", "--clients", 2)
    assert "has all of it already" in certs("make", tmp_path / "keys", "--clients", 2)
    for line in ("fedkseed certs keys --host", "fedkseed certs request --key my-key", "fedkseed certs add keys my-key"):
        assert line in certs("--help")


def test_a_revoked_key_is_out_of_the_way_and_kept(tmp_path):
    keys = tmp_path / "keys"
    make(keys, 2, ["localhost"], 2)
    before = (keys / "client-1.pub").read_text()
    said = certs("revoke", keys, 1)
    (kept,) = (keys / "revoked").iterdir()
    assert kept.read_text() == before
    assert str(kept) in said
    assert not (keys / "client-1.pub").exists()
    with pytest.raises(FedKSeedError, match=r"client-1.pub: client 1 has no key here"):
        revoke(keys, 1)


def test_a_key_that_others_can_read_or_that_is_not_there_is_refused(tmp_path):
    make(tmp_path, 1, ["localhost"], 2)
    ca, key = tmp_path / "ca.pem", tmp_path / "client-0"
    require_identity(ca, key)
    with pytest.raises(FedKSeedError, match="`fedkseed certs request` makes a key"):
        require_identity(ca, tmp_path / "client-7")
    key.chmod(0o644)
    with pytest.raises(FedKSeedError, match=f"others can read the key {key}; keep it to yourself: chmod 600"):
        require_identity(ca, key)


@pytest.mark.parametrize(
    ("ca", "key", "text"),
    [
        ("ca.pem", "client-0.pub", "holds no private key that can be read, but a public key; `fedkseed certs request`"),
        ("ca.pem", "server.pem", "holds no private key that can be read, but a certificate"),
        ("ca.pem", "locked", "holds no private key that can be read, but a private key, locked by a password"),
        ("ca.pem", "rows.csv", "holds no private key that can be read, but something else"),
        ("client-0", "client-0", "client-0 holds no certificate that can be read, but a private key; `fedkseed certs`"),
        ("client-0.pub", "client-0", "holds no certificate that can be read, but a public key"),
        ("server.pem", "client-0", "is a certificate of a server or a peer; --ca takes the authority's own, ca.pem"),
    ],
)
def test_a_file_in_the_place_of_another_is_told_by_its_kind(tmp_path, ca, key, text):
    make(tmp_path, 1, ["localhost"], 2)
    (tmp_path / "rows.csv").write_text("question,answer\n")
    form, locked = PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    (tmp_path / "locked").write_bytes(private_key(tmp_path / "client-0").private_bytes(Encoding.PEM, form, locked))
    with pytest.raises(FedKSeedError) as refused:
        require_identity(tmp_path / ca, tmp_path / key)
    assert text in str(refused.value)


@pytest.mark.parametrize("days", [-5000, 5000], ids=["over", "not yet"])
def test_an_authority_that_is_not_valid_now_is_refused_before_anybody_is_asked(tmp_path, days):
    make(tmp_path, 1, ["localhost"], 2)
    with pytest.raises(FedKSeedError, match=r"ca.pem is valid from .* and today is .*or set the clock right"):
        require_identity(tmp_path / "ca.pem", tmp_path / "client-0", NOW + timedelta(days=days))


def test_no_certificate_outlives_the_authority_however_many_days_are_asked_for(tmp_path):
    make(tmp_path, 1, ["localhost"], 10**9, NOW)
    assert (
        certificate(tmp_path / "server.pem").not_valid_after_utc == certificate(tmp_path / "ca.pem").not_valid_after_utc
    )
