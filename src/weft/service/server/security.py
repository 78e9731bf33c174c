"""Checks that run before a request is read: Host, Origin and API key.

Every route is behind them, including the page, the metrics and the schema.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .error_bodies import is_anthropic
from .errors import RequestError, error_response

if TYPE_CHECKING:
    from .asgi import App, Message, Receive, Scope, Send
    from .config import ServerConfig

# Called with (method, route template, status, seconds).
Observe = Callable[[str, str, int, float], None]

_log = logging.getLogger(__name__)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<name>[^:\[\]/@?#\s]+))(?::\d{1,5})?")


class SecurityMiddleware:
    """The outermost middleware: request ids, access checks, access log and error responses.

    The body of a rejected request is never read.
    """

    def __init__(
        self, app: App, config: ServerConfig, observe: Observe, *, token: str | None = None
    ) -> None:
        self.app = app
        self.keys = APIKeyAuth(config.api_key, token)
        self.hosts = allowed_hosts(config)
        self.origins = frozenset(origin.lower() for origin in config.origins)
        self.observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = scope["weft.request_id"] = request_id_from_headers(headers)
        id_headers = [(b"request-id", request_id.encode())] if is_anthropic(scope["path"]) else []
        began, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    *id_headers,
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            self.check(scope, headers)
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            if (
                status
            ):  # the status is already sent, so closing the connection is the only signal left
                _log.error(
                    "request %s failed after its response had begun", request_id, exc_info=error
                )
                raise
            answer = error_response(error, request_id, scope["path"])
            if answer.status_code == 401:
                # A header of its own: browsers read only the first scheme of a header.
                answer.headers.append("WWW-Authenticate", 'Bearer realm="weft"')
            await answer(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "") or "(none)"
            self.observe(scope["method"], route, status or 499, seconds)
            # NOTE: the query is not logged: it may hold secrets.
            _log.info(
                "%s %s %s %.0f ms %s", scope["method"], route, status, 1e3 * seconds, request_id
            )

    def check(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
        """Check a request's Host, Origin and API key. Raises: RequestError."""
        host = single_header(headers, b"host")
        self._check_host(host)
        self._check_origin(headers, host)
        scope["weft.token_accepted"] = self.keys.check(headers)

    def _check_host(self, host: str | None) -> None:
        """Raise RequestError for a Host header that is not one of the server's names."""
        if self.hosts is None:
            return
        match = _HOST.fullmatch(host or "")
        name = "" if match is None else (match["six"] or match["name"])
        if name.lower().rstrip(".") not in self.hosts:
            raise RequestError(
                403,
                "host_not_allowed",
                "the Host header is not one of this server's names",
                hint="start it with --allow-host NAME",
            )

    def _check_origin(self, headers: list[tuple[bytes, bytes]], host: str | None) -> None:
        """Raise RequestError for a request that another site's page has sent."""
        origin = single_header(headers, b"origin")
        if origin is None:
            site, mode = (
                single_header(headers, b"sec-fetch-site"),
                single_header(headers, b"sec-fetch-mode"),
            )
            is_foreign = site == "cross-site" and mode != "navigate"
        else:
            is_own = host is not None and origin in (f"http://{host}", f"https://{host}")
            is_foreign = not is_own and origin.lower() not in self.origins
        if is_foreign:
            raise RequestError(
                403,
                "origin_not_allowed",
                "requests from that origin are not allowed",
                hint="start it with --allow-origin ORIGIN",
            )


class APIKeyAuth:
    """Checks that requests have the API key or the token of the server's runtime file.

    The comparison takes constant time. Only hashes of key and token are stored.
    """

    def __init__(self, key: str | None, token: str | None = None) -> None:
        self._hash = None if key is None else _hash(key.encode())
        self._token_hash = None if token is None else _hash(token.encode())

    def check(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Check a request's credentials.

        Returns True if the request has the token of the server's runtime file. Returns False if it
        has the API key, or if no key is set.

        Raises: RequestError for a request with neither, if a key is set.
        """
        given = key_of(headers)
        digest = None if given is None else _hash(given)
        if digest is not None and self._token_hash is not None:
            if hmac.compare_digest(digest, self._token_hash):
                return True
        if self._hash is None:
            return False
        if digest is None:
            raise self._unauthorized_error("missing_api_key", "an API key is needed")
        if not hmac.compare_digest(digest, self._hash):
            raise self._unauthorized_error("invalid_api_key", "the API key is wrong")
        return False

    @staticmethod
    def _unauthorized_error(code: str, message: str) -> RequestError:
        """Return the error 401."""
        return RequestError(
            401,
            code,
            message,
            hint="send the header Authorization: Bearer KEY, or x-api-key: KEY",
            headers={"WWW-Authenticate": 'Basic realm="weft"'},
        )


def _hash(key: bytes) -> bytes:
    """Return a hash of a key, for comparison in constant time."""
    return hashlib.sha256(key).digest()


def key_of(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key that a request sends; None without one.

    It is a Bearer token, the password of Basic authentication, or `x-api-key`. Browsers ask the
    user for a Basic password, so that the page and its event streams work. Anthropic's clients
    send `x-api-key`.
    """
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        given = [value for name, value in headers if name == b"x-api-key"]
        return given[0].strip() if len(given) == 1 else None
    if len(given) != 1:
        return None
    scheme, _, value = given[0].strip().partition(b" ")
    if scheme.lower() == b"bearer":
        return value.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return None
    return None


def single_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Return the value of a header; None if it is missing.

    Several different values are returned as one text that no check accepts.
    """
    values = {value for key, value in headers if key == name}
    if len(values) > 1:
        return "\x00"
    return next(iter(values)).decode("latin-1").strip() if values else None


def request_id_from_headers(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's `X-Request-Id` if it is well-formed, else a new id."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return f"rq_{secrets.token_hex(8)}"


def allowed_hosts(config: ServerConfig) -> frozenset[str] | None:
    """Return the names that a Host header may have; None for any name.

    A page whose name was rebound to this machine (DNS rebinding) has no API key. A server with a
    key and unknown public names can therefore accept any Host.
    """
    if config.is_public and not config.hosts:
        return None
    names = [*_LOOPBACK, *config.hosts]
    if config.host not in ("0.0.0.0", "::"):
        names.append(config.host.strip("[]"))
    return frozenset(map(str.lower, names))
