"""What can go wrong, with the real processes on loopback, nginx and Flower's own. Minutes; `make test-faults`.

Each ends with the digest of a run that nothing happened to, or with the rounds that the others have done.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tomllib import loads

import pytest
import torch
from transformers import AutoModelForCausalLM

import fedkseed
from fedkseed import start
from fedkseed.network.flower.server.processes import find_nginx
from fedkseed.network.protocol.carrier import TRANSPORTS
from fedkseed.recipe.reading import parse
from fedkseed.run.store import Store

from .network import Network, kill, network, processes, wait_for

pytestmark = pytest.mark.network

BOTH = pytest.mark.parametrize("transport", TRANSPORTS)
LONG = {"steps": "steps = 150", "rounds": "rounds = 2"}  # seconds of local steps, so that something can happen in them
LATER = 300.0  # seconds for what Flower notices by itself: its heartbeats take 60


@pytest.fixture(scope="module")
def slowly(setting, tmp_path_factory) -> str:
    """The digest of `LONG` when nothing happens."""
    return start(parse(loads(setting.text(**LONG))), tmp_path_factory.mktemp("slowly") / "run").digest


def at_work(federation: Network, number: int) -> bool:
    """Is a message with this client?"""
    if federation.transport == "https":
        log = federation.folder / f"client-{number}.log"
        lines = re.findall(r"^round \d+: (\w+)|^(connecting)", log.read_text(), re.MULTILINE) if log.exists() else []
        return bool(lines) and lines[-1][0] == "training"
    return bool(processes("fedkseed.network.flower.client.executor", federation.state(number)))


def computed(federation: Network, number: int) -> float:
    """Processor seconds of a client's worker."""
    (worker,) = processes("fedkseed.network.protocol.client.worker", federation.state(number))
    ticks = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[11])  # utime
    return ticks / os.sysconf("SC_CLK_TCK")


def who(federation: Network) -> list[list[int]]:
    """The clients of each finished round."""
    return [report["clients"] for report in Store(federation.run).reports()]


@BOTH
@pytest.mark.parametrize(("when", "back"), [("before", "at once"), ("during", "when missed"), ("after", "at once")])
def test_a_client_killed_around_its_local_steps_and_started_again_does_not_show(
    setting, slowly, tmp_path, when, back, transport
):
    """As by a power cut: its supernode and its worker, too. Flower refuses a new one while the old one still counts."""
    text = setting.text("minimum = 3", **LONG)
    with network(tmp_path, text, setting.files, setting.model, transport=transport) as federation:
        server = federation.server()
        clients = [federation.client(number) for number in range(3)]
        wait_for(lambda: federation.done >= 1, LATER, federation.everything)
        wait_for(lambda: at_work(federation, 2), LATER, federation.everything)
        begun = computed(federation, 2)
        if when == "during":
            wait_for(lambda: computed(federation, 2) > begun + 0.2, LATER, federation.everything)
            assert at_work(federation, 2)
        if when == "after":
            wait_for(lambda: not at_work(federation, 2), LATER, federation.everything)
        federation.cut_power(clients[2], 2)
        killed = time.monotonic()
        if back == "when missed" and transport == "flower":
            server.wait_for("client 2 did not answer: it is gone")
            print(f"missed after {time.monotonic() - killed:.0f} s")
        again = federation.client(2)
        assert server.wait(LATER) == 0
        print(f"the run ended {time.monotonic() - killed:.0f} s after the client")
        assert federation.digest() == slowly
        if when == "before" and transport == "flower":
            assert "its last connection not over yet" in again.output


@BOTH
def test_a_client_killed_for_good_is_left_out_and_the_others_complete_the_rounds(setting, tmp_path, transport):
    text = setting.text("minimum = 2", **LONG)
    with network(tmp_path, text, setting.files, setting.model, transport=transport) as federation:
        server = federation.server()
        clients = [federation.client(number) for number in range(3)]
        wait_for(lambda: at_work(federation, 2), LATER, federation.everything)
        federation.cut_power(clients[2], 2)
        assert server.wait(LATER) == 0
        assert who(federation) == [[0, 1], [0, 1]]
        if transport == "flower":
            assert "client 2 did not answer: it is gone" in server.output
        assert "round 1 goes on without client 2" in server.output


