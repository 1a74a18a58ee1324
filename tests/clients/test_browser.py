"""A client in a headless Chromium takes part in rounds over HTTPS, beside our own client: one model at the end."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tomllib import loads
from typing import Any

import numpy as np
import pytest

from fedkseed import Adapter, start
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.network.https import join, server
from fedkseed.network.https.browser_page import Page, files_of
from fedkseed.network.protocol.certs import add, make
from fedkseed.network.protocol.client.recipe_consent import OwnerSettings
from fedkseed.network.protocol.client.task_handler import TaskHandler
from fedkseed.network.protocol.client.training_client import load_client
from fedkseed.network.protocol.networked_recipe import recipe_for_clients, with_network_defaults
from fedkseed.network.protocol.signatures import ClientSigning, certificate, private_key
from fedkseed.recipe.reading import parse
from fedkseed.run.loop import Result
from fedkseed.run.store import Store
from fedkseed.run.verify import verify
from fedkseed.tuned.gguf import write_gguf

from ..network.flower.conftest import Notes, Setting
from ..network.https.network import network
from ..network.ports import free_port
from ..report.browser import Browser, browser
from .conftest import require_chromium, trusting

SECONDS = 300.0  # for whatever is waited for, on a busy machine


def wait_until(condition: Callable[[], Any], what: Callable[[], str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"not within {SECONDS:g} s: {what()}"
        time.sleep(0.05)


class Person:
    """Somebody who takes part with a browser."""

    def __init__(self, page: Browser, url: str) -> None:
        self.page, self.url = page, url
        self.open()

    def open(self) -> None:
        self.page.open(f"{self.url}/")
        wait_until(lambda: self.page.run("document.body.dataset.ready") == "yes", lambda: str(self.page.complaints))

    def text(self, field: str) -> str:
        return self.page.run(f"document.getElementById({json.dumps(field)}).textContent")

    def click(self, button: str) -> None:
        self.page.run(f"document.getElementById({json.dumps(button)}).click()")

    def make_key(self, file: Path) -> Path:
        """A key in the browser; its public line in a file."""
        self.click("make-key")
        wait_until(lambda: self.text("public-line"), lambda: "a public line")
        file.write_text(self.text("public-line") + "\n")
        return file

    def allow(self, **limits: Any) -> None:
        for name, value in limits.items():
            field = f"document.getElementById('limit-{name}')"
            if isinstance(value, bool):
                self.page.run(f"{field}.checked = {json.dumps(value)}")
            else:
                text = "\n".join(value) if isinstance(value, list) else json.dumps(value)
                self.page.run(f"{field}.value = {json.dumps(text)}")

    def choose(self, authority: Path | None, rows: Path) -> None:
        if authority:
            self.page.choose("authority", authority)
            wait_until(lambda: "Good until" in self.text("authority-state"), lambda: self.text("authority-state"))
        self.page.choose("rows", rows)
        wait_until(lambda: self.text("rows-state"), lambda: "rows")

    def take_part(self) -> None:
        wait_until(lambda: not self.page.run("document.getElementById('start').disabled"), lambda: self.text("missing"))
        self.click("start")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text("log"), lambda: f"{text!r} in {self.text('log')}")

    @property
    def uploads(self) -> list[bytes]:
        """What the page shows as sent, round after round."""
        cells = "[...document.querySelectorAll('#rounds code')].map((cell) => cell.textContent)"
        return [bytes.fromhex(text) for text in self.page.run(cells)]

    def adapter(self, folder: Path) -> Adapter:
        """The adapter as the page saves it."""
        self.page.save_to(folder)
        self.click("adapter")
        wait_until((folder / "adapter.safetensors").exists, lambda: f"a file in {folder}")
        return Adapter.load(folder / "adapter.safetensors")


# Limits of an owner with a dozen rows.
FEW = {"heldOut": ["capital"], "leastExamples": 1, "leastBatch": 2, "leastSteps": 1}


@contextmanager
def own_client(setting: Setting, folder: Path, keys: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Client 0: that of `fedkseed join`, whose worker is not a process of its own; it ends when the server has."""
    owner = setting.owner(0)
    signing = ClientSigning(private_key(keys / "client-0"), certificate(keys / "ca.pem"), dialled="localhost")
    worker = TaskHandler(lambda recipe: load_client(owner, recipe), signing)
    monkeypatch.setattr(join, "ask_worker", lambda task, directory, opened: worker.reply(task).encode())
    ca, key = keys / "ca.pem", keys / "client-0"
    desk = join.WorkerDesk(folder, OwnerSettings(owner, 60.0, str(key), str(ca), "localhost"))
    client = join.HttpsClient(folder, url, ca, key, desk)

    def over(seconds: float) -> None:
        raise EOFError

    def serve() -> None:
        with suppress(EOFError):
            client.serve(lambda text: None, over)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_browser_and_our_client_end_with_one_model(setting, tmp_path, monkeypatch):
    require_chromium()
    for name in ("files", "profile"):
        (tmp_path / name).mkdir()
    for number in range(2):
        shutil.copy(setting.files[number], tmp_path / "files" / f"{number}.jsonl")
    algorithm = 'algorithm = "fedkseed"\nwire = "compact"\nprobes = 2'
    text = setting.text("minimum = 2", algorithm=algorithm, cohort="cohort = 2")
    recipe = with_network_defaults(parse(loads(text.replace(str(setting.folder / "data"), str(tmp_path / "files")))))
    start(recipe, tmp_path / "alone")
    same = Adapter.load(tmp_path / "alone").coefficients

    keys, store, port, progress = tmp_path / "keys", tmp_path / "run", free_port(), Notes()
    make(keys, 1, ["localhost"], 2)
    with Store.create(store, recipe.to_toml()):
        url, results = f"https://localhost:{port}", list[Result]()
    address = server.Address("127.0.0.1", port, page=Page(files_of(setting.model)))
    serving = threading.Thread(
        target=lambda: results.append(server.run(store, recipe, keys, address, progress)), daemon=True
    )
    serving.start()
    wait_until(lambda: progress.has("clients in browsers open the same address"), lambda: str(progress.told))
    with browser(tmp_path / "profile", trusting(keys / "server.pem")) as opened:
        person = Person(opened, url)
        add(keys, person.make_key(tmp_path / "browser.pub"))
        person.choose(keys / "ca.pem", tmp_path / "files" / "1.jsonl")
        person.allow(**FEW, secretBatches=False)
        person.take_part()
        person.wait_for("Connected as client 1")
        with own_client(setting, tmp_path / "own", keys, url, monkeypatch):
            person.wait_for("The run has ended.")
            serving.join(SECONDS)
        (result,), run = results, Store(store)
        assert [report["clients"] for report in run.reports()] == [[0, 1]] * 3
        assert verify(run).uploads == 6, "each round follows from what both have sent"
        ours, theirs = Adapter.load(store), person.adapter(tmp_path)
        np.testing.assert_array_equal(theirs.coefficients, ours.coefficients)
        assert (theirs.base, theirs.tuned, theirs.pool) == (ours.base, ours.tuned, ours.pool)
        assert person.text("digest") == ours.tuned == result.digest
        assert person.uploads == [run.receipts(done)[1].upload for done in (1, 2, 3)], "what is shown is what came"
        assert recipe_for_clients(Store(store).load_recipe(), 2).decode() in person.text("asked"), (
            "the recipe, as it came"
        )
        assert np.abs(ours.coefficients - same).max() < 0.02 * np.abs(same).max(), "the same batches and steps"
        assert all(asked.startswith((f"{url}/", "blob:")) for asked in opened.requests)
        assert not [entry for entry in opened.complaints if "Content Security Policy" in json.dumps(entry)]


