"""The connection of a client to its server: address, key, and translation of errors."""

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
_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)
# For SERVER_PATH, which a server answers at once; other calls may wait for a model.
_AT_ONCE = httpx2.Timeout(10.0)
# For streams, in which the server sends something every 15 s.
STREAM = httpx2.Timeout(45.0, connect=10.0)
# Errors of an open connection; the server may have executed the request or not.
BROKEN = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)
_HINT = "start one with weft serve, or set WEFT_HOST to its address"


class Connection:
    """A client's address, API key and error handling; shared by `Client` and `AsyncClient`.

    Errors never contain the key.
    """

    def __init__(self, base_url: str | None, api_key: str | None) -> None:
        server_address: ServerAddress = (
            address() if base_url is None else address({"WEFT_HOST": base_url})
        )
        self.base = server_address.url
        key = os.environ.get("WEFT_API_KEY") if api_key is None else api_key
        self._key = key or ""
        self.is_verified = False  # a Weft server has answered

    def http_client_options(self) -> dict[str, Any]:
        """Return keyword arguments for `httpx2.Client`: base URL, headers with the key, timeout."""
        headers = {"user-agent": "weft"}
        if self._key:
            if not (self._key.isascii() and self._key.isprintable()):
                raise ConfigError("the API key has characters that a header cannot carry")
            headers["authorization"] = f"Bearer {self._key}"
        is_encrypted = self.base.startswith("https:")
        return {
            "base_url": self.base,
            "headers": headers,
            "timeout": _TIMEOUT,
            # NOTE: a proxy from the environment could read unencrypted requests and the key.
            "trust_env": is_encrypted,
            # Loading the certificates takes 20 ms, and plain HTTP needs none.
            "verify": is_encrypted,
            "follow_redirects": False,
        }

    def is_allowed(self, call: ApiCall[Any]) -> bool:
        """Return True if the call may be sent: the server is verified, or the call verifies it."""
        return self.is_verified or call.path == SERVER_PATH

    def request_options(self, call: ApiCall[Any]) -> dict[str, Any]:
        """Return the keyword arguments for sending a call with the HTTP client."""
        return {**call.options, "timeout": _AT_ONCE} if call.path == SERVER_PATH else call.options

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Convert errors that the HTTP client raises in the block.

        An invalid address becomes ConfigError, any other error Unreachable.
        """
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(f"no server is running at {self.base}", hint=_HINT) from error
        except httpx2.ReadTimeout as error:
            message = f"no response from {self.base}: it accepts connections but does not answer"
            raise Unreachable(message, hint=_HINT) from error
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
            raise ConfigError(f"{self.base} is not a valid server address: {error}") from error
        except httpx2.HTTPError as error:
            message = str(error) or type(error).__name__
            raise Unreachable(f"the connection to {self.base} broke: {message}") from error

    def check(self, response: httpx2.Response) -> None:
        """Raise the exception for an error response, whose body must have been read.

        Does nothing for a successful response.
        """
        if response.is_success:
            return
        if response.status_code == 404 and response.url.path == SERVER_PATH:
            raise not_weft_error(self.base, "404, ")
        raise error_from_response(
            response.status_code, response.content, response.headers, self.base
        )

    def read(self, response: httpx2.Response, call: ApiCall[Answer]) -> Answer:
        """Return the response's body as `call.read` converts it."""
        self.check(response)
        try:
            content: Any = response.content
            if call.is_json:
                content = response.json() if content else None
            answer = call.read(content)
        except ValueError as error:  # invalid JSON, or other fields
            raise not_weft_error(self.base) from error
        self.is_verified = True
        return answer
