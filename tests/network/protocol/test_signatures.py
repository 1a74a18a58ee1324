"""Signatures of tasks and answers: attacks by a member of the federation, with real keys, models and rounds."""

import shutil
import struct
import subprocess
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st

from fedkseed import FedKSeedError, decode, encode
from fedkseed.network.flower.messages import packed, unpacked
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.client.recipe_consent import Owner, OwnerSettings
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import TrainingClient, load_client
from fedkseed.network.protocol.envelope import UNSIGNED, Reply, Status, Task, recipe_digest
from fedkseed.network.protocol.run_history import RunHistory
from fedkseed.network.protocol.server.clients import RemoteClients
from fedkseed.network.protocol.server.serving import current_nonce
from fedkseed.network.protocol.signatures import (
    SIGNING,
    TASKS,
    UPLOADS,
    Audiences,
    ClientSigning,
    ServerSigning,
    certificate,
    fingerprint,
    private_key,
    public_key,
    sign,
    task_statement,
    upload_statement,
    verify,
)
from fedkseed.run.store import Store
from fedkseed.wire.codec import kind_of
from fedkseed.wire.numbers import rounded
from fedkseed.wire.records import Broadcast, Delta, Lack

from ..flower.conftest import NODES, Notes, recorded, to_workers, with_keys

HEAD0 = bytes(32)  # of a task without a history
NONCE = bytes(range(16))
NOW = datetime.now(UTC)


def server_of(keys: Path, nonce: bytes = NONCE, key: str = "server.key", cert: str = "server.pem") -> ServerSigning:
    publics = [public_key((keys / f"client-{k}.pub").read_bytes(), k) for k in range(3)]
    return ServerSigning(
        private_key(keys / key), certificate(keys / cert), certificate(keys / "ca.pem"), publics, nonce
    )


def client_of(keys: Path, number: int) -> ClientSigning:
    return ClientSigning(private_key(keys / f"client-{number}"), certificate(keys / "ca.pem"))


@pytest.fixture(scope="module")
def first(setting) -> Task:
    return setting.first(0)


class Untouched:
    """A worker of client 0 with real keys, that counts how often a recipe is parsed."""

    def __init__(self, setting, keys: Path, number: int = 0) -> None:
        self.parsed = 0
        owner = Owner(str(setting.files[number]), str(setting.model))

        def follow(recipe: bytes) -> TrainingClient:
            self.parsed += 1
            return load_client(owner, recipe)

        self.worker = TaskHandler(follow, client_of(keys, number), disclose=lambda code, text: text)

    def refuses(self, task: Task, status: Status = Status.REFUSED) -> str:
        reply = self.worker.reply(task.encode())
        assert reply.status is status
        assert (self.parsed, self.worker._follower) == (0, None), "nothing of the task was used"
        return reply.text


def test_a_task_that_another_member_sends_in_the_servers_name_is_refused(setting, keys, first):
    """The attack: client 1 has the node id of client 0 and all that clients have, and wants its examples' scalars."""
    unsigned = TaskHandler(partial(load_client, setting.owner(0)))
    assert unsigned.reply(first.encode()).status is Status.DONE, "without signatures the attack succeeds"
    victim = Untouched(setting, keys)
    assert "the task is not signed" in victim.refuses(first)
    own = private_key(keys / "client-1")
    genuine = server_of(keys).signed(replace(first, client=1))  # with the server's certificate, which all clients see
    for key_of_whom in (keys / "client-0.pub", keys / "client-1.pub"):
        print_ = fingerprint(public_key(key_of_whom.read_bytes(), key_of_whom))
        forged = replace(genuine, client=0)
        forged = replace(forged, signature=sign(own, task_statement(client_of(keys, 0).audience, forged, print_)))
        assert "not signed by the server for this client" in victim.refuses(forged)
    for forwarded in (genuine, replace(genuine, client=0)):
        assert "not signed by the server for this client" in victim.refuses(forwarded)
    assert client_of(keys, 1).refusal(genuine) is None, "the one it is meant for takes it"


