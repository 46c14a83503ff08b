"""GET /docs: Swagger UI over /openapi.json. Its files are those of the package fastapi-offline: nothing is fetched."""

from importlib.util import find_spec
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>pdkv</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null})
</script>
</body>
</html>
"""


def docs_routes() -> list[Route]:
    """The page and its files."""
    return [Route("/docs", _page), Route("/docs/{file}", _file)]


class _WholeFile(FileResponse):
    """Whatever part of it is asked for: errors about ranges would not have the shape of all others."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [header for header in scope["headers"] if header[0] != b"range"]
        await super().__call__({**scope, "headers": headers}, receive, send)


async def _page(request: Request) -> Response:
    return HTMLResponse(_PAGE)


async def _file(request: Request) -> Response:
    name = request.path_params["file"]
    package = find_spec("fastapi_offline")  # found, not imported
    if name not in _FILES or package is None or package.origin is None:
        raise HTTPException(404)
    return _WholeFile(Path(package.origin).parent / "static" / name, headers={"cache-control": "max-age=86400"})
