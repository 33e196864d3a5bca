"""Serves the page, its few files and its numbers. All addresses are relative: a path prefix changes nothing."""

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from fledge.server.errors import RequestError
from fledge.server.metrics import Metrics

# No script and no style but our own files, no other hosts: the page shows text that models and clients wrote.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked again each time, and answered "not modified"
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = ("page.css", "page.js", "charts.js", "chat.js", "icon.svg")

Authorize = Callable[[Request], Awaitable[Any]]


class _File:
    def __init__(self, name: str) -> None:
        self.body = (resources.files(__package__) / "static" / name).read_bytes()
        tag = hashlib.blake2b(self.body, digest_size=8).hexdigest()
        self.headers = {**_HEADERS, "Content-Type": _TYPES[name.rsplit(".", 1)[1]], "ETag": f'"{tag}"'}

    def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self.headers["ETag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers)


def router(metrics: Metrics, *, authorize: Authorize | None = None) -> APIRouter:
    """Return the routes of the page. `authorize` refuses a request for numbers by raising; the page itself is open."""
    routes = APIRouter(include_in_schema=False)
    guards: Sequence[Any] = () if authorize is None else (Depends(authorize),)
    index = _File("index.html")

    @routes.get("/")
    async def page(request: Request) -> Response:
        return index.answer(request)

    @routes.get("/dashboard/data", dependencies=guards)
    async def data(response: Response, after: str = "-1") -> dict[str, Any]:
        if not re.fullmatch(r"-1|[0-9]{1,15}", after):
            raise RequestError("after: expected the number of an interval", param="after")
        response.headers["Cache-Control"] = "no-store"
        return metrics.snapshot(int(after))

    for name in FILES:
        routes.add_api_route(f"/dashboard/{name}", _File(name).answer, methods=["GET"], response_class=Response)
    return routes
