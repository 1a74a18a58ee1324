"""The journal: the progress of a ServerApp as a file, from Flower's process to the process that shows it.

The file has one JSON object a line; the first has the id of the process that writes. A new process replaces the file.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ....errors import FedKSeedError
from ....evaluation.statistics import Evaluation, Gain
from ....files import border, part_of, private
from ....round import Report
from ....run.loop import Result
from ....run.progress import Progress, Silent

JOURNAL = "progress.jsonl"  # in a run's directory


class Journal(Silent):
    """A `Progress` that writes to the journal, and prints notes and rounds, for people, to Flower's log."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / JOURNAL
        self._file: TextIO | None = None

    def __enter__(self) -> "Journal":
        part = part_of(self.path)
        with border(f"can't write {self.path}"):
            self._file = open(part, "x", encoding="utf-8", opener=private)
            self._write("pid", os.getpid())
            part.replace(self.path)  # a new file, so that a follower reads it from its first line
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, FedKSeedError):  # ends the run: a follower raises it
            self._write("error", str(error))
        elif error is not None:  # perhaps Flower's own: starting the process again may help
            self._write("note", f"the ServerApp ended with {type(error).__name__}: {error}")
        if self._file is not None:
            self._file.close()

    def note(self, text: str) -> None:
        print(text, flush=True)
        self._write("note", text)

    def begin(self, what: str, total: int) -> None:
        self._write("begin", [what, total])

    def advance(self, count: int = 1, loss: float | None = None) -> None:
        self._write("advance", [count, loss])

    def round_done(self, report: Report) -> None:
        print(f"round {report.round + 1}: clients {list(report.clients)}, local loss {report.loss:.4f}", flush=True)
        self._write("round", asdict(report))

    def result(self, result: Result) -> None:
        """Write the result of the finished run."""
        print(f"digest of the tuned model: {result.digest}", flush=True)
        self._write("result", asdict(result) | {"output": None if result.output is None else str(result.output)})

    def _write(self, name: str, value: Any) -> None:
        if self._file is not None:
            with border(f"can't write {self.path}"):
                self._file.write(json.dumps({name: value}) + "\n")
                self._file.flush()


class JournalReader:
    """A reader of a journal while it grows."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        self.path, self.progress = directory / JOURNAL, progress
        self.pid: int | None = None  # of the process that writes
        self.committed = 0  # number of finished rounds in the journal
        self._file: TextIO | None = None
        self._rest = ""

    def read(self) -> Result | None:
        """Pass new entries on to the watcher; returns the result of the run once the journal has it.

        Raises:
            FedKSeedError: the error with which the run ended.
        """
        if self._file is None:
            if not self.path.exists():
                return None
            self._file = self.path.open(encoding="utf-8")
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            ((name, value),) = json.loads(line).items()
            if name == "error":
                raise FedKSeedError(value)
            if name == "result":
                return _result(value)
            self._pass_on(name, value)
        return None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _pass_on(self, name: str, value: Any) -> None:
        match name:
            case "pid":
                self.pid = value
            case "note":
                self.progress.note(value)
            case "begin":
                self.progress.begin(*value)
            case "advance":
                self.progress.advance(*value)
            case "round":
                self.committed += 1
                lists = {key: tuple(item) for key, item in value.items() if isinstance(item, list)}
                self.progress.round_done(Report(**(value | lists)))


def _result(value: dict[str, Any]) -> Result:
    before, after = Evaluation.of(value["before"]), Evaluation.of(value["after"])
    output = None if value["output"] is None else Path(value["output"])
    gains = [Gain.of(table) for table in value["gains"]]
    return Result(**(value | {"before": before, "after": after, "output": output, "gains": gains}))
