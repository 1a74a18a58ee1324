"""A server's processes and a client's, as far as they can be looked at without starting Flower."""

import math
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from socket import create_server
from threading import Thread
from tomllib import loads
from types import SimpleNamespace

import numpy as np
import pytest

from fedkseed import FedKSeedError
from fedkseed.cli import flower as commands
from fedkseed.directions import Pool
from fedkseed.evaluation.statistics import Estimate, Evaluation, Gain
from fedkseed.network.flower.children import SECRET, Child, environment, free_port, secret, wait_until, write_program
from fedkseed.network.flower.client import supervisor as node
from fedkseed.network.flower.client.supervisor import Connection, Node
from fedkseed.network.flower.compat import CLIENTAPP, QUIET
from fedkseed.network.flower.server import processes as host
from fedkseed.network.flower.server.processes import ServerProcesses, nginx_conf
from fedkseed.network.flower.server.status_file import Journal, JournalReader
from fedkseed.network.flower.server.superlink import Notices
from fedkseed.network.protocol.carrier import MAX_MESSAGE
from fedkseed.network.protocol.certs import make
from fedkseed.network.protocol.client.recipe_consent import Owner
from fedkseed.network.protocol.networked_recipe import largest_request
from fedkseed.network.protocol.server.client_numbers import ClientNumbers
from fedkseed.recipe.reading import load_recipe, parse
from fedkseed.round import Report
from fedkseed.run.loop import Result
from fedkseed.run.progress import Silent
from fedkseed.run.store import Store
from fedkseed.strategies.averaging import AveragingState
from fedkseed.wire.codec import encode
from fedkseed.wire.records import Run, Upload

from ....commands import refused
from ..conftest import Notes
from ..network import wait_for

REPORT = Report(0, (0, 2), 344, 94, 876, float("nan"), 0, 1.5, staleness=(0, 0))
RESULT = Result(
    Evaluation([], [], []), Evaluation([1.0], [], [], sets={"unseen": Evaluation([2.5])}), [{"round": 0}], 5, None, 0.1,
    9, "ab", Path("/run/a"), 3, "stopped early",
    gains=[Gain("client 1", 12, {}, {}, {"loss": Estimate(-0.5, math.inf)})],
)  # fmt: skip

ANYWHERE = "0.0.0.0"  # noqa: S104 - nothing is bound


def test_the_nginx_example_is_what_a_server_writes(monkeypatch, request):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    folder = Path("/srv/fedkseed/run/flower")
    written = nginx_conf(folder, Path("/srv/fedkseed/keys"), ANYWHERE, 8443, 8000, 1 << 16)
    assert (request.config.rootpath / "deploy" / "nginx.conf").read_text() == written
    assert "listen [::]:8443 ssl;" in nginx_conf(folder, folder, "::", 8443, 8000, 1 << 16)


@pytest.mark.parametrize("exact", [4096, 100_000])
def test_the_largest_request_that_is_taken_holds_the_largest_upload_and_not_much_more(setting, exact):
    """K derivatives, or a scalar for each probe, in float32."""
    size, steps = 4096, exact // 2
    recipe = parse(loads(setting.text(steps=f"steps = {steps}\nprobes = 2", size=f"size = {size}")))
    upload = Upload(Run(Pool(1, size), bytes(32)), 0, 0, 10, 1.0, np.ones(exact, np.float32))
    data = len(encode(upload))
    assert data + 4000 < largest_request(recipe) < 3 * data + (1 << 16)
    weights = recipe.model_copy(update={"training": recipe.training.model_copy(update={"algorithm": "fedavg"})})
    assert largest_request(weights) > MAX_MESSAGE


def test_without_nginx_only_loopback_is_served(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "find_nginx", lambda: None)
    with pytest.raises(
        FedKSeedError, match=r"whoever reaches 0.0.0.0:8443 could start programs.*apt-get install nginx"
    ):
        ServerProcesses(tmp_path, tmp_path, ANYWHERE, 8443, 1 << 16, Silent())
    for loopback in ("127.0.0.1", "localhost", "::1"):
        assert ServerProcesses(tmp_path, tmp_path, loopback, 8443, 1 << 16, Silent()).inner == 8443


