"""A federation over HTTPS under attack against its honest clients alone: loss and accuracy, with real processes.

    PYTHONPATH=. python benchmarks/under_attack.py [--seeds 3] [--model MODEL] [--set KEY=VALUE …] [--out FILE.jsonl]

Each seed has two runs, one after the other, on this machine, with the commands and defaults of docs/deploy.md
(`certs`, `init --network`, `serve`, `join`). Rows are the sample `intents`: 200 are the server's, held out, the others
are dealt to five clients.

    attacked   five clients, of which three are honest:
                 0, 1, 2  train on their rows
                 3        trains, too, in a copy of the package that multiplies what it sends (--factor), as far as the
                          server takes it: numbers beyond `largest_change` are refused, and would harm nobody
                 4        begins a session, takes each task, trains nothing, and drips eight answers at once, a few
                          bytes a second under heads of full length, again and again, until the run is over
               and, without a key, from its own process and the same address, until the run is over: endless headers,
               headers of five bytes, bodies to tasks that do not exist, and 100 half-open connections, again and again
    alone      the clients 0, 1 and 2, with the same rows, and nobody else

The tables compare the held-out loss and the accuracy (`choice`: is the right one of seven intents the most probable?)
of both, row by row. A difference has two errors: over held-out rows, of which each counts as its mean over seeds, and
over seeds. It is `within the errors` where it is at most twice the larger one; with one seed there is the first alone.

A run that is done is a line of --out, with its settings, scores of each row and commit, and is not done again: a
benchmark that was stopped goes on by the same command, with the run that was cut short begun anew. --set is for
`serve`, as there. Each client has the memory of a pass back: 2 GB with SmolLM2-135M. Files of a run that was cut short
or failed stay in --folder. Progress goes to stderr, the tables to stdout.
"""

import argparse
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from tests.network import attacks
from tests.network.attacks import Target

import fedkseed
from fedkseed import decode
from fedkseed.data.sources import read
from fedkseed.evaluation.statistics import Evaluation, estimate
from fedkseed.network.http_client import BoundedClient
from fedkseed.network.https.join import OVER, ServerSession
from fedkseed.network.protocol.signatures import certificate, private_key
from fedkseed.run.store import Store
from fedkseed.wire.records import Change
from table import MODEL, Row, commit, free_port, machine, markdown

KINDS = {"attacked": 5, "alone": 3}  # and the number of clients
HONEST = {0, 1, 2}
SCALING, DRIPPING = 3, 4
HELD_OUT, CATEGORY = 200, "held out"  # rows of the server's, and the name under which clients may be asked to lack them
SETTINGS = (
    "training.rounds=6", "evaluation.every=6", "evaluation.examples=100", "evaluation.generated=0",
    'evaluation.metrics=["choice"]',
)  # fmt: skip
POLICY = f'[data]\nheld_out = ["{CATEGORY}"]\n'  # all else is a client's default
DRIPS, PAUSE = 8, 1.0  # answers at once of the dripping client, and seconds between two of their parts
MB = 1e6
# What the hostile owner of a client appends to its copy of the package: the signed answer is a multiple of the honest.
SCALED = """

_trained = TrainingClient._train


def _scaled(self, task, whole, masking, tick):
    from ....strategies.uploads import largest_change
    from ....wire.codec import encode
    from ....wire.numbers import rounded

    change = decode(_trained(self, task, whole, masking, tick), Change)
    most = largest_change(self.setup.strategy.settings, change.round)
    values = np.clip(FACTOR * change.values, -most, most)
    log(f"norm {np.linalg.norm(change.values):g} is sent as {np.linalg.norm(values):g}, at most {most:g} a number")
    return encode(replace(change, values=rounded(values, change.wire)))


TrainingClient._train = _scaled
"""


