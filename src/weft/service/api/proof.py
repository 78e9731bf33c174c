"""How a command knows a server of its own user and looms from any other that answers there.

Both have the same folder, and in it a secret that nobody else can read. The command asks with a
number of its own; what comes back could only be made with the secret, and not be heard before.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..._core.data_dir import home
from .address import ServerAddress

_FILE = ".server-proof"
_N_BYTES = 32
_CONNECT_S, _ANSWER_S = 0.1, 1.0
_MOST = 1 << 20


def proof(nonce: str, secret: bytes, database: str | None = None) -> str:
    """Return what answers a nonce.

    database: the URL of the looms' database; None: WEFT_DB, else the folder's own.
    """
    return hmac.new(secret, f"{nonce}\0{_where(database)}".encode(), hashlib.sha256).hexdigest()


def is_ours(at: ServerAddress) -> bool:
    """Whether the server there has the same looms, asked in a moment; any other is told nothing."""
    secret = read_secret()
    if secret is None:  # no server was ever started with these looms
        return False
    nonce = secrets.token_hex(16)
    expected = proof(nonce, secret)
    connection = http.client.HTTPConnection(at.host, at.port, timeout=_CONNECT_S)
    try:
        connection.connect()
        connection.sock.settimeout(_ANSWER_S)
        connection.request("GET", f"/api/v1/server?nonce={nonce}")
        response = connection.getresponse()
        told = json.loads(response.read(_MOST)) if response.status == 200 else {}
        given = told.get("proof") if isinstance(told, dict) else None
        return isinstance(given, str) and hmac.compare_digest(given.encode(), expected.encode())
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def read_secret() -> bytes | None:
    """Return the folder's secret; None where it never had a server."""
    try:
        secret = (home() / _FILE).read_bytes()
    except OSError:
        return None
    return secret if len(secret) == _N_BYTES else None


def make_secret() -> bytes | None:
    """Return the folder's secret, which is made if there is none; None where it cannot be."""
    with suppress(OSError):
        file = home() / _FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        part = Path(f"{file}.{secrets.token_hex(4)}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as made:
            made.write(secrets.token_bytes(_N_BYTES))
        try:
            # Whole or not at all, and who comes second leaves the first one's.
            with suppress(FileExistsError):
                os.link(part, file)
        finally:
            part.unlink()
    return read_secret()


def _where(database: str | None) -> str:
    url = database or os.environ.get("WEFT_DB") or f"sqlite:///{home() / 'weft.db'}"
    head, found, file = url.partition("sqlite:///")
    return f"sqlite:{os.path.realpath(file)}" if found and not head else url
