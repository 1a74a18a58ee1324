"""The checks of `fedkseed doctor`: each passes on a machine as it should be, and fails for a cause of its own."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import tomli_w

from fedkseed import FedKSeedError, start
from fedkseed.files import exclusive
from fedkseed.network import doctor
from fedkseed.network.doctor import findings
from fedkseed.network.https import app, server
from fedkseed.network.https.connections import Connections
from fedkseed.network.protocol.certs import make, revoke
from fedkseed.network.protocol.server.serving import begin
from fedkseed.network.protocol.signatures import Audiences, public_key
from fedkseed.weights import free_memory

from ..commands import fedkseed, refused
from .ports import free_port

SECURE_AND_CLIPPED = '[secure]\nnorm = 0.05\n[trust]\nrule = "clipped"\n'
POLICY = '[data]\nheld_out = ["capital"]\n'


@dataclass
class Site:
    """A folder with all that a server and client 0 need, and the server's address."""

    folder: Path
    port: int

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    def of_client(self) -> list[object]:
        options: dict[str, object] = {
            "url": f"https://localhost:{self.port}", "data": self.folder / "rows.jsonl", "key": self.keys / "client-0",
            "ca": self.keys / "ca.pem", "policy": self.folder / "policy.toml", "state": self.folder / "c0",
            "model": self.folder / "model",
        }  # fmt: skip
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def of_server(self) -> list[object]:
        return ["--certs", self.keys, "--output", self.folder / "run", "--port", self.port]

    def found(self, options: list[object], *more: object) -> dict[str, tuple[bool | None, str]]:
        """What each check has found, by its name."""
        result = fedkseed("doctor", self.folder / "recipe.toml", *options, *more, "--json")
        table = {one["check"]: (one["passed"], one["said"]) for one in json.loads(result.stdout)}
        failed = [name for name, (passed, _) in table.items() if passed is False]
        assert result.exit_code == (2 if failed else 0), result.output
        assert not failed or f"{len(failed)} of {len(table)} checks fail: {', '.join(failed)}" in result.stderr
        return table

    @contextmanager
    def serving(self) -> Iterator[Connections]:
        lines = [(self.keys / f"client-{number}.pub") for number in range(2)]
        keys = [public_key(path.read_bytes(), path) if path.exists() else None for path in lines]
        connections = Connections(Audiences.of(self.keys), keys)
        with server.listening(connections, server.Address("127.0.0.1", self.port), 500, self.keys):
            yield connections


@pytest.fixture
def site(tmp_path, model_folder, data_file) -> Site:
    make(tmp_path / "keys", 2, ["localhost"], 60)
    (tmp_path / "model").symlink_to(model_folder)
    (tmp_path / "rows.jsonl").write_text(data_file.read_text())
    (tmp_path / "policy.toml").write_text(POLICY)
    recipe = {
        "model": {"name": str(tmp_path / "model")},
        "clients": {"split": "files", "cohort": 2},
        "directions": {"size": 64},
        "training": {"rounds": 2, "steps": 6, "lr": 1e-3},
        "data": {"held_out": "capital", "source": str(tmp_path / "rows.jsonl"), "max_tokens": 200},
        "evaluation": {"examples": 8},
    }
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    return Site(tmp_path, free_port())


def test_a_client_as_it_should_be_passes_all_checks(site):
    with site.serving():
        found = site.found(site.of_client())
    assert all(passed for passed, _ in found.values()), found


def test_a_server_as_it_should_be_passes_all_checks(site):
    found = site.found(site.of_server())
    assert all(passed for passed, _ in found.values()), found
    assert not (site.folder / "run").exists(), "nothing is begun"


