"""The page of `offspec serve`: files that browsers get, with headers that forbid everything but these files.

The page itself holds no secret: what it asks for goes through the API, with the API's checks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FOLDER = "page"
# No script but these files', no text as HTML (trusted types: innerHTML raises), no other host, no frame around it.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file, and `/` for the page itself."""
    names = [file.name for file in (files(__package__) / FOLDER).iterdir() if _kind(file.name) in TYPES]
    routes = [Route(f"/{FOLDER}/{name}", _sender(name)) for name in names]
    return [Route("/", _sender("index.html")), *routes]


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _sender(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = (files(__package__) / FOLDER / name).read_bytes()
    media_type = f"{TYPES[_kind(name)]}; charset=utf-8"

    async def send(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return send
