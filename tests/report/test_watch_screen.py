"""`fedkseed watch` on a real terminal: a pseudo-terminal, whose screen is read as a person would see it."""

import fcntl
import os
import pty
import select
import shutil
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from fedkseed.run.store import Store

from .conftest import SECONDS, command, environment, trains

pyte = pytest.importorskip("pyte")
pytest.importorskip("textual")
ROWS, COLUMNS = 34, 150


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, process: subprocess.Popen, ours: int) -> None:
        self.process, self.ours = process, ours
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def read(self) -> bool:
        """Take in what the process has written; False once it has closed the terminal."""
        ready, _, _ = select.select([self.ours], [], [], 0.1)
        try:
            data = os.read(self.ours, 1 << 16) if ready else None
        except OSError:  # Linux's end of a terminal
            return False
        if data:
            # Textual asks for modes with a "$p" that pyte would print; it answers none, as many terminals do
            self.stream.feed(data.replace(b"\x1b[?2026$p", b"").replace(b"\x1b[?2048$p", b""))
        return data != b""

    def until(self, *words: str, gone: str | None = None) -> str:
        """Wait until the screen shows all these words, and one of before no more; returns the screen."""
        end = time.monotonic() + SECONDS
        while not all(word in self.text for word in words) or (gone is not None and gone in self.text):
            assert self.read(), f"ended before {words}:\n{self.text}"
            assert time.monotonic() < end, f"no {words}, or still {gone}, on the screen:\n{self.text}"
        return self.text

    def leave(self, key: bytes = b"q") -> None:
        os.write(self.ours, key)
        while self.read():
            pass
        assert self.process.wait(SECONDS) == 0


@contextmanager
def terminal(*arguments: object) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command(*arguments), env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):  # a test has closed it
            os.close(ours)


def test_the_screen_follows_a_run_from_before_its_beginning_to_its_end(begin, tmp_path):
    with terminal("watch", tmp_path / "run") as shown:
        shown.until("holds no run yet")
        run = begin()
        run.halt(lambda run: trains(run, 2), "a client trains for the third round")
        reports, scores = (of(Store(run.directory, looks=True)) for of in (Store.reports, Store.evaluations))
        assert run.moment is not None
        (training,) = run.moment.clients["training"]
        shown.until("running", "2 of 4 rounds", f"training: {training}", "left")
        shown.until(*(f"{report['loss']:.4f}" for report in reports), *(f"{r['bytes_up']:,}" for r in reports))
        shown.until(*(f"{sum(found['losses']) / len(found['losses']):.4f}" for found in scores.values()))
        run.end()
        shown.until("ended", "4 of 4 rounds", gone="training")  # lines reach a terminal one after the other
        assert shown.process.poll() is None  # the end of a run stays to be read
        shown.leave()


@pytest.mark.parametrize("key", [b"\x03", b"q"], ids=["Ctrl-C", "q"])
def test_a_key_ends_the_screen_of_a_run_that_has_ended(finished, key):
    with terminal("watch", finished) as shown:
        text = shown.until("ended", "4 of 4 rounds", "base", "quit")
        words = [line.split()[0] for line in text.splitlines() if line.strip()]
        head = words.index("round")
        assert words[head + 1 : head + 6] == ["4", "3", "2", "1", "base"]
        shown.leave(key)


def test_a_name_with_brackets_stays_text(finished, tmp_path):
    named = shutil.copytree(finished, tmp_path / "[red]run[b]")
    with terminal("watch", named) as shown:
        shown.until("[red]run[b]   ended")
        shown.leave()


def test_a_terminal_that_is_gone_ends_the_screen(finished):
    """As a lost connection does: the screen took a whole core for good, reading the end of its input."""
    with terminal("watch", finished) as shown:
        shown.until("ended")
        os.close(shown.ours)
        assert shown.process.wait(SECONDS) != 0