def test_a_server_without_certificates_starts_nothing(tmp_path):
    with (
        pytest.raises(FedKSeedError, match="make it with: fedkseed certs"),
        ServerProcesses(tmp_path, tmp_path, "127.0.0.1", 8443, 1 << 16, Silent()).running(),
    ):
        pytest.fail("something was started")


def test_nothing_of_flowers_goes_out_or_into_the_home_directory(tmp_path):
    env = environment(tmp_path, [tmp_path / "first"])
    assert env["FLWR_HOME"] == str(tmp_path)
    assert env["PATH"].startswith(f"{tmp_path}/first{os.pathsep}{Path(sys.executable).parent}")
    for name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
        assert env[name] == "0"
    for name in ("FLWR_DISABLE_UPDATE_CHECK", "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"):
        assert QUIET[name] == env[name] == "1"


def test_a_child_ends_with_all_that_it_started_and_its_log_is_told(tmp_path):
    script = "sleep 1000 & echo started $!; wait"
    child = Child("sleeper", ["/bin/sh", "-c", script], tmp_path / "log", environment(tmp_path))
    child.start()
    wait_until(lambda: "started" in child.last(), 30, child)
    sleeper = int(child.last().split()[-1])
    assert host._alive(sleeper)
    child.stop()
    assert not child.running
    wait_for(lambda: not host._alive(sleeper), 30, lambda: f"process {sleeper} lives on")
    ended = Child("ender", ["/bin/sh", "-c", "echo why; exit 3"], tmp_path / "log2", environment(tmp_path))
    ended.start()
    with pytest.raises(FedKSeedError, match=r"ender ended with code 3: .*why"):
        wait_until(lambda: False, 30, ended)


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells children of their parent's end on Linux")
def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    code = f"""
from pathlib import Path
from fedkseed.network.flower.children import Child
child = Child("sleeper", ["/bin/sleep", "1000"], Path({str(tmp_path / "log")!r}), {{"PATH": "/bin"}})
child.start()
print(child.process.pid, flush=True)
import time; time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not host._alive(pid), 30, lambda: f"process {pid} lives on")


def test_a_journal_tells_everything_to_whoever_follows_even_half_a_line_at_a_time(tmp_path):
    class Watching(Notes):
        def round_done(self, report):
            self.told.append(report)

    progress = Watching()
    follower = JournalReader(tmp_path, progress)
    assert follower.read() is None
    with Journal(tmp_path) as journal:
        journal.note("hello")
        journal.round_done(REPORT)
        assert follower.read() is None
        assert (follower.pid, follower.committed) == (os.getpid(), 1)
        assert progress.told[0] == "hello"
        assert repr(progress.told[1]) == repr(REPORT), "a report with its tuples and its NaN"
        journal._file.write('{"note": "in tw')
        journal._file.flush()
        assert follower.read() is None
        journal._file.write('o parts"}\n')
        journal._file.flush()
        assert follower.read() is None
        assert progress.told[2:] == ["in two parts"]
        journal.result(RESULT)
    found = follower.read()
    assert found is not None
    assert asdict(found) == asdict(RESULT)
    assert found.after.sets == {"unseen": Evaluation([2.5])}
    follower.close()


def test_what_ends_a_run_reaches_whoever_follows_and_what_flower_does_to_it_is_only_told(tmp_path):
    with pytest.raises(FedKSeedError), Journal(tmp_path):
        raise FedKSeedError("too few clients")
    follower = JournalReader(tmp_path, Silent())
    with pytest.raises(FedKSeedError, match="too few clients"):
        follower.read()
    follower.close()
    for error in (RuntimeError("an answer of 500"), KeyboardInterrupt(), SystemExit(0)):  # Flower's way to end it
        with pytest.raises(type(error)), Journal(tmp_path):
            raise error
        notes = Notes()
        follower = JournalReader(tmp_path, notes)
        assert follower.read() is None, "it is started again"
        follower.close()
        assert notes.has(f"the ServerApp ended with {type(error).__name__}")


@pytest.mark.parametrize("server", ["host", "host:", ":80", "host:70000", "host:x"])
def test_a_server_that_is_no_address_is_refused(tmp_path, server):
    with pytest.raises(FedKSeedError, match="a server is HOST:PORT"):
        Connection(server, tmp_path, tmp_path)


def test_a_key_that_others_can_read_or_that_is_not_there_is_refused(tmp_path):
    make(tmp_path, 1, ["localhost"], 2)
    ca, key = tmp_path / "ca.pem", tmp_path / "client-0"
    Connection("localhost:1", ca, key)
    with pytest.raises(FedKSeedError, match="`fedkseed certs request` makes a key"):
        Connection("localhost:1", ca, tmp_path / "client-7")
    key.chmod(0o644)
    with pytest.raises(FedKSeedError, match=f"others can read the key {key}; keep it to yourself: chmod 600"):
        Connection("localhost:1", ca, key)


SAID = {
    "Exit Code: 305": (70.0, "refused: the key is not registered"),
    "SSL/TLS handshake error detected.": (5.0, "the connection was lost"),
    "Run ID 7 is not in `RUNNING` status. Ignoring reply message 8.": (5.0, "the server has begun anew"),
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed": (70.0, "certificate is not for this host"),
    "Receiving: train message (ID: 0305305)": None,
}


@pytest.mark.parametrize("line", SAID)
def test_a_supernode_that_is_refused_or_stands_still_is_started_again_after_a_while(
    monkeypatch, tmp_path, data_file, line
):
    make(tmp_path, 1, ["localhost"], 2)
    client = Node(
        tmp_path / "c", Connection("localhost:1", tmp_path / "ca.pem", tmp_path / "client-0"), Owner(str(data_file)), 60
    )
    monkeypatch.setattr(node, "program", lambda name: str(tmp_path / name))
    monkeypatch.setattr(node, "superexec", lambda: [str(tmp_path / "flower-superexec")])
    (tmp_path / "flower-supernode").write_text(f"#!/bin/sh\necho '{line}'\nexec sleep 1000\n")
    (tmp_path / "flower-superexec").write_text("#!/bin/sh\nexec sleep 1000\n")
    for name in ("flower-supernode", "flower-superexec"):
        (tmp_path / name).chmod(0o700)
    said, slept = [], []

    class StopError(Exception):
        pass

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, 0.05))
        slept.append(seconds)
        if seconds > node.LOOK or len(slept) > 60:
            raise StopError

    with pytest.raises(StopError):
        client.serve(said.append, sleep)
    expected = SAID[line]
    if expected is None:
        assert set(slept) == {node.LOOK}, "it runs"
    else:
        assert slept[-1] == expected[0]
        assert expected[1] in said[2]
    nobody = "nothing answers at host localhost, port 1 (Connection refused): is the server running"
    assert said[1].startswith(nobody), "at once, and not when Flower gives up"


def test_an_address_that_answers_is_not_called_silent(tmp_path):
    make(tmp_path, 1, ["localhost"], 2)
    with create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert Connection(address, tmp_path / "ca.pem", tmp_path / "client-0").silent() is None
    there = Connection("no-such-host.invalid:1", tmp_path / "ca.pem", tmp_path / "client-0")
    assert "nothing answers at host no-such-host.invalid, port 1 (" in str(there.silent())


def test_a_server_refuses_at_once_what_a_network_can_not_follow(setting, tmp_path):
    make(tmp_path / "keys", 3, ["localhost"], 2)
    (tmp_path / "r.toml").write_text(setting.text())
    own = ("--certs", tmp_path / "keys", "--output", tmp_path / "run", "--port", free_port())
    line = refused("server", tmp_path / "r.toml", *own, "--set", "data.held_out=0.1")
    assert "held_out = 0.1 draws from the rows of all parties, which no party sees; name a category" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (400, "this machine's clock is 400 s ahead of the server's, and Flower takes 5 s ahead and 300 s behind"),
        (-400, "this machine's clock is 400 s behind the server's"),
        (0, None),
    ],
)
def test_a_refused_client_compares_its_clock_with_the_servers(tmp_path, data_file, ahead, said):
    make(tmp_path, 1, ["localhost"], 2)

    class Dated(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response_only(403)
            self.send_header("Date", formatdate(time.time() - ahead))
            self.end_headers()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with HTTPServer(("127.0.0.1", 0), Dated) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.handle_request, daemon=True).start()
        connection = Connection(f"localhost:{server.server_port}", tmp_path / "ca.pem", tmp_path / "client-0")
        told = Node(tmp_path / "c", connection, Owner(str(data_file)), 60).wrong_clock()
    # the date of an answer has whole seconds
    assert told is None if said is None else re.sub(r"\b(399|401) s", "400 s", str(told)).startswith(said)


def test_a_key_that_a_killed_server_had_registered_is_found_again(monkeypatch, tmp_path):
    """It was killed before it wrote down which node that is."""
    make(tmp_path / "keys", 2, ["localhost"], 2)
    served = ServerProcesses(tmp_path / "run", tmp_path / "keys", "127.0.0.1", 1, 1 << 16, Silent())
    nodes: dict[str, int] = {}

    def superlink(arguments, env, seconds=60.0):
        """As Flower answers."""
        if arguments[1] == "list":
            return {"nodes": [{"node-id": str(node)} for node in nodes.values()]}
        if arguments[2] in nodes:
            raise FedKSeedError("flwr supernode register failed: [code: 23] Public key already in use.")
        nodes[arguments[2]] = 7 + len(nodes)
        return {"node-id": str(nodes[arguments[2]])}

    monkeypatch.setattr(host, "flwr", superlink)
    (served.folder).mkdir(parents=True)
    keys = [tmp_path / "keys" / f"client-{number}.pub" for number in range(2)]
    nodes[str(keys[0])] = 5
    served._register()
    assert ClientNumbers(served.directory, None).clients_at([5, 8]) == {0: 5, 1: 8}
    served._nodes.unlink()
    with pytest.raises(FedKSeedError, match="already in use"):
        served._register()


def test_a_run_that_has_begun_keeps_its_clients_and_a_new_one_has_those_that_came_since(monkeypatch, tmp_path):
    make(tmp_path / "keys", 3, ["localhost"], 2)
    fresh = iter(range(7, 20))
    monkeypatch.setattr(host, "flwr", lambda arguments, env, seconds=60.0: {"node-id": str(next(fresh))})
    for name, expected in (("begun", {0: 7, 1: 8}), ("new", {0: 9, 1: 10, 2: 11})):
        notes = Notes()
        served = ServerProcesses(tmp_path / name, tmp_path / "keys", "127.0.0.1", 1, 1 << 16, notes)
        served.folder.mkdir(parents=True)
        if name == "begun":
            third = (tmp_path / "keys" / "client-2.pub").rename(tmp_path / "later")
            served._register()
            begin(served)
            third.rename(tmp_path / "keys" / "client-2.pub")
        assert not served._register()
        assert ClientNumbers(served.directory, None).clients_at(range(7, 20)) == expected
        assert notes.has("the run began with 2 clients") == (name == "begun")


@dataclass
class Nodes:
    """The SuperLink's nodes, as `flwr supernode` shows and changes them."""

    of: dict[str, int] = field(default_factory=dict)  # key -> node, for those that may connect
    gone: set[str] = field(default_factory=set)
    fresh: Iterator[int] = field(default_factory=lambda: count(7))

    def __call__(self, arguments, env, seconds=60.0):
        match arguments[:3]:
            case ["supernode", "list", _]:
                return {"nodes": []}
            case ["supernode", "unregister", node]:
                for key in [key for key, known in self.of.items() if known == int(node)]:
                    del self.of[key]
                    self.gone.add(key)
                    return {}
                raise FedKSeedError("flwr supernode unregister failed: Node ID not found for account.")
            case ["supernode", "register", path]:
                key = Path(path).read_text().strip()
                if key in self.of or key in self.gone:
                    raise FedKSeedError("flwr supernode register failed: Public key already in use.")
                self.of[key] = next(self.fresh)
                return {"node-id": str(self.of[key])}
        raise AssertionError(arguments)


