"""A client that was written from the documents: against our vectors, our model, and in a round over HTTPS."""

import ast
import json
from pathlib import Path
from threading import Thread
from tomllib import loads

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedkseed import Adapter, Pool, start
from fedkseed.data.batches import Encoded, collate
from fedkseed.data.layouts import Example
from fedkseed.models.load import load_model
from fedkseed.models.loss import batch_loss
from fedkseed.recipe.reading import parse
from fedkseed.run.store import Store
from fedkseed.weights.modes import hold
from fedkseed.wire.codec import decode
from fedkseed.wire.delta import restore
from fedkseed.wire.records import Upload

from ..https.network import network
from . import port, reading
from .vectors import KEYS, NAMES, PATH, certificates

VECTORS = json.loads(PATH.read_text())
WIRE = json.loads(PATH.parents[2].joinpath("wire", "vectors.json").read_text())
MESSAGES = {row["name"]: bytes.fromhex(row["bytes"]) for row in WIRE["messages"]}


@pytest.mark.parametrize("module", [port, reading], ids=["port", "reading"])
def test_the_port_imports_nothing_of_ours(module):
    nodes = [*ast.walk(ast.parse(Path(module.__file__).read_text()))]
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module or "." for n in nodes if isinstance(n, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} & {"fedkseed", "torch", "transformers", "safetensors"}
    assert {"httpx", "tokenizers", "numpy"} <= names or module is reading


def test_the_port_answers_the_vectors_as_our_client_does(tmp_path):
    authority = x509.load_der_x509_certificate(certificates()["authority"])
    client = port.Port(KEYS["client 0"], authority, None, tmp_path / "rows", tmp_path / "logs.json", dialled=NAMES[0])
    for vector in VECTORS["received"]:
        reply = client.reply(bytes.fromhex(vector["bytes"]))
        assert (reply[5], reply[6:].decode()) == (vector["status"], vector["code"]), vector["name"]


def test_the_port_reads_and_writes_our_messages():
    for name in ("exact", "compact", "sign", "exact, probabilities", "compact, probabilities"):
        data = MESSAGES[f"broadcast, {name}"]
        found = port.broadcast_of(data)
        fields = next(row["fields"] for row in WIRE["messages"] if row["name"] == f"broadcast, {name}")
        assert found["c"].tolist() == fields["coefficients"]
        assert (found["p"] is None) == (fields["probabilities"] is None)
        assert all(found[k] == fields[k] for k in ("lr", "eps", "steps", "probes"))
    for name in ("exact", "compact", "sign", "sign, some skipped"):
        data = MESSAGES[f"upload, {name}"]
        up = decode(data, Upload)
        made = port.upload_of(data, up.client, up.examples, up.loss, up.scalars.tolist(), up.wire)
        assert made == data
    kept, delta, whole = (bytes.fromhex(WIRE["delta"][name]) for name in ("kept", "delta", "whole"))
    assert port.restored(delta, kept) == whole == restore(delta, kept)
    for row in WIRE["deltas"]:
        kept, delta = row["kept"] and bytes.fromhex(row["kept"]), bytes.fromhex(row["delta"])
        if row["outcome"] == "lack":
            assert port.restored(delta, kept) is None, row["name"]
            continue
        with pytest.raises(port.Reply, match="task"):
            port.restored(delta, kept)


def test_the_port_has_our_weights_and_our_loss(model_folder):
    pool = Pool((1 << 64) - 5, 64, "hadamard")
    own = port.Weights(model_folder, pool.key, 64, tied=True)
    model = load_model(str(model_folder))
    weights = hold(model, pool, mode="materialized")
    assert own.digest(np.zeros(64, np.float32)) == weights.base_digest.hex()
    c = (np.random.default_rng(0).normal(size=64) * 1e-2).astype(np.float32)
    weights.load(c)
    assert own.digest(c) == weights.digest().hex(), "bit for bit"
    config = json.loads((model_folder / "config.json").read_text())
    rows = [{"tokens": [5, 9, 200, 7, 31, 0], "counted": [(3, 6)]}, {"tokens": [17, 3, 0], "counted": [(1, 3)]}]
    encoded = [Encoded(tuple(row["tokens"]), row["counted"][0][0], Example("", "")) for row in rows]
    found = reading.loss_of([port.logits_of(own.of(c), config, row["tokens"]) for row in rows], rows)
    assert found == pytest.approx(batch_loss(model, collate(encoded, 0)), rel=1e-5)  # float32 of a thousand products


@pytest.mark.network
@pytest.mark.parametrize("wire", ["compact", "exact"])
def test_a_client_written_from_the_documents_takes_part_beside_ours(setting, tmp_path, wire):
    """Its scalars differ from ours by the rounding of the forward pass, and all parties end with one model."""
    text = setting.text("minimum = 3", algorithm=f'algorithm = "fedkseed"\nwire = "{wire}"\nprobes = 2')
    start(parse(loads(text)), tmp_path / "alone")
    with network(tmp_path, text, setting.files, setting.model) as federation:
        key = serialization.load_ssh_private_key(federation.key(2).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        authority = x509.load_pem_x509_certificate((federation.keys / "ca.pem").read_bytes())
        client = port.Port(key, authority, setting.model, setting.files[2], tmp_path / "logs.json", smallest=2)
        server = federation.server()
        url = f"https://localhost:{federation.port}"
        thread = Thread(target=client.serve, args=(url, federation.keys / "ca.pem"), daemon=True)
        thread.start()
        for number in range(2):
            federation.client(number)
        assert server.wait() == 0, federation.everything()
        thread.join(30)
        assert client.tuned is not None
        round_, digest, c = client.tuned
        ours = Adapter.load(federation.run)
        assert (round_, digest) == (3, federation.digest())
        np.testing.assert_array_equal(c, ours.coefficients)
        reports = Store(federation.run).reports()
        assert [report["clients"] for report in reports] == [[0, 1, 2]] * 3
        same = Adapter.load(tmp_path / "alone").coefficients
        assert np.abs(c - same).max() < 0.02 * np.abs(same).max(), "the same batches, directions and steps"
        assert sorted(client.uploads) == [0, 1, 2]
