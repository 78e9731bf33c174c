"""Configuration of a server: models, address, access and limits."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..._core.tokens.chat import read_chat_template
from ..._core.validation import check_int, check_number
from ...errors import ConfigError
from ...lm.lm import Draft
from ...loading import parse_bytes

MIN_KEY = 16  # characters
# As browsers send it; web-based apps have their own schemes, such as app://obsidian.md.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Maxima that the server enforces for one request, and for all requests together."""

    n: int = 128  # branches of one node
    branches: int = 1024  # branches of a call over several nodes
    tokens: int = 32_768  # new tokens of one branch
    jobs: int = 256  # running or queued over all models; more get 429
    body_bytes: int = 8 << 20  # size of a request
    import_bytes: int = 256 << 20  # size of a request that imports a loom
    texts: int = 256  # texts in one call
    top: int = 100  # alternatives per token
    kept_jobs: int = 256  # ended jobs whose events can still be read

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check_int(name, getattr(self, name), 1)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All settings of a server: models, address, keys, database and limits.

    Raises: ConfigError for invalid values, on construction.
    """

    # Sources to load at start; requests without a model use the first.
    models: tuple[str, ...] = ("tiny",)
    # For all of these models, as `weft.load` takes them; `chat_template` only for the first.
    engine: str = "auto"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    n_ctx: int | None = None
    kv_budget: str | int = "auto"
    offload: str | int | None = None
    draft: Draft | None = None
    chat_template: str | os.PathLike[str] | None = None
    # Hosts other than loopback need an `api_key`.
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    # Additional names in the Host header, and additional origins of pages.
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    # Requests may load models below these folders and, with `hub`, from the Hub.
    model_roots: tuple[Path, ...] = ()
    hub: bool = False
    memory_budget: int | None = None  # bytes of all models and their KV budgets; None: no limit
    max_models: int | None = None  # None: `models` and three more
    db: str | None = field(default=None, repr=False)  # URL of the database of looms
    grace_s: float = 10.0  # seconds that jobs may continue after SIGTERM
    docs: bool | None = None  # serve /docs; None: only on a loopback host
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        if not 0 <= check_int("port", self.port) <= 65_535:
            raise ConfigError(f"port is {self.port}; allowed are 0 (any free one) to 65535")
        check_number("grace_s", self.grace_s, low=0)
        if check_int("max_models", self.model_limit, 1) < len(self.models):
            raise ConfigError(
                f"max_models is {self.max_models}, but the server is started with"
                f" {len(self.models)} models; allowed are {len(self.models)} or more",
                hint="raise --max-models, leave it out, or give fewer models",
            )
        parse_bytes(self.kv_budget)
        if self.offload is not None:
            parse_bytes(self.offload, "offload", auto=False)
        if self.chat_template is not None:
            read_chat_template(self.chat_template)
        if self.api_key is not None and len(self.api_key) < MIN_KEY:
            raise ConfigError(
                f"the API key has fewer than {MIN_KEY} characters and could be guessed",
                hint="python -c 'import secrets; print(secrets.token_urlsafe())' makes one",
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("the API key has characters that a header cannot carry; use ASCII")
        if self.is_public and self.api_key is None:
            raise ConfigError(
                f"host {self.host} can be reached from other machines, so an API key is needed",
                hint="set WEFT_API_KEY, or leave --host out to serve this machine only",
            )
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"origin is {origin!r}; allowed is scheme://host[:port], as browsers send it"
                )

    @property
    def model_limit(self) -> int:
        """The maximum number of models loaded at once."""
        return len(self.models) + 3 if self.max_models is None else self.max_models

    @property
    def is_public(self) -> bool:
        """True if other machines can reach the server."""
        if self.host.lower() == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return True

    @property
    def has_docs(self) -> bool:
        """True if /docs is served."""
        return not self.is_public if self.docs is None else self.docs

    def on(self, port: int) -> ServerConfig:
        """Return a copy of the configuration that listens on `port`."""
        return replace(self, port=port)


def key_from_environment() -> str | None:
    """Return WEFT_API_KEY; None if it is not set."""
    return os.environ.get("WEFT_API_KEY") or None
