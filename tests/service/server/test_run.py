"""The listening socket of a server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from weft.errors import ConfigError
from weft.service.server.run import bind


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_short_response_does_not_wait_for_acknowledged_headers(host: str) -> None:
    """Without TCP_NODELAY, the body arrives 40 ms after its headers."""
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")

    async def accepted() -> int:
        options = list[int]()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            options.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind(host, 0)
        async with await asyncio.start_server(take, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            await reader.read()
            writer.close()
        return options[0]

    assert asyncio.run(accepted())


def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use") as raised:
            bind("127.0.0.1", port)
    assert "--port 0" in raised.value.hint
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("no.such.name.invalid", 0)
