"""The Ray Serve application: an ingress, and replicas of the server behind it."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import fields
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ...errors import ConfigError
from ..server.app import create_app
from ..server.config import ServerConfig, ServerLimits, key_from_environment
from ..server.limits import MaxBodySizeMiddleware
from ..server.security import SecurityMiddleware
from ..store.library import Library
from .asgi_proxy import answer
from .ingress import Ingress

# Ray's consistent hashing: a key always maps to the same replica, and when replicas are added or
# removed, only their keys move.
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_SECRETS = ("api_key",)
_RAY_SETTINGS = ("port", "grace_s")  # configured in the config file of Ray Serve


def app(args: Mapping[str, Any]) -> serve.Application:
    """Build the Ray Serve application: an HTTP ingress, and replicas that each run a Weft server.

    Ray calls it for `import_path: weft.service.scale:app` in a Serve config file, with that file's
    `args`. The API key and the database come from WEFT_API_KEY and WEFT_DB in Ray's environment.
    Configure the number and the resources of replicas under `deployments`, by the names Entrance
    and Replica.

    args: settings of `ServerConfig` for each replica, such as `models: [org/name]`.

    Raises: ConfigError for invalid settings.
    """
    config = config_of(args)
    replica = serve.deployment(
        name="Replica",
        num_replicas=2,
        max_ongoing_requests=1000,
        health_check_period_s=2,
        health_check_timeout_s=20,
        graceful_shutdown_timeout_s=config.grace_s + 5,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )(Replica)
    entrance = serve.deployment(
        name="Entrance",
        num_replicas=1,
        max_ongoing_requests=4000,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(IngressReplica))
    return entrance.bind(dict(args), replica.bind(dict(args)))


def config_of(args: Mapping[str, Any]) -> ServerConfig:
    """Convert the arguments of a Ray Serve application to the server's settings.

    The API key comes from the environment.

    args: fields of `ServerConfig`, as parsed from the application's config file.

    Raises: ConfigError.
    """
    names = [f.name for f in fields(ServerConfig) if f.name not in _SECRETS + _RAY_SETTINGS]
    for name in args:
        if name in _SECRETS:
            raise ConfigError(f"{name} cannot be set in a file; set WEFT_API_KEY where Ray starts")
        if name not in names:
            raise ConfigError(
                f"{name!r} is not a setting of the server; allowed are {', '.join(names)}"
            )
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in args.items()
    }
    if "limits" in settings:
        settings["limits"] = ServerLimits(**settings["limits"])
    return ServerConfig(**settings, api_key=key_from_environment())


class Replica:
    """A Weft server in a Ray process, without a socket. The ingress calls `answer` per request."""

    # Ray awaits it.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        """Start the server and wait until its models are loaded or have failed.

        args: settings of `ServerConfig`. Raises: the load error of a model that has failed.
        """
        self._app = create_app(config_of(args))
        self._open = AsyncExitStack()
        await self._open.enter_async_context(self._app.router.lifespan_context(self._app))
        models = self._app.state.service.models
        while any(model.state == "loading" for model in models):
            await asyncio.sleep(0.05)
        for model in models:
            model.ready()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[bytes]:
        """Process a request and yield its response in batches.

        scope: the request's ASGI scope, as `plain` returns it. body: the full request body.
        Each piece is a pickled list of ASGI messages.
        """
        batches = answer(self._app, scope, body)
        try:
            async for messages in batches:
                yield pickle.dumps(messages)
        finally:
            await batches.aclose()

    async def __del__(self) -> None:
        """End the jobs and close the models; Ray calls and awaits this."""
        await self._open.aclose()


class IngressReplica:
    """The Ray deployment that receives HTTP requests and forwards them to replicas.

    It checks API key, Host, Origin and body size first.
    """

    def __init__(self, args: Mapping[str, Any], replicas: DeploymentHandle) -> None:
        """Check the settings and open the library. replicas: handle of the deployment `Replica`."""
        self._config = config_of(args)
        self._library = Library(self._config.db)
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> SecurityMiddleware:
        entrance = Ingress(self._replicas, self._library)
        inner = MaxBodySizeMiddleware(entrance, self._config.limits)
        return SecurityMiddleware(
            inner, self._config, observe=lambda *_: None
        )  # Ray counts requests itself

    def __del__(self) -> None:
        self._library.close()
