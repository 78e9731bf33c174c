"""By what a request finds its replica: the loom it names, or the beginning of its prompt.

Equal keys meet on one replica, where the KV is. All that is needed stands in what clients send
anyway, so none of them knows that there are replicas.
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
BUSY = 32  # requests in progress with one head; further ones are routed by a longer head
_REMEMBERED = 10_000  # prompts
_OF_LOOM = (("api", "v1", "looms"), ("looms",), ("loom",))
_FIXED = ("import", "restore")  # where a loom's name could stand
_JOBS = ("api", "v1", "jobs")
_ID = re.compile(r"[0-9a-f]{16}")
_JOB = re.compile(rf"jb_({_ID.pattern})_")  # a job of a loom says of which
_NODE = re.compile(rf"({_ID.pattern})-")  # as does a node of the endpoints at the root
_STATELESS = ("prompt", "messages", "input")


class RoutingKey(NamedTuple):
    """What a request is routed by; "" where any replica will do.

    is_name: it is the name of a loom, perhaps, and its id is the key of requests that know that.
    heads: of a prompt, the hashes of its heads, the shortest first; the first one is `key`.
    """

    key: str = ""
    is_name: bool = False
    heads: tuple[str, ...] = ()


class PromptRouter:
    """Chooses by which of its heads a prompt is routed.

    Prompts with one beginning, such as few-shot prompts, share its KV on one replica. A head that
    many prompts have at the same time would load that replica alone, so further prompts are routed
    by a longer head. Prompts that are equal in their longest head are always routed alike.
    """

    def __init__(self) -> None:
        self._n_running = Counter[str]()
        self._chosen = OrderedDict[str, str]()  # by the longest head; the last used is the last

    @contextmanager
    def routed(self, heads: Sequence[str]) -> Iterator[str]:
        """Choose a head for a request that is in progress until the block ends."""
        longest = heads[-1]
        free = (head for head in heads if self._n_running[head] < BUSY)
        head = self._chosen.pop(longest, None) or next(free, longest)
        self._chosen[longest] = head
        if len(self._chosen) > _REMEMBERED:
            self._chosen.popitem(last=False)
        self._n_running[head] += 1
        try:
            yield head
        finally:
            self._n_running[head] -= 1
            self._n_running += Counter()  # drops what is 0


def routing_key(path: str, body: bytes = b"") -> RoutingKey:
    """Return what a request is routed by.

    path: as the request has it, without the query. body: looked at where the path says nothing.
    """
    parts = tuple(unquote(part) for part in path.strip("/").split("/"))
    for prefix in _OF_LOOM:
        if parts[: len(prefix)] == prefix and len(parts) > len(prefix):
            name = parts[len(prefix)]
            return RoutingKey() if name in _FIXED else _of_loom(name)
    if parts[:3] == _JOBS and len(parts) > 3:
        return _matched(_JOB, parts[3])
    if parts[0] == "node" and len(parts) > 1:
        return _matched(_NODE, parts[1] if not body else _asked(body).get("node_id"))
    return _of_prompt(_asked(body)) if parts[0] == "v1" else RoutingKey()


def _of_loom(given: str) -> RoutingKey:
    return RoutingKey(given, is_name=not _ID.fullmatch(given))


def repeated_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return by what a request that names nothing meets its first answer: its Idempotency-Key."""
    found = next((value for name, value in headers if name == b"idempotency-key"), b"")
    return hashlib.sha256(found).hexdigest()[:32] if found else ""


def _matched(pattern: re.Pattern[str], given: object) -> RoutingKey:
    match = pattern.match(given) if isinstance(given, str) else None
    return RoutingKey() if match is None else RoutingKey(match[1])


def _asked(body: bytes) -> dict[str, Any]:
    """Return the fields of a body; none where it is wrong, which the replica will say."""
    try:
        asked = json.loads(body) if body else None
    except (ValueError, RecursionError):
        asked = None
    return asked if isinstance(asked, dict) else {}


def _of_prompt(asked: dict[str, Any]) -> RoutingKey:
    """Return the loom that a prompt stands in, else the hashes of its heads.

    Of a chat that is what stands up to the user's first words: all its turns have the same.
    """
    options = asked.get("loom")
    if isinstance(options, dict) and isinstance(options.get("loom"), str):
        return _of_loom(options["loom"])
    given = next((asked[name] for name in _STATELESS if asked.get(name)), None)
    if given is None:
        return RoutingKey()
    model, text = json.dumps(asked.get("model")), json.dumps(_opening(given))
    heads = [hashlib.sha256(f"{model} {text[:n]}".encode()).hexdigest()[:32] for n in HEADS]
    return RoutingKey(heads[0], heads=tuple(heads))


def _opening(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    for end, message in enumerate(given, 1):
        if isinstance(message, dict) and message.get("role") == "user":
            return given[:end]
    return given
