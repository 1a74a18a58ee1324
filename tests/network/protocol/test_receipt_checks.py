"""Receipts of a run: signatures with real keys, current and former ones, and what clients have seen."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedkseed import FedKSeedError
from fedkseed.cli import app
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.envelope import Task
from fedkseed.network.protocol.receipt_checks import (
    held_keys,
    nonce_of,
    remember_audiences,
    require_seen,
    signature_check,
)
from fedkseed.network.protocol.run_history import HISTORY_FILE, RunHistory
from fedkseed.network.protocol.server.serving import current_nonce
from fedkseed.network.protocol.signatures import (
    SIGNING,
    Audiences,
    ServerSigning,
    audience,
    certificate,
    keys_of_run,
    private_key,
    sign,
    upload_statement,
)
from fedkseed.run.store import NONCES, Store, pack
from fedkseed.run.verify import require_head, verify
from fedkseed.wire.codec import decode

from ...run import synthetic
from ...run.synthetic import CLIENTS, ROUNDS, change, mend


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    make(folder := tmp_path_factory.mktemp("keys"), CLIENTS + 1, ["localhost"], 365)
    return folder


def public(keys: Path, *numbers: int) -> list[str]:
    return [(keys / f"client-{number}.pub").read_text().strip() for number in numbers]


def go_on(store: Store, keys: Path, numbers: list[int], stop: int | None = None, names_audience: bool = True) -> None:
    """Let a run's clients answer with the keys of these numbers, as a network's do; until version 2 for no audience."""
    (store.directory / "flower").mkdir(exist_ok=True)
    ServerSigning.write(store.directory / "flower", keys, public(keys, *numbers))
    of = audience(certificate(keys / "ca.pem"), "") if names_audience else b""
    if names_audience:
        remember_audiences(store, Audiences.of(keys))
    nonce = current_nonce(store)

    def signature(done: int, client: int, broadcast: bytes, upload: bytes) -> bytes:
        statement = upload_statement(of, nonce, client, store.head(done), broadcast, upload)
        return sign(private_key(keys / f"client-{numbers[client]}"), statement)

    try:
        synthetic.resume(store.directory, sign=signature, stop=stop)
    except synthetic.StoppedError:
        return


@pytest.fixture(scope="module")
def signed(keys, tmp_path_factory) -> Path:
    """A finished run, in which client 1 got another key after two rounds."""
    store = synthetic.begin(tmp_path_factory.mktemp("signed") / "run", stop=0)
    go_on(store, keys, [0, CLIENTS, 2, 3], stop=2)
    go_on(store, keys, [0, 1, 2, 3])
    return store.directory


@pytest.fixture
def run(signed, tmp_path) -> Store:
    return Store(Path(shutil.copytree(signed, tmp_path / "run")))


def test_uploads_are_verified_by_current_and_former_keys_and_by_no_other(run):
    assert verify(run, signature_check(run)).signed == ROUNDS * CLIENTS
    path = run.directory / "flower" / SIGNING
    table = json.loads(path.read_bytes())
    assert [len(former) for former in table["former"]] == [0, 1, 0, 0]
    ServerSigning.write(run.directory / "flower", run.directory, table["clients"])  # nothing new: former keys stay
    assert verify(run, signature_check(run)).signed == ROUNDS * CLIENTS
    path.unlink()
    ServerSigning.write(run.directory / "flower", run.directory, table["clients"])
    with pytest.raises(FedKSeedError, match=r"^round 1: the upload of client 1 is not signed by it"):
        verify(run, signature_check(run))


@pytest.fixture(scope="module")
def made_up(keys, tmp_path_factory) -> Store:
    """A run that its server has made up alone, with clients' keys of its own."""
    make(own := tmp_path_factory.mktemp("own") / "keys", CLIENTS, ["localhost"], 365)
    store = synthetic.begin(tmp_path_factory.mktemp("made up") / "run", stop=0)
    go_on(store, own, [0, 1, 2, 3])
    return store