def test_a_task_or_an_answer_for_another_server_or_federation_is_refused(keys, first, tmp_path):
    """Also where the other server has the same authority, run, key and client: the name that was dialled differs."""
    make(tmp_path, 0, ["localhost"], 2)
    here, server = client_of(keys, 0), server_of(keys)
    at_a, at_b = (replace(here, dialled=name) for name in ("a.example.org", "b.example.org"))
    assert at_a.refusal(server.signed(first, "a.example.org")) is None
    for other in (at_b, replace(here, dialled="")):
        refusal = other.refusal(server.signed(first, "a.example.org"))
        assert refusal is not None
        assert "not signed by the server for this client's key" in refusal.text
    sent = first.message, b"upload", at_a.signature(replace(first, nonce=NONCE), first.message, b"upload")
    server.require(0, HEAD0, *sent, "a.example.org")
    elsewhere = server_of(keys)
    elsewhere.audiences = Audiences.of(tmp_path)
    for place, name in ((server, "b.example.org"), (server, ""), (elsewhere, "a.example.org")):
        with pytest.raises(FedKSeedError, match="not signed with the key of client 0"):
            place.require(0, HEAD0, *sent, name)


def test_a_replayed_task_is_not_worked_on(keys, first):
    server, client = server_of(keys), client_of(keys, 0)
    tasks = [server.signed(first) for _ in range(3)]
    assert [task.issued for task in tasks] == sorted({task.issued for task in tasks})
    assert client.refusal(tasks[1]) is None
    for old in (tasks[1], tasks[0]):
        refusal = client.refusal(old)
        assert refusal is not None
        assert refusal.status is Status.FAILED, "the server that lost an answer signs another task"
        assert "comes a second time" in refusal.text
    assert client.refusal(tasks[2]) is None
    other = server_of(keys, nonce=bytes(16)).signed(first)
    assert client.refusal(replace(other, signature=UNSIGNED)) is not None
    moved = client.refusal(replace(other, nonce=NONCE))
    assert moved is not None
    assert "not signed by the server" in moved.text, "of another run, which can't pass for one of this"
    assert client.refusal(other) is None


def test_one_flipped_bit_anywhere_in_a_task_is_refused(setting, keys, first):
    """Every byte of a short task; the recipe and the message of a real one are longer, and no different."""
    victim = Untouched(setting, keys)
    short = server_of(keys).signed(replace(first, recipe=b"x = 1", digest=recipe_digest(b"x = 1"), message=b"message"))
    data = short.encode()
    assert client_of(keys, 0).refusal(short) is None
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        reply = victim.worker.reply(bytes(flipped))
        assert reply.status in (Status.REFUSED, Status.UNPREPARED), (place, reply.text)
        assert victim.parsed == 0, place


