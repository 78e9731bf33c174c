"""The address of a server, from WEFT_HOST and WEFT_PORT."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from ...errors import ConfigError

HOST, PORT = "127.0.0.1", 8000


class ServerAddress(NamedTuple):
    """A server's host and port. scheme: "http", or "https" for a server behind a proxy with TLS."""

    host: str = HOST
    port: int = PORT
    scheme: str = "http"

    @property
    def url(self) -> str:
        """The URL for clients; an address that listens on all interfaces becomes loopback."""
        host = {"0.0.0.0": HOST, "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


def address(environment: Mapping[str, str] | None = None) -> ServerAddress:
    """Return the server's address, from WEFT_HOST ("host", "host:port" or a URL) and WEFT_PORT.

    environment: the variables; None means those of this process.
    Raises: ConfigError for an invalid address.
    """
    variables = os.environ if environment is None else environment
    host, port = variables.get("WEFT_HOST", "").strip(), variables.get("WEFT_PORT", "").strip()
    is_bare_six = host.count(":") > 1 and "[" not in host and "//" not in host
    text = f"[{host}]" if is_bare_six else host
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        port_number = int(port) if port else parts.port
    except ValueError as error:
        name = "WEFT_PORT" if port else "WEFT_HOST"
        value = port or host
        raise ConfigError(f"{name} is {value!r:.80}; allowed is {_ALLOWED[name]}") from error
    scheme = parts.scheme or "http"
    if scheme not in ("http", "https") or not 0 <= (port_number or 0) <= 65_535:
        raise ConfigError(f"WEFT_HOST is {host!r:.80}; allowed is {_ALLOWED['WEFT_HOST']}")
    default = {"https": 443}.get(scheme, PORT) if "//" in host else PORT
    return ServerAddress(
        parts.hostname or HOST, default if port_number is None else port_number, scheme
    )


_ALLOWED = {
    "WEFT_HOST": "a host, host:port, or http://host:port",
    "WEFT_PORT": "a port, 0 to 65535",
}
