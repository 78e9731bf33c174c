"""By what a request finds its replica: the loom it names, or the beginning of its prompt.

Equal keys meet on one replica, where the KV is. All that is needed stands in what clients send
anyway, so none of them knows that there are replicas.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple
from urllib.parse import unquote

HEAD = 1024  # characters of a prompt that decide
_OF_LOOM = (("api", "v1", "looms"), ("looms",), ("loom",))
_FIXED = ("import", "restore")  # where a loom's name could stand
_JOBS = ("api", "v1", "jobs")
_JOB = re.compile(r"jb_([0-9a-f]{16})_")  # a job of a loom says of which
_ID = re.compile(r"[0-9a-f]{16}")
_STATELESS = ("prompt", "messages", "input")


class RoutingKey(NamedTuple):
    """What a request is routed by; "" where any replica will do.

    is_name: it is the name of a loom, perhaps, and its id is the key of requests that know that.
    """

    key: str = ""
    is_name: bool = False


def routing_key(path: str, body: bytes = b"") -> RoutingKey:
    """Return what a request is routed by.

    path: as the request has it, without the query. body: looked at below /v1 only.
    """
    parts = tuple(unquote(part) for part in path.strip("/").split("/"))
    for prefix in _OF_LOOM:
        if parts[: len(prefix)] == prefix and len(parts) > len(prefix):
            loom = parts[len(prefix)]
            if loom in _FIXED:
                return RoutingKey()
            return RoutingKey(loom, is_name=not _ID.fullmatch(loom))
    if parts[:3] == _JOBS and len(parts) > 3 and (job := _JOB.match(parts[3])):
        return RoutingKey(job[1])
    if parts[0] == "v1" and body:
        return RoutingKey(_of_prompt(body))
    return RoutingKey()


def _of_prompt(body: bytes) -> str:
    """Return a hash of a prompt's head; of a chat, of what stands up to the user's first words.

    So all turns of a conversation have the same key.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):  # the replica says what is wrong with it
        return ""
    if not isinstance(asked, dict):
        return ""
    given = next((asked[name] for name in _STATELESS if asked.get(name)), None)
    if given is None:
        return ""
    head = json.dumps([asked.get("model"), _opening(given)])[:HEAD]
    return hashlib.sha256(head.encode()).hexdigest()[:32]


def _opening(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    for end, message in enumerate(given, 1):
        if isinstance(message, dict) and message.get("role") == "user":
            return given[:end]
    return given
