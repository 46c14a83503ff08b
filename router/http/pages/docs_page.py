"""GET /docs: Swagger UI over /openapi.json. Its files come from the package fastapi-offline: nothing is fetched."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")


def docs_routes() -> list[Route]:
    """The routes of the page, its files, and the OpenAPI document."""
    return [Route("/docs", _page), Route("/docs/{file}", _file), Route("/openapi.json", _openapi)]


class _WholeFile(FileResponse):
    """The whole file, whatever range is requested: errors about ranges would not have the usual format."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [header for header in scope["headers"] if header[0] != b"range"]
        await super().__call__({**scope, "headers": headers}, receive, send)


async def _page(request: Request) -> Response:
    js, css, icon = (f"docs/{name}" for name in _FILES)
    options: dict[str, Any] = {"swagger_js_url": js, "swagger_css_url": css, "swagger_favicon_url": icon}
    return get_swagger_ui_html(
        openapi_url="openapi.json", title="pdkv", swagger_ui_parameters={"validatorUrl": None}, **options
    )


async def _openapi(request: Request) -> Response:
    data = await asyncio.to_thread(lambda: msgspec.json.encode(request.app.openapi()))  # the first time some 30 ms
    return Response(data, media_type="application/json")


async def _file(request: Request) -> Response:
    name = request.path_params["file"]
    package = find_spec("fastapi_offline")  # found, not imported
    if name not in _FILES or package is None or package.origin is None:
        raise HTTPException(404)
    return _WholeFile(Path(package.origin).parent / "static" / name, headers={"cache-control": "max-age=86400"})
