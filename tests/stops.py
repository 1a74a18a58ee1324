"""Commands stopped at drawn moments: `python -m tests.stops FOLDER SEED COUNT SECONDS MODULE,… COMMAND…`.

Each is a fork of one process that has imported the modules. It gets SIGINT or SIGTERM within as many seconds, and often
another signal soon after; a line of JSON says which, and how it has ended. @PORT@ stands for a free port, @NEW@ for a
directory that is not there yet.
"""

import faulthandler
import json
import os
import random
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import fedkseed.__main__ as entry
from fedkseed import cli

from .network.ports import free_port

STOPS = (signal.SIGINT, signal.SIGTERM)
ENDS = 90.0  # seconds in which a process has to end on a busy machine; it says then where its threads are


def stopped(process: int, moments: list[float], signals: list[signal.Signals]) -> int:
    """The exit code of a process that gets signals at moments of the clock."""
    for moment, number in zip(moments, signals, strict=True):
        time.sleep(max(0.0, moment - time.monotonic()))
        os.kill(process, number)
    end = time.monotonic() + ENDS
    while not (ended := os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and time.monotonic() < end:
        time.sleep(0.01)
    if not ended:
        os.kill(process, signal.SIGABRT)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def become(command: list[str], log: Path) -> None:
    """Make this fork the process of a command; signals that come before it has handlers of its own wait for these."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for number, own in enumerate((os.open(os.devnull, os.O_RDONLY), file, file)):
        os.dup2(own, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    faulthandler.enable()
    sys.argv = ["fedkseed", *command]
    line = cli.main

    def unblocked() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        line()

    cli.main = unblocked


def main() -> None:
    folder, seed, count, seconds, modules, *command = sys.argv[1:]
    draw = random.Random(int(seed))
    for name in modules.split(","):
        import_module(name)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    for number in range(int(count)):
        port, new = str(free_port()), f"{folder}/new-{number}"
        log = Path(folder, f"{number}.log")
        first, begun = draw.uniform(0, float(seconds)), time.monotonic()
        moments = [first, first + draw.choice([0, draw.uniform(0, 0.1), draw.uniform(0, 1.5)])][: draw.choice([1, 2])]
        signals = draw.choices(STOPS, k=len(moments))
        if not (process := os.fork()):
            become([part.replace("@PORT@", port).replace("@NEW@", new) for part in command], log)
            entry.main()
        code = stopped(process, [begun + moment for moment in moments], signals)
        sent = {signals[k].name + f" {k}": round(moment, 3) for k, moment in enumerate(moments)}
        print(json.dumps({"sent": sent, "code": code, "printed": log.read_text(errors="replace")}), flush=True)


if __name__ == "__main__":
    main()