def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients: int) -> tuple[ServerProcesses, Nodes, Notes]:
    """A server whose run has begun."""
    make(tmp_path / "keys", clients, ["localhost"], 2)
    nodes, notes = Nodes(), Notes()
    monkeypatch.setattr(host, "flwr", nodes)
    served = ServerProcesses(tmp_path / "run", tmp_path / "keys", "127.0.0.1", 1, 1 << 16, notes)
    served.folder.mkdir(parents=True)
    served._register()
    begin(served)
    return served, nodes, notes


def begin(served: ServerProcesses) -> None:
    """Write the state before the first round, as the ServerApp does."""
    with Store.create(served.directory, "") as store:
        store.commit(AveragingState(0, np.zeros(1, np.float32)), None)


def text_of(served: ServerProcesses, client: int) -> str:
    return (served.keys / f"client-{client}.pub").read_text().strip()


def replace_key(served: ServerProcesses, client: int) -> str:
    """Make another key for a client, as docs/deployment.md says; returns the old one."""
    old = text_of(served, client)
    for name in (f"client-{client}", f"client-{client}.pub"):
        (served.keys / name).unlink()
    make(served.keys, 3, [], 2)
    return old


def test_a_key_that_was_replaced_is_revoked_and_the_new_one_has_its_number(monkeypatch, tmp_path):
    served, nodes, notes = begun(tmp_path, monkeypatch, 3)
    before = ClientNumbers.nodes(served.directory)
    assert not served._new_keys()
    old = replace_key(served, 1)
    assert served._new_keys(), "the running server sees it"
    assert old not in nodes.of
    assert ClientNumbers.nodes(served.directory) == {**before, 1: nodes.of[text_of(served, 1)]}
    assert notes.has("revoking the key of client 1")
    assert not served._new_keys()
    again = ServerProcesses(served.directory, served.keys, "127.0.0.1", 1, 1 << 16, notes)
    assert not again._register(), "and one that is started again"
    (served.keys / "client-1.pub").write_text(old)
    with pytest.raises(FedKSeedError, match=r"client-1.pub was revoked, and can't come back; make another"):
        again._register()