def edited(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def extended(site: Site, lines: str) -> None:
    with (site.folder / "recipe.toml").open("a") as file:
        file.write(lines)


def of_older_keys(site: Site) -> None:
    for path in site.keys.iterdir():
        path.unlink()
    make(site.keys, 2, ["localhost"], 2, datetime.now(UTC) - timedelta(days=5))


def limit(site: Site, line: str) -> None:
    (site.folder / "policy.toml").write_text(f"{POLICY}[training]\n{line}\n")


def columns_lack(site: Site) -> None:
    (site.folder / "rows.jsonl").write_text('{"question": "Who?", "sense": "He."}\n' * 20)


def journal_is_full(site: Site) -> None:
    (site.folder / "c0").mkdir()
    views = [
        {"held_out": "", "template": name, "separator": "", "protocol": "paper", "max_tokens": 9} for name in "abc"
    ]
    lines = [json.dumps({"digest": "00", "decision": "followed", "view": view}) + "\n" for view in views]
    (site.folder / "c0" / "asked.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("check", "cause", "said", "skipped"),
    [
        ("settings", lambda site: (site.keys / "client-0").chmod(0o644), "chmod 600", "clock policy registered rows"),
        ("settings", lambda site: (site.folder / "rows.jsonl").unlink(), "a client's data is a file", "server step"),
        ("settings", lambda site: edited(site.folder / "policy.toml", "held_out", "kept_out"), "kept_out", "policy"),
        ("server", of_older_keys, "certificate has expired", "clock registered"),
        ("registered", lambda site: revoke(site.keys, 0), "does not know the key", ""),
        ("policy", lambda site: (site.folder / "policy.toml").write_text(""), "held_out = ['summarization']", "step"),
        ("policy", journal_is_full, "the policy says max_views = 3", "tokens memory"),
        ("rows", columns_lack, "no column instruction and no response", "tokens memory step"),
        ("tokens", lambda site: edited(site.folder / "recipe.toml", "= 200", "= 9"), "over 9 tokens", "memory step"),
        ("step", lambda site: limit(site, "max_seconds = 1e-6"), "[network] deadline leave 1e-06 s", ""),
        ("step", lambda site: limit(site, "weights_per_direction = 1000"), "weights_per_direction = 1000", ""),
    ],
)  # fmt: skip
def test_a_client_s_check_fails_for_its_cause_and_only_what_needs_it_is_skipped(site, check, cause, said, skipped):
    cause(site)
    with site.serving():
        found = site.found(site.of_client())
    passed, text = found[check]
    assert passed is False
    assert said in text, text
    assert [name for name, (passed, _) in found.items() if passed is False] == [check]
    lacking = {name for name, (passed, _) in found.items() if passed is None}
    assert {*skipped.split()} <= lacking
    assert bool(skipped) == bool(lacking)
    assert all("not tried, for want of" in found[name][1] for name in lacking)


def test_rows_that_are_left_out_are_counted_with_the_reason(site):
    with (site.folder / "rows.jsonl").open("a") as file:
        file.write('{"instruction": "What?",\n{"instruction": "Why?", "response": ""}\n')
        file.write(json.dumps({"instruction": "long " * 300, "response": "Yes.", "category": "colour"}) + "\n")
    (site.folder / "policy.toml").write_text(POLICY + "leave_out_faulty = true\n")
    found = site.found(site.of_client())
    assert found["server"][0] is False, "no server is up"
    assert "let `fedkseed join` wait for it" in found["server"][1]
    passed, said = found["tokens"]
    assert passed, said
    for text in ("24 examples to train on", "1 without a response left out", "1 faulty row left out: line 37"):
        assert text in said
    assert "1 over 200 tokens left out" in said
    assert found["step"][0], "what needs no server goes on"


def test_a_clock_that_is_off_is_said_with_its_seconds(site, monkeypatch):
    late = format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True)
    monkeypatch.setattr(app, "formatdate", lambda usegmt: late)
    with site.serving():
        passed, said = site.found(site.of_client())["clock"]
    assert passed is False
    assert "s behind the server's, and certificates bear 3,600 s: set the wrong one right" in said


def test_a_client_at_work_keeps_its_session_and_one_that_is_checked_is_not_waited_for(site):
    with site.serving() as connections:
        assert site.found(site.of_client())["registered"][1] == "the server knows the key as that of client 0"
        assert connections.nodes() == [], "a session alone asks for no task"
        with exclusive(site.folder / "c0" / "client.lock", "taken"):
            assert "not asked, as `fedkseed join` is at work" in site.found(site.of_client())["registered"][1]