@pytest.mark.network
def test_a_browser_that_is_stopped_and_opened_again_goes_on(setting, tmp_path):
    """Key, certificate and log are kept; what it was asked before is asked again, and its batches are a secret.

    Its model comes as a GGUF file, our client's from a folder.
    """
    require_chromium()
    text = setting.text("minimum = 2", cohort="cohort = 2", rounds="rounds = 4", steps="steps = 12")
    (tmp_path / "profile").mkdir()
    model = str(setting.model)
    write_gguf(tmp_path / "m.gguf", load_model(model), load_tokenizer(model), "f32")
    with network(tmp_path, text, setting.files[:1], setting.model) as federation:
        serving = federation.server("--page", "--model-files", tmp_path / "m.gguf")
        serving.wait_for("clients in browsers open the same address")
        with browser(tmp_path / "profile", trusting(federation.keys / "server.pem")) as opened:
            person = Person(opened, f"https://localhost:{federation.port}")
            line = person.make_key(tmp_path / "browser.pub").read_text()
            add(federation.keys, tmp_path / "browser.pub")
            person.choose(federation.keys / "ca.pem", setting.files[1])
            person.allow(**FEW)
            person.take_part()
            person.wait_for("Connected as client 1")
            federation.client(0)
            wait_until(lambda: federation.done, federation.everything)
            person.click("stop")
            person.wait_for("Stopped.")
            person.open()
            assert person.text("public-line") == line.strip()
            person.choose(None, setting.files[1])
            person.allow(**FEW)
            person.take_part()
            person.wait_for("The run has ended.")
            assert serving.wait() == 0, federation.everything()
            assert person.text("digest") == federation.digest()
            store = Store(federation.run)
            assert [report["clients"] for report in store.reports()] == [[0, 1]] * 4
            assert verify(store).uploads == 8
