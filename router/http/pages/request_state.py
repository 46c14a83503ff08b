"""GET /admin/requests/ID: what is known of requests of that id. For operators: it says where others' requests run."""

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdkv.base.limits import clip
from pdkv.router.generations.request_log import NUM_ENDED
from pdkv.router.http.server.errors import error_body, json_response

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher


def request_route(dispatcher: "Dispatcher") -> Route:
    """The route, for an application that only operators reach. ID is a client's x-request-id, a generation's id in
    pdkv's logs, or a trace's.
    """

    async def show(request: Request) -> Response:
        name = request.path_params["id"]
        found = dispatcher.find_requests(name) if name else []
        if found:
            return json_response({"requests": found})
        text = f"no request {clip(name)!r} is running, or is among the last {NUM_ENDED} choices that ended"
        return json_response(error_body(text, status=404, code="request_not_found"), 404)

    return Route("/admin/requests/{id:path}", show)
