"""Ctrl-C and SIGTERM, which end a command at whatever moment they come."""

import fcntl
import json
import signal
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedkseed.errors import INTERRUPTED

from ..conftest import recipe_text
from ..network.peers.network import Peers

NOISE = ("Traceback", "Exception", "Error", "terminate called")
COMMAND = """
import ctypes, gc, os, sys, threading, time, types, weakref
import fedkseed.__main__ as entry

class Ends:
    def __del__(self):
        time.sleep(60)

class Referred: ...

callback = ctypes.CFUNCTYPE(None)(lambda: time.sleep(60))

def command():
    try:
        print("begun", flush=True)
        {body}
        while True:
            time.sleep(1)
    finally:
        {finish}
        print("cleaned up", flush=True)

sys.modules["fedkseed.cli"] = types.SimpleNamespace(main=command)
entry.main()
"""


def wait_for_full_pipe(pipe: Any) -> None:
    """Wait until a pipe takes no more: whoever writes to it waits then."""
    held, size = -1, array("i", [0])
    while not 0 < size[0] == held:
        held = size[0]
        time.sleep(0.05)
        fcntl.ioctl(pipe, termios.FIONREAD, size)


class Stopped:
    """A command of these lines in a process of its own, which gets signals once it has begun."""

    def __init__(self, body: str, finish: str = "pass", **options: Any) -> None:
        command = [sys.executable, "-c", COMMAND.format(body=body, finish=finish)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, bufsize=0, **options)
        self.expect("begun")

    def expect(self, line: str) -> None:
        assert self.process.stdout.readline().decode() == f"{line}\n"

    def outcome(self) -> tuple[int, str, str]:
        try:
            printed, said = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, printed.decode(), said.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "Ends()",  # an exception in a `__del__` or a callback is printed, and the program goes on
        "callback()",
        "one = Referred(); reference = weakref.ref(one, lambda _: time.sleep(60)); del one",
        "gc.callbacks.append(lambda *_: gc.callbacks.clear() or time.sleep(60)); gc.collect()",
        "threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
    ],
    ids=["waiting", "finaliser", "callback of C", "weak reference", "collection", "thread"],
)
def test_one_signal_ends_a_command_even_where_its_exception_is_swallowed(body, number):
    command = Stopped(body)
    command.process.send_signal(number)
    assert command.outcome() == (INTERRUPTED, "cleaned up\n", "fedkseed: stopped\n")


def test_ctrl_c_ends_a_command_that_a_shell_has_started_without_it():
    """As `command &` in a script does: a shell has its background ignore SIGINT."""
    command = Stopped("pass", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    command.process.send_signal(signal.SIGINT)
    assert command.outcome() == (INTERRUPTED, "cleaned up\n", "fedkseed: stopped\n")


def test_signals_that_come_together_are_one_and_let_a_command_clean_up():
    command = Stopped("pass", finish='print("cleaning", flush=True); time.sleep(0.3)')
    command.process.send_signal(signal.SIGINT)
    command.expect("cleaning")
    command.process.send_signal(signal.SIGINT)
    command.process.send_signal(signal.SIGTERM)
    assert command.outcome() == (INTERRUPTED, "cleaned up\n", "fedkseed: stopped\n")


def test_a_later_signal_ends_a_command_whose_cleaning_up_hangs():
    command = Stopped("pass", finish="time.sleep(entry.TOGETHER + 0.1); print('late', flush=True); time.sleep(60)")
    command.process.send_signal(signal.SIGINT)
    command.expect("late")
    command.process.send_signal(signal.SIGINT)
    assert command.outcome() == (INTERRUPTED, "", "")


@pytest.mark.parametrize(
    "body",
    ["sys.stdout.write(' ' * (1 << 20))", "threading.Thread(target=threading.Event().wait).start()"],
    ids=["a full pipe that nobody reads", "a thread that never ends"],
)
def test_what_the_end_of_a_stopped_command_waits_for_is_not_waited_for_without_end(body):
    command = Stopped(f"entry.ENDS = 0.3; {body}", finish="sys.exit(130)")
    if "write" in body:  # Python sees a signal that comes just before the write once that has ended
        wait_for_full_pipe(command.process.stdout)
    command.process.send_signal(signal.SIGINT)
    try:
        assert command.process.wait(60) == INTERRUPTED
    finally:
        command.outcome()


def test_an_error_of_the_program_is_shown_and_code_1():
    command = Stopped("raise ValueError('wrong')")
    code, printed, said = command.outcome()
    assert (code, printed) == (1, "cleaned up\n")
    assert said.endswith("ValueError: wrong\n")


def stopped_at_drawn_moments(
    folder: Path, count: int, seconds: float, modules: Sequence[str], *command: object
) -> None:
    """Stop a command `count` times, see tests/stops.py: it ends with the code of Ctrl-C and in silence."""
    folder.mkdir()
    arguments = [folder, 0, count, seconds, ",".join(modules), *command]
    done = subprocess.run(
        [sys.executable, "-m", "tests.stops", *map(str, arguments)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(ends)) == (0, count), done.stderr
    for end in ends:
        # Python gives up its handlers in the last moments of its end: a second signal kills it there.
        codes = {INTERRUPTED} if len(end["sent"]) == 1 else {INTERRUPTED, -signal.SIGINT, -signal.SIGTERM}
        assert end["code"] in codes, end
        assert not [word for word in NOISE if word in end["printed"]], end["printed"]


def test_a_server_ends_at_any_moment(tmp_path):
    modules = ["fedkseed.report.watch_page", "fedkseed.network.http_server"]
    command = ["watch", tmp_path / "run", "--serve", "0"]
    stopped_at_drawn_moments(tmp_path / "logs", 8, 0.3, modules, *command)


@pytest.mark.slow(seconds=95, guards="a lost signal, or a process that aborts, amid kernels and models")
@pytest.mark.parametrize("name", ["serve-model", "run", "serve", "peer"])
def test_commands_with_a_model_end_at_any_moment(finished, model_folder, data_file, tmp_path, name):
    peers = Peers(tmp_path / "peers", model_folder, 2, 600)
    peers.begin(60)
    (tmp_path / "recipe.toml").write_text(recipe_text(model_folder, data_file, rounds="rounds = 100"))
    recipe, keys = peers.folder / "recipe.toml", peers.keys
    modules, command = {
        "serve-model": (["tuned.endpoint", "tuned.load"], [finished, "--port", "0"]),
        "run": (["run.simulation", "run.start_and_resume"], [tmp_path / "recipe.toml", "--output", "@NEW@"]),
        "serve": (["network.https.server"], [recipe, "--certs", keys, "--port", "@PORT@", "--output", "@NEW@"]),
        "peer": (["network.peers.peer"], [*peers.arguments(0, "@PORT@"), "--state", "@NEW@"]),
    }[name]
    modules = ["fedkseed.run.simulation", *(f"fedkseed.{module}" for module in modules)]
    stopped_at_drawn_moments(tmp_path / "logs", 12, 3, modules, name, *command)
