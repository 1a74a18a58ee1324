"""The page of a run that renews itself, asked over HTTP and shown by a real browser."""

import http.client
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedkseed.errors import FedKSeedError
from fedkseed.network.http_server import listen
from fedkseed.run.store import Store

from .browser import ended
from .conftest import command, contents_kept, environment, trains, wait_until


@contextmanager
def served(directory: Path, *options: str) -> Iterator[tuple[int, str]]:
    """`fedkseed watch --serve` in a process of its own; gives its port and token."""
    asked = command("watch", directory, "--serve", "0", *options)
    with subprocess.Popen(asked, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.match(r"http://[\d.]+:(\d+)/(?:([\w-]+)/)? shows ", process.stdout.readline())
            assert found is not None
            yield int(found[1]), found[2] or ""
        finally:
            ended(process)


def asked(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_only_the_page_and_its_data_are_served_and_only_to_readers(finished):
    with served(finished) as (port, token), contents_kept(finished):
        status, page = asked(port, "/")
        assert (status, token) == (200, "")
        assert b"connect-src 'self'" in page
        status, now = asked(port, "/now.json")
        view = json.loads(now)
        assert (view["state"], view["done"], view["planned"]) == ("ended", 4, 4)
        status, report = asked(port, "/report.json")
        (run,) = json.loads(report)["runs"]
        assert [r["loss"] for r in run["rounds"]] == [r["loss"] for r in Store(finished, looks=True).reports()]
        for path in ("/run.sqlite", "/recipe.toml", "/../recipe.toml", "/now.json/"):
            assert asked(port, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert asked(port, "/", method)[0] == 404
        assert asked(port, "/now.json", Host=f"localhost:{port}")[0] == 200
        for name in ("attacker.example", f"attacker.example:{port}", "127.0.0.1.attacker.example", ""):
            assert asked(port, "/now.json", Host=name)[0] == 403


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_refused():
    with listen("127.0.0.1", 0) as at:
        port = at.getsockname()[1]
        with pytest.raises(FedKSeedError, match=f"can't listen on port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(FedKSeedError, match=r"can't listen on port 0 of no\.host\.invalid"):
        listen("no.host.invalid", 0)


def test_others_than_this_machine_need_the_token_that_is_printed(finished):
    with served(finished, "--host", "0.0.0.0") as (port, token):  # noqa: S104
        assert len(token) > 20
        assert [asked(port, path)[0] for path in ("/", "/now.json", "/wrong/now.json")] == [401] * 3
        assert asked(port, f"/{token}/now.json", Host="lab.example")[0] == 200


def test_the_page_follows_a_run_to_its_end_without_being_loaded_again(chromium, begin, tmp_path):
    def shows(text: str) -> None:
        wait_until(lambda: text in chromium.run("document.getElementById('now')?.innerText ?? ''"), text)

    def rows() -> list[str]:
        return chromium.run("[...document.querySelectorAll('#rounds tbody th')].map(cell => cell.textContent)")

    with served(tmp_path / "run") as (port, _):
        chromium.open(f"http://127.0.0.1:{port}/")
        shows("holds no run yet")
        chromium.run("window.stays = 'here'")
        run = begin()
        run.halt(lambda run: trains(run, 2), "a client trains for the third round")
        shows("2 of 4 rounds")
        assert run.moment is not None
        (training,) = run.moment.clients["training"]
        shows(f"training: {training}")
        wait_until(lambda: rows() == ["base model", "round 1", "round 2"], "the table of two rounds")
        chromium.run("document.querySelector('#recipe details').open = false")
        chromium.run("document.querySelector('input[value=bytes]').click()")
        run.end()
        shows("ended")
        wait_until(lambda: rows() == ["base model", *(f"round {n}" for n in range(1, 5))], "the table of four rounds")
        assert chromium.run("document.getElementById('now').dataset.state") == "ended"
        assert chromium.run("document.querySelector('#recipe details').open") is False
        assert "sent by all clients" in chromium.run("document.querySelector('#learning .label').textContent")
        assert chromium.run("window.stays") == "here"
        loss = Store(run.directory).reports()[-1]["loss"]
        assert f"{loss:.4f}" in chromium.run("document.querySelector('#rounds').innerText")
        assert chromium.run("document.documentElement.scrollWidth") == 1280
        assert chromium.complaints == []
        own = f"http://127.0.0.1:{port}/"
        assert {*chromium.requests} == {own, f"{own}now.json", f"{own}report.json"}


def test_the_page_is_not_wider_than_a_small_window(chromium, finished):
    with served(finished) as (port, _):
        chromium.open(f"http://127.0.0.1:{port}/", width=390)
        wait_until(lambda: chromium.run("document.querySelectorAll('figure').length"), "the report")
        assert chromium.run("document.documentElement.scrollWidth") == 390
        assert chromium.run("document.title") == "4/4 finished – fedkseed"
