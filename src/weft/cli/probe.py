"""Whether a server of our own answers: of this user, with these looms. Asked in a moment."""

from __future__ import annotations

import hmac
import http.client
import json
import secrets

from ..api.address import ServerAddress
from ..api.proof import proof, read_secret

_CONNECT_S, _ANSWER_S = 0.1, 1.0
_MOST = 1 << 20


def is_ours(at: ServerAddress) -> bool:
    """Whether the server there has the same looms. Nothing is told to any other."""
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