class Federation:
    """The files and processes of one run."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self.folder, self.options, self.count = folder, options, KINDS[options["kind"]]
        self.keys, self.run, self.port = folder / "keys", folder / "run", free_port()
        self.url, self.shown = f"https://localhost:{self.port}", 0  # lines of the server's that were shown

    def prepare(self) -> None:
        """Deal the rows, and make keys and recipe as users do."""
        self.folder.mkdir(parents=True)
        columns, rng = ("instruction", "response", "category"), np.random.default_rng(0)
        rows = [{column: getattr(row, column) for column in columns} for row in read("intents")]
        held_out, rest = np.split(rng.permutation(len(rows)), [HELD_OUT])
        write_rows(self.folder / "held-out.jsonl", [{**rows[k], "category": CATEGORY} for k in held_out])
        dealt = np.random.default_rng(self.options["seed"]).permutation(rest)
        for number in range(max(KINDS.values())):
            write_rows(self.folder / f"{number}.jsonl", [rows[k] for k in dealt[number :: max(KINDS.values())]])
        (self.folder / "policy.toml").write_text(POLICY)
        self.call("certs", self.keys, "--host", "localhost")
        for number in range(self.count):
            self.call("certs", "request", "--key", self.key(number))
            self.call("certs", "add", self.keys, self.key(number).with_suffix(".pub"))
        about = ("--data", self.folder / "held-out.jsonl", "--model", self.options["model"], "--clients", self.count)
        self.call("init", "--network", "--no-estimate", *about, self.folder / "recipe.toml")

    def call(self, *arguments: object) -> None:
        """Let a command do its work, and stop with what it says if it fails."""
        program = self.start(f"{arguments[0]}.log", *arguments)
        if program.wait():
            sys.exit((self.folder / f"{arguments[0]}.log").read_text())

    def start(self, log: str, *arguments: object, package: Path | None = None) -> subprocess.Popen[bytes]:
        """A command of the package, or of a changed copy of it."""
        unset = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        changed = {"PYTHONPATH": str(package)} if package else {}
        environment = unset | changed | {"OMP_NUM_THREADS": "1", "COLUMNS": "300", "TERM": "dumb"}
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(  # noqa: S603 - this program itself
                [sys.executable, "-m", "fedkseed", *map(str, arguments)],
                stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment, cwd=self.folder,
            )  # fmt: skip

    def key(self, number: int) -> Path:
        return self.folder / f"client-{number}"

    def server(self) -> subprocess.Popen[bytes]:
        named = [f"seed={self.options['seed'] + 1}", f"data.held_out={CATEGORY}", f"clients.cohort={self.count}"]
        named += ["network.minimum=", *self.options["set"]]  # of minimum, the default holds: half of them
        where = ("--certs", self.keys, "--output", self.run, "--port", self.port)
        settings = [word for setting in named for word in ("--set", setting)]
        return self.start("server.log", "serve", self.folder / "recipe.toml", *where, *settings)

    def client(self, number: int, package: Path | None = None) -> subprocess.Popen[bytes]:
        own = ("--data", self.folder / f"{number}.jsonl", "--policy", self.folder / "policy.toml")
        own += ("--state", self.folder / f"state-{number}", "--model", self.options["model"])
        keys = ("--key", self.key(number), "--ca", self.keys / "ca.pem")
        return self.start(f"client-{number}.log", "join", self.url, *keys, *own, package=package)

    def scaling_package(self) -> Path:
        """A copy of the package whose clients send a multiple of what they have found."""
        copy = self.folder / "scaling"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(fedkseed.__file__).parent, copy / "fedkseed", ignore=ignored)
        with (copy / "fedkseed" / "network" / "protocol" / "client" / "training_client.py").open("a") as file:
            file.write(SCALED.replace("FACTOR", repr(float(self.options["factor"]))))
        return copy

    @contextmanager
    def attacked(self, server: int) -> Iterator[None]:
        """Let those who need no model attack for the length of a `with` block."""
        context, keys = get_context("spawn"), (self.keys / "ca.pem", self.port)
        made = [
            context.Process(target=drip, args=(self.key(DRIPPING), *keys, self.folder / "dripping.log"), daemon=True),
            context.Process(target=flood, args=(server, *keys, self.folder / "flood.log"), daemon=True),
        ]
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is this process's, which ends them
        for process in made:
            process.start()
        signal.signal(signal.SIGINT, before)
        try:
            yield
        finally:
            for process in made:
                process.terminate()
                process.join()


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def note(log: Path, counts: Mapping[str, float]) -> None:
    """Write the counts of an attacker's deeds so far, for `record`."""
    part = log.with_suffix(".part")
    part.write_text(json.dumps(counts))
    part.replace(log)


def drip(key: Path, ca: Path, port: int, log: Path) -> None:
    """Drip answers to each task of a client's session until the run is over."""
    tls, url = ssl.create_default_context(cafile=str(ca)), f"https://localhost:{port}"
    session = ServerSession(BoundedClient(ssl.create_default_context(cafile=str(ca)), 60, 1, url), private_key(key),
                            certificate(ca))  # fmt: skip
    counts, last, begun = {"sessions": 0, "tasks": 0, "answers begun": 0, "bytes": 0}, b"", False
    target = Target(0, port, tls)
    lines: list[Any] = []
    while True:
        try:
            if not begun:
                session.begin()
                begun, counts["sessions"] = True, counts["sessions"] + 1
            stub = session.next_task(last, waits=False)
            if stub is not None:
                last, counts["tasks"] = stub.key, counts["tasks"] + 1
        except Exception as error:  # as for a session that has ended: another begins
            if getattr(error, "status", 0) == OVER:
                return
            begun = False
        if last:
            target.path, target.headers = f"/v1/task/{last.hex()}", f"authorization: Bearer {session.token}\r\n"
            while len(lines) < DRIPS:
                try:
                    line = target.connect()
                    line.sendall(target.post + b"content-length: 4312\r\n\r\n")
                except OSError:
                    break
                lines.append(line)
                counts["answers begun"] += 1
        for line in [*lines]:
            with suppress(OSError):
                line.sendall(b"abc")
                counts["bytes"] += 3
                if attacks.alive([line]):
                    continue
            line.close()
            lines.remove(line)
        note(log, counts)
        time.sleep(PAUSE)