def issued_by(ca: x509.Certificate, ca_key, usage: list, begin: datetime, end: datetime):
    """A key and a certificate, signed by an authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedkseed server")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begin)
        .not_valid_after(end)
    )
    if usage:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    return key, builder.sign(ca_key, hashes.SHA256())


DAY = timedelta(days=1)
SERVER = [ExtendedKeyUsageOID.SERVER_AUTH]


@pytest.mark.parametrize(
    ("usage", "begin", "end", "own_authority", "match"),
    [
        (SERVER, NOW - DAY, NOW + DAY, True, "not signed by the authority of this client"),
        (SERVER, NOW - 3 * DAY, NOW - DAY, False, "renew it"),
        (SERVER, NOW + DAY, NOW + 3 * DAY, False, "set the clock right"),
        ([ExtendedKeyUsageOID.CLIENT_AUTH], NOW - DAY, NOW + DAY, False, "not one of a server"),
        ([], NOW - DAY, NOW + DAY, False, "not one of a server"),
        (SERVER, NOW - DAY, NOW + DAY, False, None),
    ],
)
def test_a_certificate_that_is_foreign_over_or_for_something_else_is_refused(
    setting, keys, first, tmp_path, usage, begin, end, own_authority, match
):
    folder = keys
    if own_authority:
        make(folder := tmp_path / "own", 0, ["localhost"], 365)
    key, made = issued_by(certificate(folder / "ca.pem"), private_key(folder / "ca.key"), usage, begin, end)
    task = ServerSigning(key, made, certificate(folder / "ca.pem"), server_of(keys).clients, NONCE).signed(first)
    if match is None:
        assert client_of(keys, 0).refusal(task) is None
    else:
        assert match in Untouched(setting, keys).refuses(task)


def test_a_certificate_that_was_accepted_is_refused_once_it_is_over(keys, first):
    server, client = server_of(keys), client_of(keys, 0)
    assert client.refusal(server.signed(first)) is None
    later = server.signed(replace(first, recipe=b""))
    assert later.certificate == b"", "it travels with the recipe alone"
    refusal = client.refusal(later, NOW + timedelta(days=400))
    assert refusal is not None
    assert "renew it" in refusal.text
    assert client.refusal(later) is None


def test_a_client_without_the_certificate_asks_for_it_with_the_recipe_and_takes_no_nonsense(keys, first):
    client, server = client_of(keys, 0), server_of(keys)
    assert client.refusal(server.signed(replace(first, recipe=b""))) == Reply(Status.UNPREPARED)
    refusal = client.refusal(replace(server.signed(first), certificate=b"nonsense"))
    assert refusal is not None
    assert "can't be read" in refusal.text


def test_an_answer_proves_which_client_has_made_it_of_which_broadcast(setting, keys, first):
    server, worker = server_of(keys), TaskHandler(partial(load_client, setting.owner(0)), client_of(keys, 0))
    reply = Reply.decode(worker.reply(server.signed(first).encode()).encode())
    server.require(0, HEAD0, first.message, reply.message, reply.signature)
    digests = sha256(first.message).digest() + sha256(reply.message).digest()
    audience = client_of(keys, 0).audience
    statement = UPLOADS + audience + NONCE + struct.pack("<I", 0) + HEAD0 + digests
    assert upload_statement(audience, NONCE, 0, HEAD0, first.message, reply.message) == statement
    broken = bytes([reply.message[0] ^ 1]) + reply.message[1:]
    for client, head, broadcast, upload, nonce in (
        (1, HEAD0, first.message, reply.message, NONCE),
        (0, b"x" * 32, first.message, reply.message, NONCE),
        (0, HEAD0, first.message + b"x", reply.message, NONCE),
        (0, HEAD0, first.message, broken, NONCE),
        (0, HEAD0, first.message, reply.message, bytes(16)),
    ):
        with pytest.raises(FedKSeedError, match=f"not signed with the key of client {client} for this run"):
            server_of(keys, nonce).require(client, head, broadcast, upload, reply.signature)
    with pytest.raises(FedKSeedError, match="its answer is not signed"):
        server.require(0, HEAD0, first.message, reply.message, UNSIGNED)


def test_one_flipped_bit_anywhere_in_an_answer_is_refused(keys):
    server, client = server_of(keys), client_of(keys, 0)
    task = server.signed(Task(0, 1.0, bytes(16), b"", b"broadcast"))
    data = Reply(Status.DONE, b"upload", signature=client.signature(task, task.message, b"upload")).encode()

    def taken(answer: bytes) -> bool:
        try:
            reply = Reply.decode(answer)
            server.require(0, HEAD0, task.message, reply.message, reply.signature)
        except FedKSeedError:
            return False
        return reply.status is Status.DONE

    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        assert not taken(bytes(flipped)), place
    assert taken(data)


def test_an_answer_that_is_sent_again_is_signed_for_the_run_that_asks(setting, keys, first):
    """A worker keeps its last answer; the signature of one run is of no use to another with the same recipe."""
    worker = TaskHandler(partial(load_client, setting.owner(0)), client_of(keys, 0))
    for nonce in (NONCE, bytes(16)):
        server = server_of(keys, nonce)
        reply = worker.reply(server.signed(first).encode())
        assert worker.reply(server.signed(first).encode()) == reply, "the same, for the same run"
        server.require(0, HEAD0, first.message, reply.message, reply.signature)


def test_a_client_trains_on_one_model_in_a_round_whatever_its_server_signs(setting, keys, first, tmp_path):
    """The attack: its server asks it for the same round of one run with two models of its choice, and subtracts."""
    server, message = server_of(keys), decode(first.message, Broadcast)
    chosen = encode(replace(message, coefficients=rounded(message.coefficients + np.float32(1e-3), message.wire)))

    def started() -> TaskHandler:
        signing = ClientSigning(private_key(keys / "client-0"), certificate(keys / "ca.pem"), RunHistory(tmp_path))
        return TaskHandler(partial(load_client, setting.owner(0)), signing, disclose=lambda code, text: text)

    honest, worker = recorded(first), started()
    answer = worker.reply(server.signed(honest).encode())
    assert answer.status is Status.DONE
    two = recorded(replace(first, message=chosen))
    for asked in (
        replace(honest, message=chosen),
        replace(honest, message=chosen, since=1, links=b""),
        replace(two, head=honest.head),
        replace(two, head=honest.head, since=1, links=b""),
        two,
    ):
        for client in (worker, started()):
            refused = client.reply(server.signed(asked).encode())
            assert refused.status is Status.REFUSED
            assert "is not the one in the run's history" in refused.text or "is another than the one" in refused.text
    again = worker.reply(server.signed(replace(honest, since=1, links=b"")).encode())
    assert again.message == answer.message, "the same is answered once more"


@given(st.binary(max_size=200), st.binary(min_size=64, max_size=64))
def test_no_other_signature_is_taken(statement, signature):
    key = ec.derive_private_key(7, ec.SECP256R1())
    made = sign(key, statement)
    assert len(made) == 64
    assert verify(key.public_key(), statement, made)
    assert not verify(key.public_key(), statement + b"x", made)
    assert not verify(key.public_key(), statement, made[:-1])
    assert not verify(key.public_key(), statement, signature)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_openssl_verifies_what_is_signed(keys, tmp_path):
    """Another implementation, by the command that anyone who checks a receipt has."""
    made = sign(private_key(keys / "server.key"), b"statement")
    r, s = (int.from_bytes(half, "big") for half in (made[:32], made[32:]))
    numbers = [n.to_bytes(n.bit_length() // 8 + 1, "big") for n in (r, s)]
    body = b"".join(b"\x02" + bytes([len(n)]) + n for n in numbers)
    (tmp_path / "signature").write_bytes(b"\x30" + bytes([len(body)]) + body)
    (tmp_path / "statement").write_bytes(b"statement")
    own = ["openssl", "x509", "-in", keys / "server.pem", "-pubkey", "-noout", "-out", tmp_path / "key"]
    subprocess.run(own, check=True)
    check = ["openssl", "dgst", "-sha256", "-verify", tmp_path / "key", "-signature", tmp_path / "signature"]
    subprocess.run([*check, tmp_path / "statement"], check=True)


def test_the_two_statements_cannot_be_mistaken_for_each_other_or_for_what_tls_signs():
    assert len(TASKS) > 32 < len(UPLOADS)
    assert TASKS[:32] != UPLOADS[:32]
    assert not TASKS.startswith(UPLOADS)
    assert not UPLOADS.startswith(TASKS)


# A run of the server's own loop, with keys.


@pytest.fixture
def signed_run(setting, keys, tmp_path) -> Path:
    """A run's directory, as `fedkseed serve` makes it, keys and all."""
    directory = setting.begin(tmp_path / "run", "minimum = 2\ndeadline = 60.0\nattempts = 1\npatience = 0.5")
    return with_keys(directory, keys)


