"""`create_app`: the server as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ... import __version__
from . import n8loom, ollama
from .anthropic import ROUTERS as ANTHROPIC
from .anthropic.protocol import EVENTS as MESSAGE_EVENTS
from .config import ServerConfig
from .errors import handle_errors
from .idempotency import IdempotencyMiddleware, add_idempotency_header
from .limits import MaxBodySizeMiddleware
from .openai import ROUTERS as OPENAI
from .openai.protocol import EVENTS as OPENAI_EVENTS
from .openai.protocol import add_stream_events
from .routes import (
    docs,
    edits,
    growth,
    health,
    interchange,
    jobs,
    kv,
    looms,
    models,
    nodes,
    page,
    server,
    terminals,
    texts,
)
from .security import SecurityMiddleware
from .service import Service

# The routers of the APIs: each is an APIRouter of a file in `routes/`, `openai/` or
# `anthropic/`.
NATIVE = (
    *(server, models, texts, looms, nodes, growth),
    *(edits, jobs, kv, interchange, terminals),
)
ROUTERS = (
    *(health.router, page.router),
    *(each.router for each in NATIVE),
    *(*OPENAI, *ANTHROPIC),
    *(ollama.router, n8loom.router),
)


class Api(FastAPI):
    """The application; its OpenAPI schema includes what the middleware adds."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI schema, which is generated once."""
        if self.openapi_schema is None:
            add_idempotency_header(super().openapi())
            add_stream_events(super().openapi(), (*OPENAI_EVENTS, *MESSAGE_EVENTS))
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(config: ServerConfig | None = None) -> FastAPI:
    """Return the application; its lifespan loads and closes the models."""
    config = ServerConfig() if config is None else config
    service = Service(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = Api(
        title="Weft",
        version=__version__,
        summary="Trees of continuations of language models.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if config.has_docs else None,
    )
    app.state.service = service
    handle_errors(app)
    # `include_router` would create the models of each route again, at an app's first requests.
    for router in (*ROUTERS, *((docs.router,) if config.has_docs else ())):
        app.router.routes.extend(router.routes)
    # The last one added is the outermost.
    app.add_middleware(IdempotencyMiddleware)
    app.add_middleware(MaxBodySizeMiddleware, limits=config.limits)
    app.add_middleware(
        SecurityMiddleware, config=config, observe=service.metrics.observe, token=service.token
    )
    if config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["ETag", "Idempotent-Replayed", "X-Request-Id", "Retry-After"],
        )
    return app
