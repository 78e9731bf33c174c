"""The routing key of a request: the loom it names, or the beginning of its prompt.

Requests with equal keys go to one replica, which has their KV. Keys are derived from ordinary
requests, so clients need not know about replicas.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

HEADS = (256, 1024, 4096)  # lengths of a prompt's head, in characters
BUSY = 32  # requests in progress per head; further ones are routed by a longer head
_MAX_CHOICES = 10_000  # prompts
_LOOM_PREFIXES = (("api", "v1", "looms"), ("looms",), ("loom",))
_FIXED = ("import", "restore")  # path parts that are not names of looms
_JOBS = ("api", "v1", "jobs")
_ID = re.compile(r"[0-9a-f]{16}")
_JOB = re.compile(rf"jb_({_ID.pattern})_")  # the id of a job contains its loom's id
_NODE = re.compile(rf"({_ID.pattern})-")  # as do N8Loom's node ids
_STATELESS = ("prompt", "messages", "input")


class RoutingKey(NamedTuple):
    """The key that decides which replica gets a request.

    Equal keys without `heads` select the same replica. With `heads`, `PromptRouter` may choose a
    longer beginning of the prompt than `key`.

    key: a loom's id or name, or a hash of the beginning of the prompt; "" means any replica.
    is_name: `key` may be a loom's name, which the ingress replaces by the loom's id.
    heads: hashes of beginnings of the prompt, shortest first; the first one is `key`.
    """

    key: str = ""
    is_name: bool = False
    heads: tuple[str, ...] = ()


class PromptRouter:
    """Chooses the beginning ("head") of a prompt whose hash selects the replica.

    Prompts with a common beginning, such as few-shot prompts, share its KV on one replica. If many
    requests with a head are in progress, further ones are routed by a longer head, to spread the
    load. Prompts with the same longest head use the head that was chosen for the first of them. The
    router remembers the choices for the last `_MAX_CHOICES` longest heads.
    """

    def __init__(self) -> None:
        self._n_running = Counter[str]()
        self._chosen = OrderedDict[
            str, str
        ]()  # chosen head by longest head, least recently used first

    @contextmanager
    def routed(self, heads: Sequence[str]) -> Iterator[str]:
        """Choose one of a prompt's heads, and count the request as running until the block ends.

        The choice for an earlier prompt with the same longest head is reused. Otherwise it is the
        shortest head with fewer than `BUSY` running requests, or the longest if all are busy.

        heads: hashes, shortest first. Yields: the hash to route by.
        """
        longest = heads[-1]
        free = (head for head in heads if self._n_running[head] < BUSY)
        head = self._chosen.pop(longest, None) or next(free, longest)
        self._chosen[longest] = head
        if len(self._chosen) > _MAX_CHOICES:
            self._chosen.popitem(last=False)
        self._n_running[head] += 1
        try:
            yield head
        finally:
            self._n_running[head] -= 1
            self._n_running += Counter()  # drops what is 0


def routing_key(path: str, body: bytes = b"") -> RoutingKey:
    """Return the routing key of a request.

    path: without the query. body: used if the path has no key.
    """
    parts = tuple(unquote(part) for part in path.strip("/").split("/"))
    for prefix in _LOOM_PREFIXES:
        if parts[: len(prefix)] == prefix and len(parts) > len(prefix):
            name = parts[len(prefix)]
            return RoutingKey() if name in _FIXED else _key_of_loom(name)
    if parts[:3] == _JOBS and len(parts) > 3:
        return _match_key(_JOB, parts[3])
    if parts[0] == "node" and len(parts) > 1:
        return _match_key(_NODE, parts[1] if not body else _json_fields(body).get("node_id"))
    return _prompt_key(_json_fields(body)) if parts[0] == "v1" else RoutingKey()


def _key_of_loom(given: str) -> RoutingKey:
    """Return the key of a loom given by name or id."""
    return RoutingKey(given, is_name=not _ID.fullmatch(given))


def repeated_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return a routing key from the Idempotency-Key header; "" without this header.

    A repeated request thereby reaches the replica that has stored the first response.
    """
    value = next((header for name, header in headers if name == b"idempotency-key"), b"")
    return hashlib.sha256(value).hexdigest()[:32] if value else ""


def _match_key(pattern: re.Pattern[str], given: object) -> RoutingKey:
    """Return the key of the loom in a path or id that matches the pattern; else the empty key."""
    match = pattern.match(given) if isinstance(given, str) else None
    return RoutingKey() if match is None else RoutingKey(match[1])


def _json_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON body; {} for an invalid one, which the replica rejects."""
    try:
        fields = json.loads(body) if body else None
    except (ValueError, RecursionError):
        fields = None
    return fields if isinstance(fields, dict) else {}


def _prompt_key(fields: dict[str, Any]) -> RoutingKey:
    """Return the key of the loom that the field `loom` names, else of the prompt's beginning.

    fields: of the request's body. Of a chat, only messages up to the first user message count, so
    that all turns of a conversation have the same key.
    """
    options = fields.get("loom")
    if isinstance(options, dict) and isinstance(options.get("loom"), str):
        return _key_of_loom(options["loom"])
    prompt = next((fields[name] for name in _STATELESS if fields.get(name)), None)
    if prompt is None:
        return RoutingKey()
    model, text = json.dumps(fields.get("model")), json.dumps(_chat_head(prompt))
    heads = [hashlib.sha256(f"{model} {text[:n]}".encode()).hexdigest()[:32] for n in HEADS]
    return RoutingKey(heads[0], heads=tuple(heads))


def _chat_head(given: Any) -> Any:
    """Return the messages of a chat up to the first user message."""
    if not isinstance(given, list):
        return given
    for end, message in enumerate(given, 1):
        if isinstance(message, dict) and message.get("role") == "user":
            return given[:end]
    return given
