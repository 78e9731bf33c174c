"""Ports of this machine that nobody else gets meanwhile."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held() -> Iterator[int]:
    """Yield a port where nobody answers, until a server of the test's own is told to listen there.

    On Linux it stays bound: neither another server that asks for any port nor a connection that
    somebody opens is given it, whether a server of ours is there just now or not.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":  # elsewhere ours would be kept out, too
            holder.close()
        yield port