def test_receipts_of_version_2_are_verified_beside_later_ones_and_in_no_run_that_began_later(keys, tmp_path):
    old, new = (synthetic.begin(tmp_path / name, stop=0) for name in ("old", "new"))
    go_on(old, keys, [0, 1, 2, 3], stop=2, names_audience=False)
    go_on(old, keys, [0, 1, 2, 3])
    assert verify(old, signature_check(old)).signed == ROUNDS * CLIENTS
    remember_audiences(new, Audiences.of(keys))
    go_on(new, keys, [0, 1, 2, 3], names_audience=False)
    with pytest.raises(FedKSeedError, match="round 1: the upload of client 0 is not signed by it"):
        verify(new, signature_check(new))


def test_a_run_that_its_server_has_made_up_with_keys_of_its_own_is_found_by_keys_that_the_reader_holds(
    signed, made_up, keys
):
    assert verify(made_up, signature_check(made_up)).signed == ROUNDS * CLIENTS, "with its own keys the attack succeeds"
    with pytest.raises(FedKSeedError, match=r"^round 1: the upload of client 0 is not signed by it for this run"):
        verify(made_up, signature_check(made_up, held_keys([keys])))
    swapped = {0: [], **held_keys([keys])} | {1: held_keys([keys])[CLIENTS], CLIENTS: held_keys([keys])[1]}
    with pytest.raises(FedKSeedError, match=r"^round 3: the upload of client 1 is not signed by it"):
        verify(Store(signed), signature_check(Store(signed), swapped))  # its former key alone


def test_keys_of_folders_and_files_are_put_together(run, keys, tmp_path):
    """Client 1 had another key in the first two rounds."""
    (tmp_path / "former").mkdir()
    shutil.copy(keys / f"client-{CLIENTS}.pub", tmp_path / "former" / "client-1.pub")
    shutil.rmtree(run.directory / "flower")
    assert signature_check(run) is None
    held = held_keys([keys, tmp_path / "former" / "client-1.pub"])
    assert verify(run, signature_check(run, held)).signed == ROUNDS * CLIENTS
    with pytest.raises(FedKSeedError, match=r"^round 1: the upload of client 1 is not signed by it"):
        verify(run, signature_check(run, held_keys([keys])))
    with pytest.raises(FedKSeedError, match=r"^round 1: client 1 took part, and --keys has no client-1\.pub"):
        verify(run, signature_check(run, held_keys([keys / "client-0.pub"])))


def test_keys_that_tell_no_clients_number_or_are_none_are_refused(keys, tmp_path):
    with pytest.raises(FedKSeedError, match=r"there is no client-0\.pub or the like in"):
        held_keys([tmp_path])
    for name, match in (("mine.pub", "name it as its client"), ("client-7.pub", "holds no public key")):
        (tmp_path / name).write_text("nonsense")
        with pytest.raises(FedKSeedError, match=match):
            held_keys([tmp_path / name])
    with pytest.raises(FedKSeedError, match="can't read"):
        held_keys([tmp_path / "client-8.pub"])


def test_the_command_finds_a_run_that_was_made_up_and_says_where_its_keys_are_from(signed, made_up, keys, tmp_path):
    def done(*arguments: object):
        return CliRunner().invoke(app, ["verify", *map(str, arguments)], env={"COLUMNS": "300", "TERM": "dumb"})

    passed = done(made_up.directory)
    assert passed.exit_code == 0, passed.output
    assert "keys: those that the run itself names; --keys compares with keys that you hold" in passed.output
    assert "is not signed by it" in (found := done(made_up.directory, "--keys", keys)).stderr
    assert found.exit_code == 2
    shutil.copy(keys / f"client-{CLIENTS}.pub", tmp_path / "client-1.pub")
    seen_by = client(Store(signed), tmp_path / "client", 5)
    brought = "--keys", keys, "--keys", tmp_path, "--history", seen_by, "--head", Store(signed).head(ROUNDS).hex()
    right = done(signed, *brought)
    assert right.exit_code == 0, right.output
    assert "24 signatures checked" in right.output
    assert "is that after 6 rounds" in right.output
    assert "those that the run itself names" not in right.output
    for option, value in (("--history", seen_by), ("--head", Store(signed).head(ROUNDS).hex())):
        assert done(made_up.directory, option, value).exit_code == 2


