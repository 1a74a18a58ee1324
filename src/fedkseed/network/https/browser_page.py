"""The page on which a browser takes part: its files, and those of the model (docs/browser.md).

    GET /                    the page; beside it its style and scripts, by their names
    GET /model/files.json    size and version of each file of the model, if the server gives them away
    GET /model/NAME          one of them

The server makes none of it. The page may connect to this server alone, and load nothing from elsewhere.
"""

from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from ...errors import FedKSeedError
from ...files import shipped

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
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
    """A page for clients in browsers."""

    model: Path | None = None  # folder whose files are given to whoever asks; None: each visitor needs copies

    def __post_init__(self) -> None:
        lacking = [name for name in MODEL_FILES if self.model is not None and not (self.model / name).is_file()]
        if lacking:
            raise FedKSeedError(f"{self.model} has no {lacking[0]}; the page's Llama needs {', '.join(MODEL_FILES)}")

    def routes(self) -> list[Route]:
        """The routes of the page, its scripts and the model."""
        page = {path.name: path for path in sorted(folder().iterdir()) if path.suffix in MEDIA_TYPES}
        routes = [_static("/", page["index.html"]), *(_static(f"/{name}", path) for name, path in page.items())]
        if self.model is None:
            return routes
        paths = {name: self.model / name for name in MODEL_FILES}

        async def listing(request: Request) -> Response:
            stats = {name: path.stat() for name, path in paths.items()}
            about = {name: {"size": s.st_size, "version": f"{s.st_mtime_ns:x}"} for name, s in stats.items()}
            return JSONResponse(about, headers=HEADERS)

        routes.append(Route("/model/files.json", listing))
        # The page asks for a file by its version.
        return routes + [_static(f"/model/{name}", path, HEADERS | IMMUTABLE) for name, path in paths.items()]


def _static(address: str, path: Path, headers: dict[str, str] = HEADERS) -> Route:
    async def file(request: Request) -> Response:
        kind = MEDIA_TYPES.get(path.suffix, "application/octet-stream")
        return FileResponse(path, media_type=kind, headers=headers)

    return Route(address, file)