def test_a_server_is_told_what_has_failed_by_those_who_wish(site):
    with site.serving() as connections:
        site.found(site.of_client())
        assert not connections.notices, "nothing is told unasked"
        assert site.found(site.of_client(), "--tell")["reported"] == (True, "the server knows that all checks pass")
        limit(site, "max_seconds = 1e-6")
        assert site.found(site.of_client(), "--tell")["reported"][1] == "the server knows that these fail: step"
        said = [(number, said) for number, said, _ in connections.notices if said != "has connected again"]
        passed, failed = "has passed all checks of its machine", "has failed checks of its machine: step"
        assert said == [(0, passed), (0, failed)]
        with exclusive(site.folder / "c0" / "client.lock", "taken"):
            assert site.found(site.of_client(), "--tell")["reported"][1] == "not reported, for want of a session"
    assert "a server with --certs" in refused("doctor", site.folder / "recipe.toml", *site.of_server(), "--tell")


def test_a_place_that_can_not_be_written_is_refused(site):
    options = [site.folder / "rows.jsonl" / "c0" if part == site.folder / "c0" else part for part in site.of_client()]
    passed, said = site.found(options)["disk"]
    assert passed is False
    assert "rows.jsonl can't be written or has" in said


def limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of memory as the system states it."""
    for name, text in {"max": "5000000\n", "current": "2500000\n", "stat": "inactive_file 400\n"}.items():
        (site.folder / f"memory.{name}").write_text(text)
    monkeypatch.setattr(free_memory, "CGROUP", site.folder)


def test_a_model_that_is_too_big_for_a_limit_of_memory_is_refused_on_either_side(site, monkeypatch):
    limited(site, monkeypatch)
    for options in (site.of_client(), site.of_server()):
        found = site.found(options)
        passed, said = found["memory"]
        assert passed is False
        assert "and 0.00 GB are free; set [clients] at_once" in said
    assert found["port"][0]


def test_a_processor_that_emulates_the_recipe_s_type_is_refused(site, monkeypatch):
    monkeypatch.setattr("fedkseed.models.dtypes.slowness", lambda dtype, device: 9.2)
    passed, said = site.found(site.of_client(), "--set", "model.dtype=bfloat16")["processor"]
    assert passed is False
    assert "'bfloat16' takes 9.2 times as long as float32 here" in said


def test_a_package_of_another_version_is_refused(site, monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=99", 'absent>1; extra == "data"'])
    passed, said = site.found(site.of_server())["versions"]
    assert passed is False
    assert said.startswith("torch>=99 is needed, ")


@pytest.mark.parametrize(
    ("check", "cause", "said", "skipped"),
    [
        ("recipe", lambda site: edited(site.folder / "recipe.toml", "files", "even"), "set split = 'files'", "disk"),
        ("recipe", lambda site: edited(site.folder / "recipe.toml", "rounds", "runs"), "runs", "clients memory"),
        ("recipe", lambda site: extended(site, SECURE_AND_CLIPPED), "[secure] hides uploads from the server", "disk"),
        ("clients", lambda site: extended(site, "[network]\nminimum = 3\n"), "more than the 2 clients of", "disk"),
        ("certificate", of_older_keys, "is valid from", ""),
        ("certificate", lambda site: (site.keys / "server.key").write_text("none"), "remove both, and make others", ""),
        ("clients", lambda site: revoke(site.keys, 1), "has the keys of 1 clients: take in those of more", "disk"),
        ("memory", lambda site: (site.folder / "rows.jsonl").write_text("{"), "rows.jsonl", ""),
    ],
)  # fmt: skip
def test_a_server_s_check_fails_for_its_cause_and_only_what_needs_it_is_skipped(site, check, cause, said, skipped):
    cause(site)
    found = site.found(site.of_server())
    assert [name for name, (passed, _) in found.items() if passed is False] == [check], found
    assert said in found[check][1], found[check]
    lacking = {name for name, (passed, _) in found.items() if passed is None}
    assert {*skipped.split()} <= lacking
    assert bool(skipped) == bool(lacking)


def test_a_port_that_is_taken_and_a_disk_that_is_too_small_are_refused(site):
    with closing(socket.create_server(("127.0.0.1", site.port))):
        found = site.found(site.of_server(), "--set", f"training.rounds={10**12}")
    assert "take another port" in found["port"][1]
    assert "MB alone: take another" in found["disk"][1]
    assert [name for name, (passed, _) in found.items() if passed is False] == ["port", "disk"]


def test_lines_are_for_people_and_what_is_asked_for_decides_the_side(site):
    result = fedkseed("doctor", site.folder / "recipe.toml", *site.of_client())
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert lines[0].startswith("passes  versions: Python ")
    assert any(line.startswith("FAILS   server: nothing listens at localhost:") for line in lines)
    assert "skipped clock: not tried, for want of server" in lines
    assert result.stderr == "fedkseed: 1 of 12 checks fail: server\n"
    for options in ([], [*site.of_client(), *site.of_server()], ["--url", "https://localhost:1"]):
        line = refused("doctor", site.folder / "recipe.toml", *options)
        assert "a client is checked with --url, --data, --key and --ca, a server with --certs" in line


def test_a_check_that_raises_ends_no_other():
    def broken() -> str:
        return f"{1 // 0}"

    def refusing() -> str:
        raise FedKSeedError("mend it")

    checks: list[doctor.Check] = [
        ("first", broken, ()),
        ("second", refusing, ()),
        ("third", lambda: "well", ("second",)),
        ("fourth", lambda: "well", ()),
    ]
    assert [*findings(checks)] == [
        ("first", False, "the check itself has failed (ZeroDivisionError: integer division or modulo by zero)"),
        ("second", False, "mend it"),
        ("third", None, "not tried, for want of second"),
        ("fourth", True, "well"),
    ]


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedkseed", "[secure]\nnorm = 0.05\n"),
        ("fedkseed", '[privacy]\nunit = "example"\nnorm = 1.0\nepsilon = 8.0\n'),
        ("fedkseed-pro", ""),
        ("fedavg", ""),
    ],
)
def test_a_step_is_timed_whatever_the_recipe_sends(site, algorithm, more):
    edited(site.folder / "recipe.toml", "steps = 6", f'algorithm = "{algorithm}"\nsteps = 6')
    extended(site, more)
    limit(site, f'algorithms = ["{algorithm}"]\nweights_per_direction = 1')
    found = site.found(site.of_client())
    assert found["step"][0], [said for passed, said in found.values() if not passed]
    assert "the 6 of a round" in found["step"][1]


def test_a_run_takes_no_more_disk_than_is_asked_for(site):
    said = site.found(site.of_server(), "--set", "training.rounds=9")["disk"][1]
    asked = float(said.split()[2].replace(",", "")) * 1e6
    (site.folder / "parts").mkdir()
    for number in range(2):
        (site.folder / "parts" / f"{number}.jsonl").write_text((site.folder / "rows.jsonl").read_text())
    recipe = begin(site.folder / "recipe.toml", ["training.rounds=9"], site.folder / "run", note=print)
    data = recipe.data.model_copy(update={"source": str(site.folder / "parts")})
    start(recipe.model_copy(update={"data": data}), site.folder / "alone")
    taken = sum(path.stat().st_size for path in (site.folder / "alone").rglob("*") if path.is_file())
    assert taken < asked < 50 * taken


def test_a_server_of_shards_needs_no_more_keys_than_shards(site):
    extended(site, "[network]\nshards = [3, 2]\n")
    found = site.found(site.of_server(), "--set", "clients.cohort=4")
    assert all(passed for passed, _ in found.values()), found
    assert found["clients"][1].endswith("has the keys of 2 clients, and a round is made of 2 answers or more")
