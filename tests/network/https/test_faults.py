"""What can go wrong, with the real processes on loopback. Minutes; `make test-faults`.

Each ends with the digest of a run that nothing happened to, or with the rounds that the others have done.
"""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tomllib import loads

import pytest
import torch
from safetensors.numpy import load
from transformers import AutoModelForCausalLM

import fedkseed
from fedkseed import start
from fedkseed.local.kept_steps import SEAL
from fedkseed.network.protocol.client.worker import STEPS as KEPT
from fedkseed.recipe.reading import parse
from fedkseed.run.store import Store

from ..ports import find_nginx, wait_for
from .network import Network, kill, network, processes
from .scaled import TIMES

pytestmark = pytest.mark.network

LONG = {"steps": "steps = 150", "rounds": "rounds = 2"}  # seconds of local steps, so that something can happen in them
LATER = 300.0  # seconds for what Flower notices by itself: its heartbeats take 60


@pytest.fixture(scope="module")
def slowly(setting, tmp_path_factory) -> str:
    """The digest of `LONG` when nothing happens."""
    return start(parse(loads(setting.text(**LONG))), tmp_path_factory.mktemp("slowly") / "run").digest


def at_work(federation: Network, number: int) -> bool:
    """Is a message with this client?"""
    log = federation.folder / f"client-{number}.log"
    lines = re.findall(r"^round \d+: (\w+)|^(connecting)", log.read_text(), re.MULTILINE) if log.exists() else []
    return bool(lines) and lines[-1][0] == "training"


def computed(federation: Network, number: int) -> float:
    """Processor seconds of a client's worker."""
    (worker,) = processes("fedkseed.network.protocol.client.worker", federation.state(number))
    ticks = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[11])  # utime
    return ticks / os.sysconf("SC_CLK_TCK")


def who(federation: Network) -> list[list[int]]:
    """The clients of each finished round."""
    return [report["clients"] for report in Store(federation.run).reports()]


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_client_killed_around_its_local_steps_and_started_again_does_not_show(setting, slowly, tmp_path, when):
    """As by a power cut: its worker is killed, too."""
    with network(tmp_path, setting.text("minimum = 3", **LONG), setting.files, setting.model) as federation:
        server, clients = federation.everybody()
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
        federation.client(2)
        assert server.wait(LATER) == 0
        print(f"the run ended {time.monotonic() - killed:.0f} s after the client")
        assert federation.digest() == slowly


def test_a_client_killed_for_good_is_left_out_and_the_others_complete_the_rounds(setting, tmp_path):
    with network(tmp_path, setting.text("minimum = 2", **LONG), setting.files, setting.model) as federation:
        server, clients = federation.everybody()
        wait_for(lambda: at_work(federation, 2), LATER, federation.everything)
        federation.cut_power(clients[2], 2)
        assert server.wait(LATER) == 0
        assert who(federation) == [[0, 1], [0, 1]]
        assert "round 1 goes on without client 2" in server.output


def test_a_client_past_the_deadline_is_left_out_and_takes_part_again(setting, tmp_path):
    """Its worker stands still for a while, as on a machine that swaps."""
    recipe = setting.text("minimum = 2\ndeadline = 45.0", rounds="rounds = 60")  # a tenth of a second each
    with network(tmp_path, recipe, setting.files, setting.model) as federation:
        server, _ = federation.everybody()
        wait_for(lambda: federation.done >= 1, LATER, federation.everything)
        (stopped,) = processes("fedkseed.network.protocol.client.worker", federation.state(2))
        kill([stopped], signal.SIGSTOP)
        server.wait_for("goes on without client 2")
        kill([stopped], signal.SIGCONT)
        assert server.wait(LATER) == 0
        given_up = "given up, the server has gone on" in federation.programs[3].output  # over HTTPS it asks every 15 s
        assert given_up or "is too late" in server.output
        assert [0, 1] in who(federation)
        assert who(federation)[-1] == [0, 1, 2]