def test_a_key_that_was_removed_is_revoked_and_nobody_waits_for_its_client(monkeypatch, tmp_path):
    served, nodes, _ = begun(tmp_path, monkeypatch, 3)
    old, before = text_of(served, 2), ClientNumbers.nodes(served.directory)
    (served.keys / "client-2.pub").unlink()
    assert not served._new_keys(), "the others have the keys that they had"
    assert old not in nodes.of
    assert ClientNumbers.nodes(served.directory) == before
    numbers = ClientNumbers(served.directory, None)
    assert (numbers.count, numbers.expected) == (3, {0, 1})


def test_a_server_that_is_killed_while_it_revokes_a_key_has_revoked_it_when_it_is_back(monkeypatch, tmp_path):
    served, nodes, _ = begun(tmp_path, monkeypatch, 3)
    replace_key(served, 0)
    known = served._nodes.read_bytes()
    served._register()
    served._nodes.write_bytes(known)  # it was killed before it wrote
    nodes.gone.discard(text_of(served, 0))
    del nodes.of[text_of(served, 0)]
    assert served._register()
    assert ClientNumbers.nodes(served.directory)[0] == nodes.of[text_of(served, 0)]


def test_a_running_server_survives_a_key_that_it_cannot_take_up(monkeypatch, tmp_path):
    served, nodes, notes = begun(tmp_path, monkeypatch, 3)
    old = text_of(served, 1)
    (served.keys / "client-1.pub").write_text(text_of(served, 2))
    assert not served._new_keys()
    assert notes.has("two clients of")
    assert nodes.of[old], "nothing has happened"
    (served.keys / "client-1.pub").write_text(old + "\n")
    assert not served._new_keys()
    assert sum("can't be taken up" in line for line in notes.told) == 1


