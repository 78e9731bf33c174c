"""`Address`: a server's base address, the model on it, and who may receive the key."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from ...errors import ConfigError

_PLAIN = "/:@~+ ,()\\"  # characters that need no quoting in an option's value
OPTIONS = (
    *("tokenizer", "api", "n_ctx", "dialect", "most", "together", "steps", "connect_s", "first_s"),
    *("between_s", "retries"),
)
_KEY = re.compile(r"[\x21-\x7e]+")
OLLAMA_SCHEME = "ollama:"  # ollama:NAME is a model of the Ollama that OLLAMA_HOST names
OLLAMA_PORT = 11434


def ollama_url(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of the Ollama that OLLAMA_HOST names, by default the local one."""
    given = environment.get("OLLAMA_HOST", "").strip().rstrip("/")
    url = given if "://" in given else f"http://{given or '127.0.0.1'}"
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname in (None, "0.0.0.0", "::") else parts.hostname
    host = f"[{host}]" if host and ":" in host else host
    port = parts.port or (OLLAMA_PORT if "://" not in given else None)
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}/v1"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's base address, `http://host:8000/v1`, without its fragment.

    `ollama:NAME` stands for `http://127.0.0.1:11434/v1#NAME`.

    Attributes:
        base: the address without query and fragment.
        model: the server's name of the model; "" for its only model.
        options: options after a `?` in the fragment, as text:
            `http://host:8000/v1#model?tokenizer=./folder`. The query may also contain them.
    """

    base: str
    model: str
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str, model: str = "") -> Address:
        """Parse an address.

        Raises:
            ConfigError: the address is invalid; the message shows no secret of it.
        """
        try:
            if url.lower().startswith(OLLAMA_SCHEME):
                url = f"{ollama_url()}#{url[len(OLLAMA_SCHEME) :]}"
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"the server's address cannot be read: {error}") from None
        if not host:
            raise ConfigError(f"{url!r} has no host; an address is http://host:8000/v1#model")
        query = [each for each in parts.query.split("&") if each]
        if parts.username is not None or any(
            each.partition("=")[0] not in OPTIONS for each in query
        ):
            raise ConfigError(
                "the server's address has a user, a password or a query; saved looms would contain"
                " these. Pass a key by token=… or WEFT_API_KEY; allowed options of an address are"
                f" {', '.join(OPTIONS)}"
            )
        name, _, rest = parts.fragment.partition("?")
        if model and name and model != name:
            raise ConfigError(f"two models: {name!r} in the address and model={model!r}; give one")
        host = f"[{host}]" if ":" in host else host
        netloc = host if port is None else f"{host}:{port}"
        base = f"{parts.scheme.lower()}://{netloc}{parts.path.rstrip('/')}"
        pairs = (each.partition("=") for each in [*query, *rest.split("&")] if each)
        return cls(base, model or name, {unquote(key): unquote(value) for key, _, value in pairs})

    @property
    def root(self) -> str:
        """The address without the protocol's /v1."""
        return self.base.removesuffix("/v1")

    @property
    def host(self) -> str:
        """Host and port."""
        return urlsplit(self.base).netloc

    @property
    def is_encrypted(self) -> bool:
        """True if requests are encrypted."""
        return self.base.startswith("https:")

    @property
    def is_loopback(self) -> bool:
        """True if the server is on this machine."""
        name = urlsplit(self.base).hostname or ""
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return name == "localhost"

    def with_model(self, model: str) -> str:
        """Return the full address with options and this model name."""
        pairs = ((name, quote(value, safe=_PLAIN)) for name, value in self.options.items())
        rest = "&".join(f"{name}={value}" for name, value in pairs)
        return f"{self.base}#{model}" + (f"?{rest}" if rest else "")

    def short_name(self, model: str) -> str:
        """Return a display name for a model of this server, without folders, which servers often
        include.
        """
        return f"{model.rstrip('/').rpartition('/')[2] or model} @ {self.host}"

    def key(self, token: str | None) -> str | None:
        """Return the key to send: the given one, WEFT_API_KEY, or OPENAI_API_KEY.

        OPENAI_API_KEY usually belongs to another service. It is sent only to encrypted addresses
        and to this machine.

        Raises:
            ConfigError: the key cannot be sent in a header; the message does not show it.
        """
        key = token or os.environ.get("WEFT_API_KEY")
        if not key and (self.is_encrypted or self.is_loopback):
            key = os.environ.get("OPENAI_API_KEY")
        if key and not _KEY.fullmatch(key):
            raise ConfigError("the key has invalid characters; allowed are printable ASCII")
        return key or None
