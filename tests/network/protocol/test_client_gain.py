"""What a client gains over a network: measured by the client, kept for its owner, sent only if its owner allows it."""

import json
import math
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from tomllib import loads

import numpy as np
import pytest

from fedkseed import FedKSeedError
from fedkseed.data.layouts import Example
from fedkseed.data.wording import Wording
from fedkseed.evaluation.statistics import Estimate, Gain
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.models.loss import example_losses
from fedkseed.network.flower.client_app import client_app
from fedkseed.network.protocol.client.policy import Policy, Unseen
from fedkseed.network.protocol.client.recipe_consent import Owner
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.client_gain import LEAST_ROWS, GainFile, GainSum
from fedkseed.network.protocol.networked_recipe import recipe_for_clients
from fedkseed.network.protocol.server.serving import asks_for_gains
from fedkseed.recipe.reading import parse
from fedkseed.run.store import GAINS, Store
from fedkseed.weights.adapter import ADAPTER, apply
from fedkseed.wire.codec import sealed

from ...conftest import rows
from ...encoding import encode_all
from ..flower.conftest import NODES, OPEN, Notes, recorded
from ..flower.loopback import to_apps

LINES = {"examples": "examples = 8\nclients = 0.5"}


def own(setting, folder: Path, number: int, **unseen) -> Owner:
    """An owner with 48 rows, of which a category is held out of training and about half of the others kept back."""
    many = [{**row, "instruction": f"{row['instruction']} {number}{k}"} for k in range(2) for row in rows()]
    file = folder / f"own-{number}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in many))
    return Owner(str(file), str(setting.model), policy=OPEN.model_copy(update={"evaluation": Unseen(**unseen)}))


def federation(setting, folder: Path, owners: list[Owner]):
    """A transport to workers of these owners, and the workers, which do afterwards what nobody waits for."""
    places = [folder / f"c{number}" for number in range(len(owners))]
    for place in places:
        place.mkdir()
    made = [
        TaskHandler(partial(load_client, one, keeps=place / ADAPTER)) for one, place in zip(owners, places, strict=True)
    ]

    def answered(task, context, worker):
        reply = worker.reply(task).encode()
        worker.afterwards()
        return reply

    apps = {node: client_app(partial(answered, worker=worker)) for node, worker in zip(NODES, made, strict=True)}
    return to_apps(apps), places


def measured(setting, owner: Owner, adapter: Path) -> tuple[np.ndarray, np.ndarray, set[str]]:
    """The losses of the base and the tuned model on the rows that a client says it keeps back, one row at a time."""
    member = load_client(owner, setting.first(0, **LINES).recipe)
    kept = [e.example for e in member.unseen.examples]
    assert not {e.example for e in member.examples} & {*kept}
    tokenizer = load_tokenizer(str(setting.model))
    encoded = encode_all([Example(e.instruction, e.response, e.context) for e in kept], tokenizer, Wording())
    losses = [
        np.array([float(example_losses(model, [e], tokenizer.pad_token_id)[0]) for e in encoded])
        for model in (load_model(str(setting.model)), apply(load_model(str(setting.model)), adapter))
    ]
    return losses[0], losses[1], {e.category for e in kept}


def test_each_owner_sees_its_gain_and_the_server_what_it_is_allowed_to(setting, tmp_path):
    policies = [{"kept_back": 0.5, "send": True, "metrics": ("accuracy",)}, {"kept_back": 0.5}, {}]
    owners = [own(setting, tmp_path, number, **unseen) for number, unseen in enumerate(policies)]
    deliver, places = federation(setting, tmp_path, owners)
    notes, directory = Notes(), setting.begin(tmp_path / "run", **LINES)
    result = setting.serve(directory, deliver, notes=notes)
    assert notes.has("3 of 3 clients have kept the tuned model")
    assert notes.has("1 of them have sent what they gained")
    first, second = (json.loads((place / "gain.json").read_text()) for place in places[:2])
    assert not (places[2] / "gain.json").exists()  # this owner keeps no rows back
    for table, owner, place in zip((first, second), owners, places, strict=False):
        before, after, categories = measured(setting, owner, place / ADAPTER)
        assert categories == {"colour", "number"}  # the held-out category is no client's to train on either way
        gain = Gain.of(table["gain"])
        assert gain.rows == before.size
        assert gain.before["loss"] == pytest.approx(before.mean(), abs=1e-5)
        assert gain.after["loss"] == pytest.approx(after.mean(), abs=1e-5)
        assert gain.change["loss"].error == pytest.approx((after - before).std(ddof=1) / np.sqrt(before.size), abs=1e-5)
    assert (first["sent"], second["sent"]) == (True, False)
    assert [*Gain.of(first["gain"]).change] == ["loss", "accuracy"]
    (sent,) = result.gains
    assert (sent.client, sent.rows, sent.before, sent.after) == ("client 0", first["gain"]["rows"], {}, {})
    assert sent.change == {"loss": Estimate(pytest.approx(first["gain"]["change"]["loss"]["mean"]), math.inf)}
    assert [Gain.of(table) for table in Store(directory).recall(GAINS)] == [sent]


def test_a_server_that_does_not_ask_is_sent_nothing_and_the_owner_sees_it_all_the_same(setting, tmp_path):
    owners = [own(setting, tmp_path, number, kept_back=0.5, send=True) for number in range(3)]
    deliver, places = federation(setting, tmp_path, owners)
    notes = Notes()
    assert setting.serve(setting.begin(tmp_path / "run"), deliver, notes=notes).gains == []
    assert notes.has("3 of 3 clients have kept the tuned model")
    assert not notes.has("gained")
    for place in places:
        assert not json.loads((place / "gain.json").read_text())["sent"]