@BOTH
def test_a_client_past_the_deadline_is_left_out_and_takes_part_again(setting, tmp_path, transport):
    """Its worker stands still for a while, as on a machine that swaps."""
    rounds = 60 if transport == "https" else 6  # its rounds take a tenth of a second
    recipe = setting.text("minimum = 2\ndeadline = 45.0", rounds=f"rounds = {rounds}")
    with network(tmp_path, recipe, setting.files, setting.model, transport=transport) as federation:
        server = federation.server()
        for number in range(3):
            federation.client(number)
        wait_for(lambda: federation.done >= 1, LATER, federation.everything)
        (stopped,) = processes("fedkseed.network.protocol.client.worker", federation.state(2))
        kill([stopped], signal.SIGSTOP)
        server.wait_for("goes on without client 2")
        kill([stopped], signal.SIGCONT)
        assert server.wait(LATER) == 0
        given_up = "given up, the server has gone on" in federation.programs[3].output  # over HTTPS it asks every 15 s
        assert given_up or "is too late; it is left out" in server.output
        assert [0, 1] in who(federation)
        assert who(federation)[-1] == [0, 1, 2]


@BOTH
def test_clients_with_another_model_type_or_version_are_refused_and_the_others_complete_the_rounds(
    setting, tmp_path, monkeypatch, transport
):
    for name, change in (("other", lambda model: model), ("half", lambda model: model.to(torch.bfloat16))):
        shutil.copytree(setting.model, tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(setting.model)
        if name == "other":
            model.model.norm.weight.data[0] += 1
        change(model).save_pretrained(tmp_path / name)
    shutil.copytree(Path(fedkseed.__file__).parent, tmp_path / "release" / "fedkseed")
    for name in ("wire/codec.py", "network/protocol/envelope.py"):
        path = tmp_path / "release" / "fedkseed" / name
        text = path.read_text()
        path.write_text(re.sub(r"^((?:MAGIC, )?VERSION = (?:b.*, )?)\d+", r"\g<1>9", text, flags=re.MULTILINE))
        assert path.read_text() != text
    files = [setting.files[number] for number in (0, 1, 2, 2, 2)]
    recipe = setting.text("minimum = 2", cohort="cohort = 5", rounds="rounds = 2")
    with network(tmp_path, recipe, files, setting.model, transport=transport) as federation:
        server = federation.server()
        federation.client(0)
        federation.client(1)
        federation.client(2, "--model", tmp_path / "other")
        federation.client(3, "--model", tmp_path / "half")
        with monkeypatch.context() as changed:
            changed.setenv("PYTHONPATH", str(tmp_path / "release"))
            federation.client(4)
        assert server.wait(LATER) == 0
        assert who(federation) == [[0, 1], [0, 1]]
        for number in (2, 3):
            assert f"round 1: client {number} refuses: model" in server.output
            log = (federation.state(number) / "worker.log").read_text()
            assert "the message is for a base model with digest" in log
        if transport == "https":  # the task is read before a worker is started
            assert "speaks version 2 of tasks, this one 9; install one release" in federation.programs[5].output
            return
        assert "round 1: client 4 refuses: release" in server.output
        log = (federation.state(4) / "worker.log").read_text()
        assert "speaks version 2 of tasks, this one 9; install one release" in log


MARKS = {None: 1, "clients connect to port": 1, "all 3 clients are connected": 3, "local loss": 5}  # and how often


@BOTH
def test_a_server_killed_at_ten_random_moments_goes_on_with_the_same_digest(setting, tmp_path, transport):
    """Of its start, of the time until clients are back, and of the rounds: the last mark is that of a finished one."""
    rounds = 400 if transport == "https" else 30  # a round takes a tenth of a second there
    recipe, moments = setting.text("minimum = 3", rounds=f"rounds = {rounds}"), random.Random(6)
    alone = start(parse(loads(recipe)), tmp_path / "alone").digest
    with network(tmp_path, recipe, setting.files, setting.model, limit=1800, transport=transport) as federation:
        for number in range(3):
            federation.client(number)
        for mark in moments.sample([*MARKS], 10, counts=MARKS.values()):
            server = federation.server()
            if mark:
                server.wait_for(mark)
            seconds = moments.uniform(0, 6)
            time.sleep(seconds)
            assert server.process.poll() is None, server.output
            server.kill()
            print(f"killed {seconds:.1f} s after {mark or 'its start'}, {federation.done} rounds are done")
        assert 5 <= federation.done < rounds
        assert federation.server().wait(3 * LATER) == 0
        assert federation.done == rounds
        assert federation.digest() == alone


def system(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, timeout=30)


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str], str]]:
    """Two network namespaces and a cable: what runs a command in each, and the interface of the first's end."""
    names = [f"fks{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            system("ip", "netns", "add", name)
            system("ip", "-n", name, "link", "set", "lo", "up")
        system(
            "ip", "link", "add", "fks0", "netns", names[0], "type", "veth", "peer", "name", "fks1", "netns", names[1]
        )
        for end, name in enumerate(names):
            system("ip", "-n", name, "address", "add", f"10.77.0.{end + 1}/24", "dev", f"fks{end}")
            system("ip", "-n", name, "link", "set", f"fks{end}", "up")
        yield (*(["ip", "netns", "exec", name] for name in names), names[0])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=30)


