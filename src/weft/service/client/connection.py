"""How a client reaches its server: the address, the key, and what broken connections become."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx2

from ...errors import ConfigError, Unreachable
from ..api.address import ServerAddress, address
from .call import SERVER_PATH, ApiCall, error_from_response, not_weft_error

Answer = TypeVar("Answer")
_PATIENCE = httpx2.Timeout(600.0, connect=10.0)
# Of what is answered at once: who is there. All else may take as long as a model takes.
_AT_ONCE = httpx2.Timeout(10.0)
# Of a stream: the server sends something every 15 s.
STREAM = httpx2.Timeout(45.0, connect=10.0)
# What a connection that was there ends with; the request may have been done, or not.
BROKEN = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)
_WHERE = "weft serve starts one; WEFT_HOST says where"


class Connection:
    """What both clients have of a connection; the key is in no word of it."""

    def __init__(self, base_url: str | None, api_key: str | None) -> None:
        found: ServerAddress = address() if base_url is None else address({"WEFT_HOST": base_url})
        self.base = found.url
        key = os.environ.get("WEFT_API_KEY") if api_key is None else api_key
        self._key = key or ""
        self.is_verified = False  # whether Weft has answered there

    def options(self) -> dict[str, Any]:
        """Return the options of the HTTP client."""
        headers = {"user-agent": "weft"}
        if self._key:
            if not (self._key.isascii() and self._key.isprintable()):
                raise ConfigError("the API key has characters that a header cannot carry")
            headers["authorization"] = f"Bearer {self._key}"
        is_encrypted = self.base.startswith("https:")
        return {
            "base_url": self.base,
            "headers": headers,
            "timeout": _PATIENCE,
            # NOTE: a proxy of the environment may read what is not encrypted, the key included.
            "trust_env": is_encrypted,
            # Loading the certificates takes 20 ms; without encryption, redirects and proxies none
            # is looked at.
            "verify": is_encrypted,
            "follow_redirects": False,
        }

    def is_allowed(self, call: ApiCall[Any]) -> bool:
        """Whether Weft has answered there, or is asked for just that; else it is to be asked."""
        return self.is_verified or call.path == SERVER_PATH

    def request_options(self, call: ApiCall[Any]) -> dict[str, Any]:
        """Return a request as the HTTP client takes it."""
        return {**call.options, "timeout": _AT_ONCE} if call.path == SERVER_PATH else call.options

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Let a connection that fails be told as such. Raises: Unreachable."""
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(f"no server answers at {self.base}", hint=_WHERE) from error
        except httpx2.ReadTimeout as error:
            what = f"no server answers at {self.base}: it takes what is asked, and is silent"
            raise Unreachable(what, hint=_WHERE) from error
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise ConfigError(f"the address {self.base} cannot be asked: {error}") from error
        except httpx2.HTTPError as error:
            what = str(error) or type(error).__name__
            raise Unreachable(f"the connection to {self.base} broke: {what}") from error

    def check(self, response: httpx2.Response) -> None:
        """Raise what an answer that is no success tells of; its body has been read."""
        if response.is_success:
            return
        if response.status_code == 404 and response.url.path == SERVER_PATH:
            raise not_weft_error(self.base, "404, ")
        raise error_from_response(
            response.status_code, response.content, response.headers, self.base
        )

    def read(self, response: httpx2.Response, call: ApiCall[Answer]) -> Answer:
        """Return what an answer holds."""
        self.check(response)
        try:
            told: Any = response.content
            if call.is_json:
                told = response.json() if told else None
            answer = call.read(told)
        except ValueError as error:  # no JSON, or other fields
            raise not_weft_error(self.base) from error
        self.is_verified = True
        return answer