def signing_workers(setting, keys, numbers=(0, 1, 2)) -> dict[int, TaskHandler]:
    """Workers of the three nodes, which sign with the keys of these numbers."""
    signings = (None if number is None else client_of(keys, number) for number in numbers)
    pairs = zip(setting.workers().items(), signings, strict=True)
    return {node: TaskHandler(worker.follow, signing) for (node, worker), signing in pairs}


def test_a_signed_run_ends_with_the_digest_of_an_unsigned_one_and_keeps_the_receipts(
    setting, undisturbed, keys, signed_run, monkeypatch
):
    """Differences to kept broadcasts travel in rounds 2 and 3; what is signed is what they restore."""
    receipts, sizes, made = [], set(), []
    deliver, init = to_workers(signing_workers(setting, keys)), RemoteClients.__init__

    def remember(self, *args, **options):
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(RemoteClients, "__init__", remember)

    def watching(message):
        task = Task.decode(unpacked(message))
        beside = len(task.recipe) + len(task.message) + len(task.links)
        sizes.add((len(task.recipe) > 0, len(unpacked(message)) - beside, len(task.links)))
        assert (kind_of(task.message) is Delta) == (not task.recipe)
        for reply in deliver(message):
            receipts.append((task, Reply.decode(unpacked(reply))))
            yield reply

    notes = Notes()
    assert setting.serve(signed_run, watching, notes=notes).digest == undisturbed.digest
    nonce = current_nonce(Store(signed_run))
    assert {task.nonce for task, _ in receipts} == {nonce}
    assert not notes.has("not signed")
    last = {task.client: reply.signature for task, reply in receipts}  # of the last round
    assert made[0].signatures == last
    assert len(last) == 3
    der = len(certificate(keys / "server.pem").public_bytes(Encoding.DER))
    assert sizes == {(False, 194, 32), (True, 194 + der, 32)}, "docs/wire.md has these numbers"
    task, reply = receipts[0]
    key = public_key((keys / f"client-{task.client}.pub").read_bytes(), task.client)
    assert verify(
        key,
        upload_statement(client_of(keys, 0).audience, nonce, task.client, task.head, task.message, reply.message),
        reply.signature,
    )


