"""`Address`: where a server is, which of its models is meant, and who may have the key."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from ...errors import ConfigError

_PLAIN = "/:@~+ ,()\\"  # what needs no quoting in an option's value
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

    model: its name for the model; "" for the only one it has. options: what stands behind a `?` of
    the fragment, as text: `http://host:8000/v1#model?tokenizer=./folder`; before it, too, where
    they are options by their names.
    """

    base: str
    model: str
    options: dict[str, str]

    @classmethod
    def read(cls, url: str, model: str = "") -> Address:
        """Return the parts of an address. Raises: ConfigError, which shows no secret of it."""
        try:
            if url.lower().startswith(OLLAMA_SCHEME):
                url = f"{ollama_url()}#{url[len(OLLAMA_SCHEME) :]}"
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"the server's address cannot be read: {error}") from None
        if not host:
            raise ConfigError(f"{url!r} names no host; an address is http://host:8000/v1#model")
        asked = [each for each in parts.query.split("&") if each]
        if parts.username is not None or any(
            each.partition("=")[0] not in OPTIONS for each in asked
        ):
            raise ConfigError(
                "the server's address has a user, a password or a query; these would stand in saved"
                " looms. Give a key by token=… or WEFT_API_KEY; options that an address may have"
                f" are {', '.join(OPTIONS)}"
            )
        name, _, rest = parts.fragment.partition("?")
        if model and name and model != name:
            raise ConfigError(f"two models: {name!r} in the address and model={model!r}; give one")
        shown = f"[{host}]" if ":" in host else host
        place = shown if port is None else f"{shown}:{port}"
        base = f"{parts.scheme.lower()}://{place}{parts.path.rstrip('/')}"
        pairs = (each.partition("=") for each in [*asked, *rest.split("&")] if each)
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
        """Nobody on the way can read what is sent."""
        return self.base.startswith("https:")

    @property
    def is_here(self) -> bool:
        """It is this machine."""
        name = urlsplit(self.base).hostname or ""
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return name == "localhost"

    def with_model(self, model: str) -> str:
        """Return the whole address again, with this name."""
        pairs = ((name, quote(value, safe=_PLAIN)) for name, value in self.options.items())
        rest = "&".join(f"{name}={value}" for name, value in pairs)
        return f"{self.base}#{model}" + (f"?{rest}" if rest else "")

    def short_name(self, model: str) -> str:
        """Return what to call a model of this server: no folders, which servers often name."""
        return f"{model.rstrip('/').rpartition('/')[2] or model} @ {self.host}"

    def key(self, token: str | None) -> str | None:
        """Return the key to send: the one given, WEFT_API_KEY, or OPENAI_API_KEY.

        The last is some other service's as a rule: it goes to encrypted addresses and to this
        machine only. Raises: ConfigError for what no header can hold, without showing it.
        """
        key = token or os.environ.get("WEFT_API_KEY")
        if not key and (self.is_encrypted or self.is_here):
            key = os.environ.get("OPENAI_API_KEY")
        if key and not _KEY.fullmatch(key):
            raise ConfigError("the key has characters that no key has: spaces or letters like ä")
        return key or None