def flood(server: int, ca: Path, port: int, log: Path) -> None:
    """Send a server what nobody has asked for, without a key, again and again."""
    tls = ssl.create_default_context(cafile=str(ca))
    counts = {"endless headers": 0.0, "MB of them sent": 0.0, "bodies": 0.0, "half-open connections": 0.0}
    while True:
        target = Target(server, port, tls, f"/v1/task/{os.urandom(16).hex()}")
        with target.opened, suppress(OSError):
            for attack in (attacks.endless_header, attacks.headers_of_five_bytes):
                counts["MB of them sent"] += attack(target, 1 << 24) / MB
                counts["endless headers"] += 1
            attacks.bodies(target, 3, 1 << 20)
            counts["bodies"] += 3
            counts["half-open connections"] += len(attacks.half_open(target, 100))
            note(log, counts)
            time.sleep(1.0)


def record(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """One run, from its keys to the scores of its held-out rows."""
    title = f"seed {options['seed']}, {options['kind']}"
    federation, began = Federation(folder, options), time.monotonic()
    say(title, "making rows, keys and a recipe")
    federation.prepare()
    server = federation.server()
    programs = [server]
    try:
        follow(federation, title, programs, "clients connect to port")
        programs += [federation.client(number) for number in sorted(HONEST)]
        if options["kind"] == "attacked":
            programs.append(federation.client(SCALING, federation.scaling_package()))
            with federation.attacked(server.pid):
                peak = follow(federation, title, programs)
        else:
            peak = follow(federation, title, programs)
    finally:
        for program in programs[1:]:  # a run's end is theirs
            with suppress(subprocess.TimeoutExpired):
                program.wait(20 if server.poll() == 0 else 0.1)
        for program in programs:
            if program.poll() is None:
                program.terminate()
                program.wait(60)
    if server.returncode:
        sys.exit(f"{title}: the server has ended with {server.returncode}; {folder / 'server.log'} says why")
    store = Store(federation.run)
    reports, (before, *_, after) = store.reports(), store.evaluations().values()
    scores = {
        when: {name: [round(value, 6) for value in values] for name, values in Evaluation.of(given).measures.items()}
        for when, given in (("before", before), ("after", after))
    }
    attackers = {log.stem: json.loads(log.read_text()) for log in map(folder.joinpath, ("dripping.log", "flood.log"))
                 if log.exists()}  # fmt: skip
    return {
        **options, "scores": scores, "clients": [report["clients"] for report in reports],
        "round_seconds": [round(report["seconds"], 1) for report in reports], "norms": norms(store, len(reports)),
        "peak_mb": round(peak), "seconds": round(time.monotonic() - began), "attackers": attackers,
        "commit": commit(), "cpu": machine()["cpu"],
    }  # fmt: skip


def norms(store: Store, rounds: int) -> list[float]:
    """In each round the norm of the scaled upload in units of the honest ones' median; 0 where it has not come."""
    times = []
    for done in range(1, rounds + 1):
        sizes = {k: float(np.linalg.norm(decode(one.upload, Change).values)) for k, one in store.receipts(done).items()}
        usual = np.median([size for client, size in sizes.items() if client in HONEST] or [np.inf])
        times.append(round(sizes.get(SCALING, 0.0) / float(usual), 1))
    return times


def follow(federation: Federation, title: str, programs: Sequence[subprocess.Popen[bytes]], until: str = "") -> float:
    """Show a server's lines until one has a text, or the server ends; returns the peak of its memory in MB.

    Args:
        programs: the server, and clients in the order of their numbers, of which none must end before it.
    """
    server, *clients = programs
    log, peak = federation.folder / "server.log", 0.0
    while True:
        ended = server.poll() is not None
        lines = log.read_text(errors="replace").splitlines()
        for line in lines[federation.shown :]:
            if line and line[0] not in " ┏┃┡│└":  # its tables
                say(title, line)
        federation.shown = len(lines)
        faulty = [number for number, one in enumerate(clients) if server.poll() is None and one.poll()]
        if faulty:
            sys.exit(f"{title}: client {faulty[0]} has ended; {federation.folder / f'client-{faulty[0]}.log'} says why")
        if ended or (until and any(until in line for line in lines)):
            return peak
        with suppress(OSError, StopIteration, ValueError):
            status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024 / MB
        time.sleep(0.5)


def say(title: str, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {title}: {text}", file=sys.stderr, flush=True)


def each_run(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row of a table for each run."""
    rows: list[Row] = []
    for one in sorted(found, key=lambda one: (one["seed"], one["kind"] != "attacked")):
        means = {f"{name} {when}": float(np.mean(values)) for when, scores in one["scores"].items()
                 for name, values in scores.items()}  # fmt: skip
        counted, rounds = sum(set(clients) >= HONEST for clients in one["clients"]), len(one["clients"])
        rows.append({
            "seed": str(one["seed"]), "run": one["kind"],
            "loss": f"{means['loss before']:.4f} → {means['loss after']:.4f}",
            "accuracy": f"{means['choice before']:.3f} → {means['choice after']:.3f}",
            "rounds with all honest clients": f"{counted} of {rounds}",
            "norm of client 3, in the honest ones'": ", ".join(f"{x:g}" for x in one["norms"] if x),
            "server's peak, MB": one["peak_mb"], "seconds": one["seconds"],
        })  # fmt: skip
    return rows


def pairs(found: Sequence[Mapping[str, Any]], measure: str) -> dict[int, np.ndarray[Any, Any]]:
    """By seed, of each held-out row, the attacked run's score less that of the honest clients alone."""
    ends = {(one["seed"], one["kind"]): np.array(one["scores"]["after"][measure]) for one in found}
    seeds = sorted({seed for seed, _ in ends if all((seed, kind) in ends for kind in KINDS)})
    return {seed: ends[seed, "attacked"] - ends[seed, "alone"] for seed in seeds}


def verdict(mean: float, error: float, better: int) -> str:
    """The word for a difference and its error; `better` is the sign of one that is an improvement."""
    if abs(mean) <= 2 * error:
        return "within the errors"
    return "better" if mean * better > 0 else "worse"


def differences(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row of a table for each measure: attacked less alone, with the errors and the verdict."""
    rows: list[Row] = []
    for measure, title, better in (("loss", "loss", -1), ("choice", "accuracy", 1)):
        by_seed = pairs(found, measure)
        if not by_seed:
            continue
        over_rows = estimate(np.mean([*by_seed.values()], axis=0))
        over_seeds = estimate([float(one.mean()) for one in by_seed.values()])
        error = over_rows.error if over_seeds.error == np.inf else max(over_rows.error, over_seeds.error)
        rows.append({
            "attacked less alone": title,
            **{f"seed {seed}": estimate(one).text("+") for seed, one in by_seed.items()},
            "mean": f"{over_rows.mean:+.4f}", "error over rows": f"{over_rows.error:.4f}",
            "error over seeds": "" if over_seeds.error == np.inf else f"{over_seeds.error:.4f}",
            "verdict": verdict(over_rows.mean, error, better),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=100.0, help="by which the hostile client multiplies")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe, after the defaults")
    parser.add_argument("--out", type=Path, default=Path("under_attack.jsonl"), help="runs that are done")
    parser.add_argument("--folder", type=Path, default=Path("under_attack"), help="for the files of a run")
    given = parser.parse_args()
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    common = {"model": given.model, "factor": given.factor, "set": [*SETTINGS, *given.set]}
    wanted = [{**common, "seed": seed, "kind": kind} for seed in range(given.seeds) for kind in KINDS]
    found = [one for one in known if {name: one.get(name) for name in wanted[0]} in wanted]
    todo = [one for one in wanted if not any(one.items() <= done.items() for done in found)]
    say("runs", f"{len(wanted) - len(todo)} of {len(wanted)} are in {given.out}, {len(todo)} to do")
    for options in todo:
        folder = given.folder.resolve() / f"seed-{options['seed']}-{options['kind']}"
        shutil.rmtree(folder, ignore_errors=True)  # of a benchmark that was stopped
        found.append(record(options, folder))
        with given.out.open("a") as file:
            file.write(json.dumps(found[-1]) + "\n")
        shutil.rmtree(folder)
        say("runs", f"{len(found)} of {len(wanted)} done")
    print(markdown(each_run(found)))
    print(markdown(differences(found)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("runs", "stopped; the same command goes on")
        sys.exit(130)