def test_a_last_round_that_was_computed_anew_without_an_upload_is_found_by_a_head_alone(run, tmp_path):
    """The attack: the server drops an upload that it has acknowledged; no later signature stands for the round."""
    path, head = client(run, tmp_path / "client", ROUNDS), run.head(ROUNDS).hex()
    assert require_head(run, head.upper()) == ROUNDS
    strategy = synthetic.federation(run.recipe.read_text()).strategy
    kept = [decode(run.receipts(ROUNDS)[number].upload, *strategy.aggregator.replies) for number in range(CLIENTS - 1)]
    after = strategy.aggregate(run.state(strategy.server.state, ROUNDS - 1), kept)
    change(run, "DELETE FROM uploads WHERE done = 6 AND client = 3")
    change(run, "UPDATE rounds SET state = ? WHERE done = 6", pack(after))
    mend(run, strategy)
    run.adapter.unlink()
    assert verify(run, signature_check(run)).uploads == ROUNDS * CLIENTS - 1, "without a head the attack succeeds"
    assert require_head(run, run.head(ROUNDS - 1).hex()) == ROUNDS - 1
    with pytest.raises(FedKSeedError, match=r"has no head .* after any of its 6 rounds: it is another run, or was"):
        require_head(run, head)
    with pytest.raises(FedKSeedError, match="has seen another run than"):
        require_seen(run, path)


def forged(run: Store, keys: Path, *, key: int, head: int = 5, nonce: bytes | None = None, client: int = 2) -> Store:
    """The upload of client 2 of the last round, signed anew by a server that has some client's key."""
    strategy = synthetic.federation(run.recipe.read_text()).strategy
    broadcast = synthetic.encode(strategy.server.broadcast(run.state(strategy.server.state, 5)))
    upload = run.receipts(6)[2].upload
    of = audience(certificate(keys / "ca.pem"), "")
    statement = upload_statement(of, nonce or current_nonce(run), client, run.head(head), broadcast, upload)
    made = sign(private_key(keys / f"client-{key}"), statement)
    change(run, "UPDATE uploads SET signature = ? WHERE done = 6 AND client = 2", made)
    mend(run)
    return run


def test_a_signature_with_the_clients_own_key_is_taken(run, keys):
    """The forgery below differs from it in one thing each time."""
    store = forged(run, keys, key=2)
    assert verify(store, signature_check(store)).signed == ROUNDS * CLIENTS


@pytest.mark.parametrize(
    "wrong", [{"key": 3}, {"key": 2, "head": 4}, {"key": 2, "nonce": bytes(16)}, {"key": 2, "client": 1}],
    ids=["another client's key", "another head", "another run's nonce", "another client's number"],
)  # fmt: skip
def test_a_signature_that_is_not_the_clients_for_this_run_and_history_is_found(run, keys, wrong):
    store = forged(run, keys, **wrong)
    with pytest.raises(FedKSeedError, match=r"^round 6: the upload of client 2 is not signed by it"):
        verify(store, signature_check(store))


def test_a_change_of_an_early_round_leaves_no_later_signature_right(run):
    """Each upload is signed for the history before it, so even a report that nobody recomputes can't be changed."""
    change(run, "UPDATE rounds SET report = replace(report, '\"skipped\": 0', '\"skipped\": 1') WHERE done = 2")
    mend(run)
    with pytest.raises(FedKSeedError, match=r"^round 3: the upload of client 0 is not signed by it"):
        verify(run, signature_check(run))
    assert verify(run).unchecked == ROUNDS * CLIENTS, "without keys it passes"


