"""Ports of this machine that no other process gets."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved() -> Iterator[int]:
    """Yield a port without a server, on which a server of the test can listen.

    On Linux the port stays bound, so no other process gets it for a server or a connection. This
    is independent of whether a server of the test listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":  # elsewhere a bound port excludes the test's server, too
            holder.close()
        yield port
