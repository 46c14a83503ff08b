"""A front's HTTP application: texts here, everything else by the dispatcher."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pdkv.config import RouterConfig
from pdkv.models.config import ModelConfig
from pdkv.router.fronts.remote import RemoteDesk
from pdkv.router.http.app import for_browsers, generating, model_provider, on_texts, serve, served_model
from pdkv.router.http.read.intake import Intake, Shared
from pdkv.router.http.read.text_pool import TextPool
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.drain import Drain
from pdkv.router.metrics.requests import ENDPOINTS, Totals
from pdkv.text import Tokenizer


class FrontApp:
    """ASGI: POST endpoints by path, and a desk for all other requests."""

    def __init__(
        self,
        desk: RemoteDesk,
        tokenizer: Tokenizer,
        model_config: ModelConfig,
        names: Sequence[str],
        *,
        config: RouterConfig,
        bodies: ByteBudget,
        sampling_defaults: Mapping[str, Any] | None = None,
        logits_processors: Sequence[str] = (),
    ) -> None:
        """The arguments are those of `create_app`."""
        _ = tokenizer.max_token_chars  # takes a tenth of a second: not within the first request
        served = served_model(config, tokenizer, model_config, names, None, sampling_defaults, logits_processors)
        limits, self.pool, self.drain = config.http, TextPool(), Drain(desk)
        desk.num_text_bytes = lambda: self.pool.held
        answers = ByteBudget(limits.max_answer_memory, "the answers that are held (--max-answer-memory)")
        intake, model = Intake(limits, bodies, self.pool), model_provider(desk, served)
        shared = Shared(desk, model, Totals(), limits, config.api, intake, self.pool, answers, self.drain, None, None)
        endpoints = {path: endpoint for path, endpoint in generating(shared).items() if path in ENDPOINTS}
        self._desk, self._has_browsers = desk, bool(config.access.cors_origin)
        self._endpoints: Mapping[str, ASGIApp] = for_browsers({**endpoints, **on_texts(shared)}, config.access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        assert scope["type"] == "http", "there is no lifespan"
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._desk.forward(scope, receive, send)
            return
        await serve(endpoint, scope, receive, send, self._has_browsers)