def test_notices_of_the_superlink_are_shown_once_and_name_the_client(monkeypatch, tmp_path):
    served, nodes, notes = begun(tmp_path, monkeypatch, 2)
    notices = Notices(served._notices)
    served._show_notices()
    notices.refused(nodes.of[text_of(served, 1)])
    with served._notices.open("a") as file:
        file.write('{"node": 5, ')
    served._show_notices()
    with served._notices.open("a") as file:
        file.write('"text": "is strange"}\n')
    served._show_notices()
    served._show_notices()
    assert notes.told[2:] == [
        "client 1 wanted to connect while it is connected: it was killed and is back within a minute, or somebody else "
        "has its key",
        "node 5 is strange",
    ]


@pytest.mark.parametrize(
    ("free", "match"), [(0, "is full: make space and start.*500"), (1 << 20, "^Server error 500$")]
)
def test_whatever_fails_on_a_full_disk_is_told_as_that(monkeypatch, tmp_path, free, match):
    def failing(arguments, env, seconds=0.0):
        raise FedKSeedError("Server error 500")

    monkeypatch.setattr(host, "flwr", failing)
    monkeypatch.setattr(ServerProcesses, "_ready", lambda *_: None)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(FedKSeedError, match=match):
        ServerProcesses(tmp_path, tmp_path, "127.0.0.1", 1, 1 << 16, Silent()).run()