@pytest.mark.parametrize(
    ("third", "match"), [(1, "client 2 refuses: task"), (None, "client 2 did not answer: its answer is not signed")]
)
def test_a_client_with_another_key_or_none_is_left_out(setting, keys, signed_run, third, match):
    notes = Notes()
    result = setting.serve(signed_run, to_workers(signing_workers(setting, keys, (0, 1, third))), notes=notes)
    assert [report["clients"] for report in result.reports] == [[0, 1]] * 3
    assert notes.has(match)


def test_an_upload_that_is_signed_with_another_clients_key_is_left_out_before_it_is_decoded(setting, keys, signed_run):
    """Client 1 sends in the name of client 2, whose node it has: what it sends is never decoded."""
    deliver, notes, forged = to_workers(signing_workers(setting, keys)), Notes(), []

    def forging(message):
        for reply in deliver(message):
            outcome = Reply.decode(unpacked(reply))
            if message.metadata.dst_node_id == NODES[2]:
                task = Task.decode(unpacked(message))
                statement = upload_statement(
                    client_of(keys, 1).audience, task.nonce, 2, task.head, task.message, b"poison"
                )
                outcome = Reply(Status.DONE, b"poison", signature=sign(private_key(keys / "client-1"), statement))
                forged.append(outcome)
            yield Message(packed(outcome.encode()), reply_to=message)

    result = setting.serve(signed_run, forging, notes=notes)
    assert forged
    assert [report["clients"] for report in result.reports] == [[0, 1]] * 3
    assert notes.has("client 2 did not answer: its answer is not signed with the key of client 2")
    assert not notes.has("left out: "), "the decoder was never asked"


def test_a_lack_is_signed_for_the_difference_that_was_sent_and_is_no_receipt(setting, undisturbed, keys, signed_run):
    """A client that was restarted between two rounds has not kept the first round's broadcast."""
    workers, lacks = signing_workers(setting, keys), []
    deliver = to_workers(workers)

    def forgetting(message):
        node, task = message.metadata.dst_node_id, Task.decode(unpacked(message))
        if node == NODES[1] and kind_of(task.message) is Delta:
            workers[node]._follower._broadcast = None
        for reply in deliver(message):
            outcome = Reply.decode(unpacked(reply))
            if kind_of(outcome.message) is Lack:
                lacks.append((task, outcome))
            yield reply

    assert setting.serve(signed_run, forgetting).digest == undisturbed.digest
    assert len(lacks) == 2
    for task, outcome in lacks:
        server_of(keys, task.nonce).require(1, task.head, task.message, outcome.message, outcome.signature)


