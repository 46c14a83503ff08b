"""Answers to HTTP/1.0 clients, which know no chunks: one without a length ends where its connection does."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def unframed(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """The application, for the HTTP/1.0 request of this cycle; uvicorn closes such a connection after its answer."""
    cycle.waiting_for_100_continue = False  # this version has no interim responses, either

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:  # for uvicorn, each piece is as long as what is left
                cycle.chunked_encoding, cycle.expected_content_length = False, len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return serve
