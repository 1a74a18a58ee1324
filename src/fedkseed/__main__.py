"""Entry point of the command `fedkseed`, and of `python -m fedkseed`, which Ctrl-C or SIGTERM ends at any moment."""

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from .errors import INTERRUPTED

TOGETHER = 1.0  # seconds within which signals are one: make, timeout and npm hand on what the terminal sends to all
AGAIN = 0.05  # seconds until a Ctrl-C that was swallowed comes again
ENDS = 30.0  # seconds of the interpreter's own end: threads that never end, a full pipe that nobody reads
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)  # the last is this module's own
_asked: float | None = None  # when this process was asked to stop


def main() -> None:
    """Run the command line, whose own modules are read here: Ctrl-C meanwhile is a line and an exit code, too."""
    code = 1
    for number in SIGNALS:  # also where a shell's `&` has SIGINT ignored
        signal.signal(number, _stop)
    # Threads of OpenMP sleep while they wait for each other. By default they spin, on cores that other programs could
    # use, and a step beside those takes twice its share of time and more (benchmarks/busy.py).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.unraisablehook = _come_again
    atexit.register(lambda: _end(code))  # the first to be registered is the last to be called
    try:
        from .cli import main as command

        command()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # what follows from an interrupted import or lock may be any error
        if _asked is None:
            raise
        print("fedkseed: stopped", file=sys.stderr)
        code = INTERRUPTED
    finally:
        for number in SIGNALS:
            signal.signal(number, _leave)
        signal.setitimer(signal.ITIMER_REAL, ENDS if code == INTERRUPTED else 0)
    sys.exit(code)


def _stop(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt; where that was done, and its cleaning up takes long or hangs, end at once."""
    global _asked
    now = time.monotonic()
    if _asked is None or number == signal.SIGALRM:
        _asked = _asked or now
        raise KeyboardInterrupt
    if now - _asked > TOGETHER:
        _leave(number, frame)


def _leave(number: int, frame: Any) -> None:
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")  # the cursor, which bars hide
    os._exit(INTERRUPTED)


def _come_again(error: Any) -> None:
    """Raise Ctrl-C again soon: a `__del__` or a callback of C, as llvmlite has for each kernel, has swallowed it."""
    if _asked is not None and issubclass(error.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
    else:
        sys.__unraisablehook__(error)


def _end(code: int) -> None:
    """End here where threads go on: the interpreter would stop them within PyTorch, which aborts the process then."""
    if threading.active_count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