def test_a_client_beyond_the_registered_ones_is_found(run, keys):
    ServerSigning.write(run.directory / "flower", keys, public(keys, 0, 1, 2))
    with pytest.raises(FedKSeedError, match="the upload of client 3 is not signed by it"):
        verify(run, signature_check(run))


def test_a_run_that_has_lost_its_nonces_is_not_called_one_without_keys(run):
    """The attack: a server that deletes the fact, so that no signature can be checked."""
    change(run, "DELETE FROM facts WHERE name = 'nonces'")
    with pytest.raises(FedKSeedError, match="has no nonce for the tasks after 0 rounds"):
        verify(run, signature_check(run))


def test_a_run_without_keys_has_no_checks(tmp_path):
    assert signature_check(synthetic.begin(tmp_path / "run", stop=1)) is None


def test_one_flipped_bit_in_the_file_of_keys_is_refused(run):
    folder, nonce = run.directory / "flower", current_nonce(run)
    for where in synthetic.flips(folder / SIGNING, 300):
        for read in (lambda: ServerSigning.read(folder, nonce), lambda: keys_of_run(run.directory)):
            assert synthetic.refused(read), where
    assert len(keys_of_run(run.directory)) == CLIENTS


def client(run: Store, directory: Path, done: int) -> Path:
    """The file of a client that has seen `done` rounds."""
    directory.mkdir(exist_ok=True)
    links, head, stem = run.history(0, done)
    asked = Task(0, 1.0, bytes(16), b"", b"", nonce_of(run, done), links=b"".join(links), head=head, stem=stem)
    assert RunHistory(directory).follow(asked)
    return directory / HISTORY_FILE


def test_a_run_that_a_client_has_seen_is_recognised(run, tmp_path):
    for done in (0, 3, ROUNDS):
        require_seen(run, client(run, tmp_path / str(done), done))


def test_a_run_that_was_computed_anew_is_not_the_one_that_a_client_has_seen(run, keys, tmp_path):
    """All digests fit, and so do the signatures, of a server that has all keys: only the client's file is left."""
    path, early = client(run, tmp_path / "client", 5), client(run, tmp_path / "early", 2)
    nonces = run.recall(NONCES)
    run.rollback(3)
    run.remember(NONCES, nonces)
    synthetic.resume(run.directory, sign=lambda *_: b"other")
    with pytest.raises(FedKSeedError, match=r"has seen another run than .* up to round 5"):
        require_seen(run, path)
    require_seen(run, early)


def test_a_run_that_has_fewer_rounds_than_a_client_has_seen_is_refused(run, tmp_path):
    path, nonces = client(run, tmp_path / "client", 5), run.recall(NONCES)
    run.rollback(3)
    run.remember(NONCES, nonces)
    with pytest.raises(FedKSeedError, match="no state after 5 rounds"):
        require_seen(run, path)


def test_a_rollback_by_the_command_is_named_and_a_client_that_knows_of_it_is_content(run, keys, tmp_path):
    path = client(run, tmp_path / "client", 5)
    run.rollback(3)
    go_on(run, keys, [0, 1, 2, 3])
    with pytest.raises(FedKSeedError, match=r"has seen 5 rounds of .*, which has gone back to 3 since"):
        require_seen(run, path)
    require_seen(run, client(run, tmp_path / "client", 4))
    assert verify(run, signature_check(run)).signed == ROUNDS * CLIENTS


def test_a_client_of_another_run_is_refused(run, tmp_path):
    other = synthetic.begin(tmp_path / "other", stop=1)
    current_nonce(other)
    with pytest.raises(FedKSeedError, match="has seen nothing of"):
        require_seen(run, client(other, tmp_path / "client", 1))