def test_clients_with_another_model_type_or_version_are_refused_and_the_others_complete_the_rounds(
    setting, tmp_path, monkeypatch
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
    with network(tmp_path, recipe, files, setting.model) as federation:
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
            assert f"round 1: client {number} (client-{number}) refuses: model" in server.output
            log = (federation.state(number) / "worker.log").read_text()
            assert "the message is for a base model with digest" in log
        # The task is read before a worker is started.
        assert "speaks version 3 of tasks, this one 9; install one release" in federation.programs[5].output


MARKS = {None: 1, "clients connect to port": 1, "all 3 clients are connected": 3, "local loss": 5}  # and how often


def test_a_server_killed_at_ten_random_moments_goes_on_with_the_same_digest(setting, tmp_path):
    """Of its start, of the time until clients are back, and of the rounds: the last mark is that of a finished one."""
    rounds = 400  # a tenth of a second each
    recipe, moments = setting.text("minimum = 3", rounds=f"rounds = {rounds}"), random.Random(6)
    alone = start(parse(loads(recipe)), tmp_path / "alone").digest
    with network(tmp_path, recipe, setting.files, setting.model, limit=1800) as federation:
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


@ROOT
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
@pytest.mark.skipif(find_nginx() is None, reason="needs nginx: the server serves another address than loopback")
def test_a_network_cut_for_a_minute_does_not_show(setting, slowly, tmp_path):
    text = setting.text("minimum = 3", **LONG)
    with (
        two_machines() as (here, there, cable),
        network(tmp_path, text, setting.files, setting.model, ["10.77.0.1"]) as federation,
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


@ROOT
def test_a_full_disk_stops_the_server_with_a_text_and_it_goes_on_when_there_is_space(setting, undisturbed, tmp_path):
    (tmp_path / "disk").mkdir()
    system("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", tmp_path / "disk")
    try:
        with network(tmp_path, setting.text("minimum = 3"), setting.files, setting.model) as federation:
            federation.run = tmp_path / "disk" / "run"
            server, _ = federation.everybody()
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


class Relay:
    """A port of this machine that passes bytes on to a server, until it is cut.

    Then nothing passes, not even the end of a connection; when it is mended, connections of before stay dead.
    """

    def __init__(self, to: int) -> None:
        self._to, self._age, self._taken = to, 0, list[socket.socket]()  # an odd age: it is cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_or_mend(self) -> None:
        self._age += 1

    def _accept(self) -> None:
        while True:
            taken, age = self._listener.accept()[0], self._age
            self._taken.append(taken)  # else it would be closed
            if age % 2 == 0:
                try:
                    other = socket.create_connection(("127.0.0.1", self._to), 10)
                except OSError:  # the server is down
                    taken.close()
                    continue
                other.settimeout(None)
                self._taken.append(other)
                for pair in ((taken, other), (other, taken)):
                    threading.Thread(target=self._pass_on, args=(*pair, age), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, age: int) -> None:
        with suppress(OSError):
            while (data := one.recv(1 << 16)) and age == self._age:
                other.sendall(data)
        for end in (one, other) if age == self._age else ():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def steps_kept(federation: Network, number: int) -> int:
    """The steps of a client's round that its kill would not lose."""
    with suppress(FileNotFoundError):
        return load((federation.state(number) / KEPT).read_bytes()[SEAL:])["scalars"].size
    return 0


@contextmanager
def watched(federation: Network) -> Iterator[dict[int, list[int]]]:
    """By client, all the numbers of kept steps that were seen."""
    seen, over = defaultdict[int, list[int]](lambda: [0]), threading.Event()

    def watch() -> None:
        while not over.wait(0.03):
            for number in range(3):
                if (count := steps_kept(federation, number)) != seen[number][-1]:
                    seen[number].append(count)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_a_drill_of_a_kill_a_cut_of_six_minutes_and_a_dead_server_within_a_round_loses_no_step(
    setting, slowly, tmp_path
):
    """Client 2 is killed and started again, client 1 has no network for six minutes, then the server is killed.

    All times for lost connections, and the recipe's deadline of 600 s, are a twelfth: half a minute is six. Steps that
    were kept are never taken again, so that a kill loses the step at most that had not ended.
    """
    steps, scaled = 150, (sys.executable, "-m", "tests.network.https.scaled")
    text = setting.text(f"minimum = 3\ndeadline = {600 / TIMES}\nattempts = 20", **LONG)
    with network(tmp_path, text, setting.files, setting.model) as federation, watched(federation) as seen:
        relay = Relay(federation.port)
        server = federation.server(within=scaled)
        clients = [
            federation.client(number, within=scaled, port=relay.port if number == 1 else 0) for number in range(3)
        ]
        wait_for(lambda: federation.done >= 1, LATER, federation.everything)
        wait_for(lambda: 0 < steps_kept(federation, 2) < steps / 2, LATER, federation.everything)
        federation.cut_power(clients[2], 2)
        relay.cut_or_mend()
        assert 0 < steps_kept(federation, 2) < steps
        federation.client(2, within=scaled)
        time.sleep(360 / TIMES)
        assert federation.done == 1, "the answer of client 1 can't have come"
        assert re.search(r"^not connected: clients? .*\b1 \(client-1\)", server.output, re.MULTILINE)
        relay.cut_or_mend()
        server.kill()
        assert federation.server(within=scaled).wait(LATER) == 0
        assert who(federation) == [[0, 1, 2]] * 2
        assert federation.digest() == slowly
    for number, counts in seen.items():
        assert [before for before, after in pairwise(counts) if after < before] == [steps], f"client {number}: {counts}"