def test_the_nonce_of_a_run_is_drawn_once(tmp_path):
    found = set()
    for name in "ab":
        with Store.create(tmp_path / name, "") as store:
            found |= {current_nonce(store), current_nonce(Store(tmp_path / name))}
    assert len(found) == 2
    assert {len(nonce) for nonce in found} == {16}


def test_a_server_reads_what_it_has_written_down_and_nothing_where_there_are_no_keys(keys, tmp_path):
    assert ServerSigning.read(tmp_path, NONCE) is None
    publics = [(keys / f"client-{k}.pub").read_text() for k in range(3)]
    ServerSigning.write(tmp_path, keys, publics)
    assert (tmp_path / SIGNING).stat().st_mode & 0o777 == 0o600
    read = ServerSigning.read(tmp_path, NONCE)
    assert read is not None
    assert [fingerprint(key) for key in read.clients] == [fingerprint(key) for key in server_of(keys).clients]
    ServerSigning.write(
        tmp_path, keys, ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"]
    )
    with pytest.raises(FedKSeedError, match="the entry of client 0 holds another key than ecdsa-sha2-nist"):
        ServerSigning.read(tmp_path, NONCE)


def test_a_client_whose_key_was_removed_keeps_its_key_for_masks(keys, tmp_path):
    """Else every masked round that draws it would fail: the other clients expect the cohort of their recipe."""
    publics = [(keys / f"client-{k}.pub").read_text() for k in range(3)]
    ServerSigning.write(tmp_path, keys, publics)
    before = ServerSigning.read(tmp_path, NONCE)
    ServerSigning.write(tmp_path, keys, [publics[0], "", publics[2]])
    after = ServerSigning.read(tmp_path, NONCE)
    assert before is not None
    assert after is not None
    assert after.clients[1] is None
    assert len({*before.masks.values()}) == 3
    assert after.masks == before.masks
    ServerSigning.write(tmp_path, keys, [publics[0], publics[2], publics[2]])
    replaced = ServerSigning.read(tmp_path, NONCE)
    assert replaced is not None
    assert replaced.masks[1] == before.masks[2]


def test_a_clients_settings_name_the_files_that_sign(setting, keys, tmp_path):
    owner = setting.owner(0)
    OwnerSettings(owner, 60.0, str(keys / "client-0"), str(keys / "ca.pem")).write(tmp_path / "c")
    assert (tmp_path / "c" / "owner.json").stat().st_mode & 0o777 == 0o600
    signing = OwnerSettings.read(tmp_path / "c").signing(tmp_path / "c")
    assert signing is not None
    assert fingerprint(signing.key.public_key()) == fingerprint(server_of(keys).clients[0])
    OwnerSettings(owner).write(tmp_path / "c")
    assert OwnerSettings.read(tmp_path / "c").signing(tmp_path / "c") is None
    with pytest.raises(FedKSeedError, match="a key and a ca, or neither"):
        OwnerSettings(owner, key="x")


@pytest.mark.parametrize("content", [b"nonsense", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n"])
def test_a_file_that_holds_no_key_is_refused(tmp_path, content):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(FedKSeedError, match="holds no private key that can be read"):
        private_key(tmp_path / "key")
    with pytest.raises(FedKSeedError, match="holds no public key in OpenSSH's format"):
        public_key(content, "it")


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()])
def test_a_private_key_of_another_kind_is_refused_as_one(tmp_path, key):
    (tmp_path / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(FedKSeedError, match="key holds another key than ecdsa-sha2-nistp256") as refused:
        private_key(tmp_path / "key")
    assert "can be read" not in str(refused.value)
