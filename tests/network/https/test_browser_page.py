"""The page for browsers as a server gives it: its files, its headers, the model's files, and nothing else."""

import json
from collections.abc import Iterator

import httpx
import pytest

from fedkseed import FedKSeedError
from fedkseed.models.load import load_model, load_tokenizer
from fedkseed.network.https import browser_page as page
from fedkseed.network.https import server
from fedkseed.network.https.connections import Connections
from fedkseed.tuned.gguf import write_gguf

from ..audiences import AUDIENCES
from ..ports import free_port


@pytest.fixture(scope="module")
def http(tmp_path_factory, model_folder) -> Iterator[httpx.Client]:
    port = free_port()
    address = server.Address("127.0.0.1", port, tls=False, page=page.Page(page.files_of(model_folder)))
    with (
        server.listening(Connections(AUDIENCES, []), address, 1000, tmp_path_factory.mktemp("keys")),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as opened,
    ):
        yield opened


def test_the_page_and_its_scripts_are_given_with_a_policy_that_lets_nothing_out(http):
    names = ["", *sorted(path.name for path in page.folder().iterdir() if path.suffix in page.MEDIA_TYPES)]
    assert len(names) > 15
    for name in names:
        answer = http.get(f"/{name}")
        assert answer.status_code == 200
        kind = page.MEDIA_TYPES.get(f".{name.rpartition('.')[2]}", "text/html")
        assert answer.headers["content-type"].startswith(kind)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert (policy["default-src"], policy["connect-src"], policy["worker-src"]) == ("'none'", "'self'", "'self'")
        assert not {"'unsafe-inline'", "'unsafe-eval'", "*"} & {word for one in policy.values() for word in one.split()}
        assert answer.headers["cache-control"] == "no-cache"
    text = http.get("/").text
    assert not [part for part in ("http:", "https:", "style=", "onclick", "<script>") if part in text]


def test_other_files_are_not_given(http):
    for path in ("/tsconfig.json", "/model/", "/model/../run.sqlite", "/model/special_tokens_map.json"):
        assert http.get(path).status_code == 404, path


def test_files_of_the_model_are_given_whole_under_an_address_that_changes_with_them(http, model_folder):
    listed = http.get("/model/files.json").json()
    assert sorted(listed) == sorted((*page.DESCRIPTION, page.WEIGHTS))
    for name, about in listed.items():
        answer = http.get(f"/model/{name}?{about['version']}")
        file = "model.safetensors" if name == page.WEIGHTS else name
        assert answer.content == (model_folder / file).read_bytes()
        assert len(answer.content) == about["size"]
        assert "immutable" in answer.headers["cache-control"]


def test_without_a_folder_no_file_of_a_model_is_given():
    addresses = [route.path for route in page.Page().routes()]
    assert "/" in addresses
    assert not [address for address in addresses if address.startswith("/model/")]


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(FedKSeedError, match=r"has no tokenizer\.json; the page's Llama needs"):
        page.files_of(tmp_path)


def test_a_gguf_file_is_given_with_a_description_that_is_made_of_it(tmp_path, model_folder):
    model = str(model_folder)
    write_gguf(path := tmp_path / "m.gguf", load_model(model), load_tokenizer(model), "f32")
    given = page.files_of(path)
    assert given[page.WEIGHTS] == path
    assert json.loads(given["config.json"])["model_type"] == "llama"
    assert len(json.loads(given["tokenizer.json"])["model"]["vocab"]) == len(load_tokenizer(model))
    path.write_bytes(b"GGUF and no more")
    with pytest.raises(FedKSeedError):
        page.files_of(path)
    with pytest.raises(FedKSeedError, match=r"has no config\.json"):
        page.files_of(model_folder / "model.safetensors")