@BOTH
@ROOT
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
@pytest.mark.skipif(find_nginx() is None, reason="needs nginx: the server serves another address than loopback")
def test_a_network_cut_for_a_minute_does_not_show(setting, slowly, tmp_path, transport):
    with (
        two_machines() as (here, there, cable),
        network(
            tmp_path,
            setting.text("minimum = 3", **LONG),
            setting.files,
            setting.model,
            ["10.77.0.1"],
            transport=transport,
        ) as federation,
    ):
        server = federation.server("--host", "10.77.0.1", within=here)
        for number in range(3):
            federation.client(number, within=there if number == 2 else here, host="10.77.0.1")
        wait_for(lambda: federation.done >= 1, LATER, federation.everything)
        wait_for(lambda: at_work(federation, 2), LATER, federation.everything)
        system("ip", "-n", cable, "link", "set", "fks0", "down")
        time.sleep(60)
        assert federation.done == 1, "the client's answer can't have come"
        system("ip", "-n", cable, "link", "set", "fks0", "up")
        begin = time.monotonic()
        assert server.wait(LATER) == 0
        print(f"the run ended {time.monotonic() - begin:.0f} s after the cut")
        assert federation.digest() == slowly


@BOTH
@ROOT
def test_a_full_disk_stops_the_server_with_a_text_and_it_goes_on_when_there_is_space(
    setting, undisturbed, tmp_path, transport
):
    (tmp_path / "disk").mkdir()
    system("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", tmp_path / "disk")
    try:
        text = setting.text("minimum = 3")
        with network(tmp_path, text, setting.files, setting.model, transport=transport) as federation:
            federation.run = tmp_path / "disk" / "run"
            server = federation.server()
            for number in range(3):
                federation.client(number)
            wait_for(lambda: federation.done >= 1, LATER, federation.everything)
            with suppress(OSError), (tmp_path / "disk" / "ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(4096))
            assert server.wait(LATER) == 2
            assert re.search(r"the disk of .* is full: make space and start the server again", server.output)
            assert 1 <= federation.done < 3
            (tmp_path / "disk" / "ballast").unlink()
            assert federation.server().wait(LATER) == 0
            assert federation.digest() == undisturbed.digest
    finally:
        system("umount", "--lazy", tmp_path / "disk")


SENDING = """
import sys

if sys.orig_argv[1:] and sys.orig_argv[1].endswith("flower-supernode"):
    from contextlib import contextmanager

    import flwr.supernode.fleet_http_connection as theirs

    connect, sent, tricked = theirs.http_request_response, [], []

    @contextmanager
    def connection(*arguments, **options):
        with connect(*arguments, **options) as (node, receive, send, *rest):

            def sending(*message):
                now = message[0].metadata.group_id == "2" and not tricked  # the first reply of round 2
                tricked.extend([message] * now)
                sent.append(message)
                TRICK

            yield (node, receive, sending, *rest)

    theirs.http_request_response = connection
"""
TRICKS = {
    "lost": 'return (set(), "") if now else send(*message)',  # as if it had been taken
    "half": 'taken = send(*message); return (set(), "") if now else taken',  # its parts never come
    "twice": "now and send(*sent[0]); return send(*message)",
}
OLD = """
import sys

if "fedkseed.network.protocol.client.worker" in sys.orig_argv:
    import fedkseed.round as theirs

    answer, given = theirs.answer, []

    def again(*arguments):
        given.append(answer(*arguments))
        return given[0]

    theirs.answer = again
"""


@pytest.mark.parametrize("name", [*TRICKS, "old"])
def test_a_reply_that_is_lost_or_half_or_comes_twice_does_not_show_and_an_old_one_is_left_out(
    setting, undisturbed, tmp_path, monkeypatch, name
):
    """Client 2 is this fedkseed and this Flower, but for how it sends its replies, or what it answers."""
    (tmp_path / "trick").mkdir()
    text = OLD if name == "old" else SENDING.replace("TRICK", TRICKS[name])
    (tmp_path / "trick" / "sitecustomize.py").write_text(text)
    recipe = setting.text(f"minimum = {2 if name == 'old' else 3}\ndeadline = 60.0")
    with network(tmp_path, recipe, setting.files, setting.model) as federation:
        server = federation.server()
        for number in range(2):
            federation.client(number)
        with monkeypatch.context() as changed:
            changed.setenv("PYTHONPATH", str(tmp_path / "trick"), prepend=os.pathsep)
            federation.client(2)
        assert server.wait(LATER) == 0
        if name == "old":
            assert who(federation) == [[0, 1, 2], [0, 1], [0, 1]]
            assert (
                "round 2: the answer of client 2 is left out: client 2 was sent round 1 and answered" in server.output
            )
        else:
            assert federation.digest() == undisturbed.digest
            assert ("round 2: client 2 is silent; it is asked again" in server.output) == (name in ("lost", "half"))
            log = (federation.run / "flower" / "superlink.log").read_text()
            assert ("Failed to store Message reply" in log) == (name == "twice")


CLOCK = """
import datetime, time

shift, real = {shift}, time.time


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=shift)


time.time, datetime.datetime = lambda: real() + shift, Shifted
"""


@pytest.mark.parametrize(("shift", "said"), [(-600, "s behind the server's"), (60, "s ahead of the server's")])
def test_a_client_whose_clock_is_wrong_is_told_so_and_takes_part_once_it_is_right(
    setting, undisturbed, tmp_path, monkeypatch, shift, said
):
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK.format(shift=shift))
    with network(tmp_path, setting.text("minimum = 3"), setting.files, setting.model) as federation:
        server = federation.server()
        server.wait_for("clients connect to port")
        with monkeypatch.context() as changed:
            changed.setenv("PYTHONPATH", str(tmp_path / "clock"), prepend=os.pathsep)
            wrong = federation.client(2)
        for number in range(2):
            federation.client(number)
        wrong.wait_for(said)
        assert federation.done == 0
        wrong.stop()
        federation.client(2)
        assert server.wait(LATER) == 0
        assert federation.digest() == undisturbed.digest
