"""The file by which commands find a running server of the same user and the same looms.

`weft serve` writes its address and a new token to `WEFT_HOME/server-PORT.json`, readable only by
its user. A command sends the token; only the server that wrote the file recognizes it.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..._core.data_dir import data_dir
from .address import address

_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 0.1, 1.0
_MAX_BYTES = 1 << 20


class RunningServer(NamedTuple):
    """The address of a running server, as `weft serve` writes it to WEFT_HOME/server-PORT.json.

    token: the server accepts it in place of its API key.
    database: identifies the looms' database, so that commands only use a server of the same looms.
    """

    url: str
    token: str
    database: str


@contextmanager
def runtime_file(url: str, port: int, token: str, database: str | None = None) -> Iterator[None]:
    """Write the file of a server, and delete it at the end of the block.

    Errors while writing are ignored; commands then do not find the server.
    database: the URL of the looms' database. None means WEFT_DB, else weft.db in WEFT_HOME.
    """
    server = RunningServer(url, token, _database_id(database))
    file = _file(port)
    with suppress(OSError):
        _write_private(file, json.dumps(server._asdict()))
    try:
        yield
    finally:
        if _read(file) == server:  # another server may have replaced it
            with suppress(OSError):
                file.unlink()


def find_server(port: int) -> RunningServer | None:
    """Return the server of this user and these looms at a port; None if there is none.

    Cost: without a runtime file nothing is sent. Otherwise one request of at most a second checks
    that the server is running.
    """
    server = _read(_file(port))
    if server is None or server.database != _database_id(None):
        return None
    return server if _accepts_token(server) else None


def _accepts_token(server: RunningServer) -> bool:
    """Return True if the server at this address accepts the token, so that it wrote the file."""
    at = address({"WEFT_HOST": server.url})
    connection = http.client.HTTPConnection(at.host, at.port, timeout=_CONNECT_TIMEOUT_S)
    try:
        connection.connect()
        connection.sock.settimeout(_READ_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {server.token}"}
        connection.request("GET", "/api/v1/server", headers=headers)
        response = connection.getresponse()
        data = json.loads(response.read(_MAX_BYTES)) if response.status == 200 else {}
        return isinstance(data, dict) and data.get("token_accepted") is True
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def _file(port: int) -> Path:
    """Return the path of the runtime file of a server at this port."""
    return data_dir() / f"server-{port}.json"


def _read(file: Path) -> RunningServer | None:
    """Parse a runtime file; None if it is missing or invalid."""
    try:
        data = json.loads(file.read_bytes())
        return RunningServer(str(data["url"]), str(data["token"]), str(data["database"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_private(file: Path, text: str) -> None:
    """Write a file that only its user can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f"{file}.{secrets.token_hex(4)}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(part, file)
    except OSError:
        part.unlink()
        raise


def _database_id(database: str | None) -> str:
    """Return a hash that identifies the database of looms, without its password."""
    url = database or os.environ.get("WEFT_DB") or f"sqlite:///{data_dir() / 'weft.db'}"
    scheme, separator, path = url.partition("sqlite:///")
    return f"sqlite:{os.path.realpath(path)}" if separator and not scheme else url
