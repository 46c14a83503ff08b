"""GET /dashboard: a page that shows the deployment live. Its files hold no data: a script reads /admin/overview."""

from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdkv.router.metrics.overview import Overview

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def dashboard_routes(overview: Overview) -> list[Route]:
    """The routes of the page, its files, and its data, which an admin's key opens if clients need keys."""

    async def tell(request: Request) -> Response:
        return Response(
            overview.json(), media_type="application/json", headers=_HEADERS | {"cache-control": "no-store"}
        )

    files = sorted(Path(__file__).with_name("dashboard").iterdir())
    return [Route("/admin/overview", tell), *(_route(path) for path in files if path.suffix in _TYPES)]


def _route(path: Path) -> Route:
    headers = _HEADERS | {"cache-control": "no-cache"}
    response = Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=headers)
    return Route("/dashboard" if path.suffix == ".html" else f"/dashboard/{path.name}", partial(_send, response))


async def _send(response: Response, request: Request) -> Response:
    return response
