"""The page on which a browser takes part: its files, and those of the model (docs/browser.md).

    GET /                    the page; beside it its style and scripts, by their names
    GET /model/files.json    size and version of each file of the model, if the server gives them away
    GET /model/NAME          one of them

The page may connect to this server alone, and load nothing from elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from ...errors import FedKSeedError
from ...files import shipped

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
DESCRIPTION = ("config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "weights"  # the address of model.safetensors, or of a GGUF file
# WebAssembly needs a word of its own; there is no way for a page to evaluate text.
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY, "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer", "x-content-type-options": "nosniff", "cache-control": "no-cache",
}  # fmt: skip
IMMUTABLE = {"cache-control": "public, max-age=31536000, immutable"}


def folder() -> Path:
    """The folder of the page's files."""
    return shipped("clients/browser")


@dataclass(frozen=True, slots=True)
class Page:
    """A page for clients in browsers.

    Attributes:
        files: those of the model, see `files_of`; without them each visitor needs copies.
    """

    files: Mapping[str, Path | bytes] = field(default_factory=dict)

    def routes(self) -> list[Route]:
        """The routes of the page, its scripts and the model."""
        page = {path.name: path for path in sorted(folder().iterdir()) if path.suffix in MEDIA_TYPES}
        routes = [_static("/", page["index.html"]), *(_static(f"/{name}", path) for name, path in page.items())]
        if not self.files:
            return routes

        async def listing(request: Request) -> Response:
            about = {name: {"size": _size(of), "version": _version(of)} for name, of in self.files.items()}
            return JSONResponse(about, headers=HEADERS)

        routes.append(Route("/model/files.json", listing))
        # The page asks for a file by its version.
        return routes + [_static(f"/model/{name}", of, HEADERS | IMMUTABLE) for name, of in self.files.items()]


def files_of(model: Path) -> dict[str, Path | bytes]:
    """The files of a model by their addresses; for a GGUF file, those that describe it are made from it.

    Raises:
        FedKSeedError: the model can't be read, or is neither a GGUF file nor a folder with the files of a Llama.
    """
    if model.suffix == ".gguf":
        from ...models.gguf_config import gguf_config
        from ...models.gguf_header import read_once
        from ...models.load import load_tokenizer, save_tokenizer

        with read_once(), TemporaryDirectory() as made:
            save_tokenizer(load_tokenizer(str(model)), Path(made))
            gguf_config(model).save_pretrained(made)
            return {name: (Path(made) / name).read_bytes() for name in DESCRIPTION} | {WEIGHTS: model}
    paths = {name: model / name for name in DESCRIPTION} | {WEIGHTS: model / "model.safetensors"}
    if lacking := [path.name for path in paths.values() if not path.is_file()]:
        needed = ", ".join((*DESCRIPTION, "model.safetensors"))
        raise FedKSeedError(f"{model} has no {lacking[0]}; the page's Llama needs {needed}, or a GGUF file")
    return {**paths}


def _size(of: Path | bytes) -> int:
    return len(of) if isinstance(of, bytes) else of.stat().st_size


def _version(of: Path | bytes) -> str:
    return f"{crc32(of):x}" if isinstance(of, bytes) else f"{of.stat().st_mtime_ns:x}-{of.stat().st_size:x}"


def _static(address: str, of: Path | bytes, headers: dict[str, str] = HEADERS) -> Route:
    async def file(request: Request) -> Response:
        if isinstance(of, bytes):
            return Response(of, media_type="application/json", headers=headers)
        kind = MEDIA_TYPES.get(of.suffix, "application/octet-stream")
        return FileResponse(of, media_type=kind, headers=headers)

    return Route(address, file)