def test_a_clients_executor_that_was_killed_is_started_again(monkeypatch, tmp_path, data_file):
    make(tmp_path, 1, ["localhost"], 2)
    connection = Connection("localhost:1", tmp_path / "ca.pem", tmp_path / "client-0")
    monkeypatch.setattr(node, "program", lambda name: str(tmp_path / name))
    monkeypatch.setattr(node, "superexec", lambda: [str(tmp_path / "flower-superexec")])
    for name in ("flower-supernode", "flower-superexec"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/{name}.pids\nexec sleep 1000\n")
        (tmp_path / name).chmod(0o700)
    pids, said = tmp_path / "flower-superexec.pids", []

    class StopError(Exception):
        pass

    def sleep(seconds: float) -> None:
        time.sleep(0.05)
        started = pids.read_text().split() if pids.exists() else []
        if len(started) == 2:
            raise StopError
        if len(started) == 1 and host._alive(int(started[0])):
            os.kill(int(started[0]), signal.SIGKILL)

    with pytest.raises(StopError):
        Node(tmp_path / "c", connection, Owner(str(data_file)), 60).serve(said.append, sleep)
    assert said[-1] == "superexec was killed (signal 9); it is started again"
    wait_for(lambda: not any(host._alive(int(p)) for p in pids.read_text().split()), 30, lambda: "one lives on")


def test_no_program_of_flowers_runs_what_a_server_sends(tmp_path):
    """A run's type is the server's choice, and decides which program a client's executor starts."""
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND

    folder = node.write_programs(tmp_path / "bin")
    env = environment(tmp_path, [folder])
    assert len({*TASK_TYPE_TO_COMMAND.values()}) >= 6
    for name in TASK_TYPE_TO_COMMAND.values():
        assert shutil.which(name, path=env["PATH"]) == str(folder / name)
        if name == CLIENTAPP:
            assert "-m fedkseed.network.flower.client.executor" in (folder / name).read_text()
        else:
            done = subprocess.run([name, "--help"], env=env, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (1, "")
            assert f"{name} is refused" in done.stderr


@pytest.mark.parametrize("left", [b"", b"half of a sec"])
def test_a_secret_that_a_crash_has_cut_short_is_made_anew(tmp_path, left):
    """An empty one let no server and no client start again."""
    path = tmp_path / "superexec.secret"
    path.write_bytes(left)
    written = secret(path).read_bytes()
    assert len(written) >= SECRET
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret(path).read_bytes() == written, "a whole one is kept"
    assert [*tmp_path.iterdir()] == [path]


def test_the_token_of_a_task_is_not_in_the_table_of_processes_and_reaches_its_process_alone(tmp_path):
    """Every user of a machine can read the commands of all."""
    (tmp_path / "bin").mkdir()
    for number, kind in enumerate(("flwr-serverapp", "flwr-clientapp")):
        write_program(tmp_path / "bin", kind, "shows")
        (tmp_path / "shows.py").write_text(
            "import os, sys, time\n"
            "from pathlib import Path\n"
            "from fedkseed.network.flower.compat import take_token\n"
            "before = Path('/proc/self/cmdline').read_text() if Path('/proc/self').exists() else ''\n"
            "take_token()\n"
            f"Path({str(tmp_path)!r}, 'seen').write_text(repr((before, sys.argv[1:], dict(os.environ))))\n"
        )
        code = f"""
from fedkseed.network.flower.compat import hide_tokens
hide_tokens()
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec
kind = (TaskType.SERVER_APP, TaskType.CLIENT_APP)[{number}]
SubprocessExecutor().launch(ExecutionSpec(
    task_id=1, task_type=kind, runtime_api_address="127.0.0.1:1", token="a-token-of-a-task", insecure=True,
    root_certificates_path=None, parent_pid=None, runtime_dependency_install=False, suppress_output=False,
))
import os; os.wait()
"""
        env = environment(tmp_path / "home", [tmp_path / "bin"])
        paths = [str(tmp_path), *filter(None, [env.get("PYTHONPATH")])]
        subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONPATH": os.pathsep.join(paths)}, check=True)
        command, arguments, variables = literal_eval((tmp_path / "seen").read_text())
        assert "a-token-of-a-task" not in command
        assert arguments[arguments.index("--token") + 1] == "a-token-of-a-task", "Flower finds it where it looks"
        assert "a-token-of-a-task" not in variables.values(), "no process that it starts has it"


def test_a_clients_executor_runs_our_app_and_never_the_servers(monkeypatch):
    from importlib import import_module

    from fedkseed.network.flower import compat
    from fedkseed.network.flower.client import app as client_app
    from fedkseed.network.flower.client import executor

    theirs = import_module(compat.INSTALLS)
    ran = []

    def command() -> None:
        ran.append(theirs.get_load_client_app_fn()("an id", "a version", "a hash"))

    monkeypatch.setattr(theirs, compat.INSTALL, theirs.install_from_fab)  # both are put back after the test
    monkeypatch.setattr(theirs, compat.LOAD, theirs.get_load_client_app_fn)
    monkeypatch.setattr(import_module("flwr.supernode.cli"), "flwr_clientapp", command)
    executor.main()
    assert ran == [client_app.app]
    assert theirs.install_from_fab(b"whatever", skip_prompt=True) is None
    monkeypatch.setattr(compat, "import_module", lambda name: SimpleNamespace(install_from_fab=print))
    with pytest.raises(SystemExit, match="was not tested, nothing is run"):
        executor.main()
    assert len(ran) == 1


def test_of_a_run_that_has_begun_only_how_long_is_waited_for_whom_may_change(monkeypatch, setting, tmp_path):
    class Gone(ServerProcesses):
        @contextmanager
        def running(self):
            yield

        def run(self):
            raise FedKSeedError("no processes here")

    monkeypatch.setattr(host, "Host", Gone)
    monkeypatch.setattr(commands, "prepare", lambda: None)
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    for text, match, minimum in (
        (setting.text("minimum = 3"), "no processes here", 3),
        (setting.text("minimum = 2"), "no processes here", 2),
        (setting.text("minimum = 1", rounds="rounds = 7"), r"only \[network\] and \[report\] may change", 2),
    ):
        recipe.write_text(text)
        with pytest.raises(FedKSeedError, match=match):
            commands.server(recipe, certs=tmp_path, output=run, host="127.0.0.1", port=1)
        assert load_recipe(run / "recipe.toml").network.minimum == minimum
