"""A headless Chromium with the page of clients/browser, from a server of ours on loopback."""

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedkseed.network.https import server
from fedkseed.network.https.browser_page import Page, files_of
from fedkseed.network.https.connections import Connections

from ..network.audiences import AUDIENCES
from ..network.flower.conftest import setting as setting
from ..network.ports import free_port
from ..report.browser import CHROMIUM, Browser, browser


def trusting(certificate: Path) -> str:
    """The flag by which Chromium takes a server's certificate, as if its authority were installed."""
    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    digest = hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).digest()
    return f"--ignore-certificate-errors-spki-list={base64.b64encode(digest).decode()}"


def require_chromium() -> None:
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on PATH for the client in a browser")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Browser]:
    """The page with nobody connected; it gives away the model of `model_folder`."""
    require_chromium()
    folder, port = tmp_path_factory.mktemp("page"), free_port()
    address = server.Address("127.0.0.1", port, tls=False, page=Page(files_of(model_folder)))
    with server.listening(Connections(AUDIENCES, []), address, 1000, folder), browser(folder) as opened:
        opened.open(f"http://127.0.0.1:{port}/")
        yield opened


def run(page: Browser, modules: str, body: str, **values: Any) -> Any:
    """What a function of the page returns: its modules by their names, and values from here.

    Args:
        body: statements of an async function.
    """
    imports = "".join(f"const {name} = await import('/{name}.js'); " for name in modules.split())
    given = "".join(f"const {name} = {json.dumps(value)}; " for name, value in values.items())
    return page.run(f"(async () => {{ {imports}{given}{body} }})()")