def test_nothing_is_sent_where_uploads_are_masked_or_noised(setting, tmp_path):
    owner = own(setting, tmp_path, 0, kept_back=0.5, send=True)
    clear, masked = (parse(loads(setting.text(more=more, **LINES))) for more in ("", "[secure]\nnorm = 0.05\n"))
    sends = [load_client(owner, recipe_for_clients(recipe, 3)).may_send_gain() for recipe in (clear, masked)]
    assert sends == [True, False]
    notes = Notes()
    assert [asks_for_gains(recipe, notes) for recipe in (clear, masked)] == [True, False]
    assert notes.has("[secure] hides what is of one client")
    with pytest.raises(FedKSeedError, match="'own rows' measures on the clients' own rows, without noise"):
        parse(loads(setting.text(more="[privacy]\nepsilon = 8.0\nnorm = 1.0\n", **LINES)))


def test_of_one_run_one_model_is_answered_and_the_owner_sees_each(setting, tmp_path):
    owner = own(setting, tmp_path, 0, kept_back=0.5, send=True)
    task = replace(recorded(setting.first(0, **LINES)), keep=True)
    member = load_client(owner, task.recipe, keeps=tmp_path / ADAPTER)
    _, made = member.answer(task, lambda loss: None)
    found = GainSum.decode(made)
    assert found.rows == len(member.unseen.examples)
    assert found.change == pytest.approx(0.0, abs=1e-4)  # the model of the first round is the base model
    assert member.answer(task, lambda loss: None)[1] == made  # a worker that was started again answers the same
    other = bytearray(task.message)
    round_ = struct.unpack_from("<I", other, 8)[0]
    struct.pack_into("<I", other, 8, round_ + 1)
    another = replace(task, message=sealed(bytes(other[:-4])))
    assert member.answer(another, lambda loss: None)[1] == b""
    member.afterwards()
    assert json.loads((tmp_path / "gain.json").read_text())["rounds"] == round_ + 1
    assert not json.loads((tmp_path / "gain.json").read_text())["sent"]


def test_a_sum_of_few_rows_is_not_sent(setting, tmp_path, capsys):
    owner = own(setting, tmp_path, 0, kept_back=0.1, send=True)
    member = load_client(owner, setting.first(0, **LINES).recipe)
    assert 0 < len(member.unseen.examples) < LEAST_ROWS
    assert not member.may_send_gain()
    assert f"{LEAST_ROWS} are needed: let kept_back be larger" in capsys.readouterr().err


def test_an_owner_names_the_metrics_and_the_size_of_batches_and_no_server_does(setting, tmp_path):
    recipe = setting.first(0, examples='examples = 8\nbatch_size = 4096\nmetrics = ["choice"]\nclients = 0.1').recipe
    followed = load_client(own(setting, tmp_path, 0, examples=7, kept_back=0.9), recipe)
    assert followed.recipe.evaluation.measured == ("loss",)
    assert followed.recipe.evaluation.batch_size == OPEN.training.max_batch_size
    assert len(followed.unseen.examples) == 7


def test_a_sum_travels_in_18_bytes_and_anything_else_is_refused():
    made = GainSum(12, -3.5)
    data = made.encode()
    assert data.hex() == "464b53670100" + "0c000000" + "0000000000000cc0"
    assert GainSum.decode(data) == made
    gain = made.gain(4)
    assert (gain.client, gain.rows, gain.change["loss"].mean, gain.verdict) == ("client 4", 12, -3.5 / 12, "unclear")
    others = b"FKSd" + data[4:], data[:4] + b"\2" + data[5:], data[:5] + b"\7" + data[6:]
    for broken in (data[:-1], data + b"0", *others):
        with pytest.raises(FedKSeedError, match=r"a gain has 18 bytes|no gain of version 1"):
            GainSum.decode(broken)
    for rows_, change in ((LEAST_ROWS - 1, 1.0), (12, math.nan), (12, math.inf)):
        with pytest.raises(FedKSeedError, match="a gain is finite and of 10 rows or more"):
            GainSum(rows_, change)


def test_news_are_said_once(tmp_path):
    kept, watcher = GainFile(tmp_path), GainFile(tmp_path)
    assert watcher.news() is None
    assert kept.allows(bytes(16), b"a message")  # which writes the file, and no gain
    assert watcher.news() is None
    kept.write(Gain("a", 20, {"loss": 2.0}, {"loss": 1.5}, {"loss": Estimate(-0.5, 0.1)}), 3, True)
    words = watcher.news()
    assert words is not None
    assert words.startswith("on 20 rows that this client did not train on: held-out loss 2.0000 before, 1.5000 after")
    assert (watcher.news(), GainFile(tmp_path).news()) == (None, None)
    assert not kept.allows(bytes(16), b"another")


def test_a_policy_of_rows_that_are_not_trained_on_is_read_from_toml():
    text = '[evaluation]\nkept_back = 0.1\nmetrics = ["choice"]\nsend = true\n'
    policy = Policy.model_validate(loads(text))
    assert policy.evaluation == Unseen(kept_back=0.1, metrics=("choice",), send=True)
    assert Policy().evaluation.kept_back is None
