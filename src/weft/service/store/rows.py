"""Convert nodes to columns of their rows and back, in groups of columns that change together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..._core.atomic_files import PARSE_ERRORS
from ..._core.sampling.params import SamplingParams
from ..._core.sched.work import FinishReason
from ...errors import ConfigError, StoreError
from ...loom import Heddle
from ...loom.node import set_text, set_tokens
from .tables import nodes, sampling
from .text_normalization import search_text, strip_template

_DIGEST = 16
_CHUNK = 500  # maximum number of values in one statement
Values = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")


def checks_columns(read: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that parses database columns.

    Errors that invalid contents cause are raised as StoreError.
    """

    @wraps(read)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except (ConfigError, *PARSE_ERRORS) as error:
            raise StoreError(f"the database is broken: a loom cannot be read: {error}") from error

    return checked


class Content(NamedTuple):
    """The tokens of a node and the values that belong to them; they change together."""

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    params: SamplingParams | None
    lineage: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_string: str | None
    terminal: bool
    legal_logmass: list[float]

    @classmethod
    def from_node(cls, node: Heddle) -> Content:
        """Return the content of a node. It shares the node's lists; see `copy`."""
        return cls(
            node.tokens,
            node.logprobs,
            node.entropies,
            node.params,
            node.lineage,
            node.finish_reason,
            node.stop_string,
            node.terminal,
            node.legal_logmass,
        )

    def differs(self, node: Heddle) -> bool:
        """Return True if a node's present content differs from this one."""
        return (
            self.tokens != node.tokens
            or self.finish_reason != node.finish_reason
            or self.logprobs != node.logprobs
            or self.entropies != node.entropies
            or self.legal_logmass != node.legal_logmass
            or (self.params is not node.params and self.params != node.params)
            or self.terminal != node.terminal
            or self.lineage != node.lineage
            or self.stop_string != node.stop_string
        )

    def copy(self) -> Content:
        """Return a copy with its own lists of logprobs, entropies and legal_logmass."""
        return self._replace(
            logprobs=list(self.logprobs),
            entropies=list(self.entropies),
            legal_logmass=list(self.legal_logmass),
        )


CONTENT = (
    "text exact words n_tokens tokens logprobs entropies params lineage finish_reason stop_string "
    "terminal legal_logmass"
).split()
# Columns that change together, and are compared and undone together.
GROUPS = {
    "content": tuple(CONTENT),
    "place": ("parent", "place"),
    "score": ("score",),
    "meta": ("meta",),
    "bookmark": ("bookmark",),
}


class Params:
    """Cache of sampling parameters by the key of their row, shared by all nodes of a loom."""

    def __init__(self) -> None:
        self._by_key: dict[str, SamplingParams] = {}
        self._keys: dict[int, tuple[SamplingParams, str, str]] = {}

    def key(self, params: SamplingParams) -> tuple[str, str]:
        """Return the primary key and the JSON of the database row for these parameters."""
        saved = self._keys.get(id(params))
        if saved is None:
            data = json.dumps(params.to_dict())
            key = hashlib.blake2b(data.encode(), digest_size=_DIGEST).hexdigest()
            saved = self._keys[id(params)] = (
                params,
                key,
                data,
            )  # a reference: otherwise the id could be reused
        return saved[1:]

    @checks_columns
    def add(self, key: str, data: str) -> None:
        """Add a row of sampling parameters to the cache. data: its JSON."""
        if key not in self._by_key:
            self._by_key[key] = SamplingParams.from_dict(json.loads(data))

    def get(self, key: str | None) -> SamplingParams | None:
        """Return the sampling parameters with this key; None without a key.

        Raises: StoreError if the row was not read yet (`add`).
        """
        if key is None:
            return None
        if key not in self._by_key:
            raise StoreError(f"no sampling parameters have the key {key!r}: the database is broken")
        return self._by_key[key]

    def missing(self, keys: set[str | None]) -> list[str]:
        """Return the keys that are not in the cache, so that their rows must be read."""
        return [key for key in keys if key is not None and key not in self._by_key]


def select_nodes(connection: Connection, params: Params, *where: Any) -> Sequence[Any]:
    """Select rows of nodes, and add their sampling parameters to the cache."""
    rows = connection.execute(sa.select(nodes).where(*where)).all()
    missing = params.missing({row.params for row in rows})
    for at in range(0, len(missing), _CHUNK):
        named = sampling.c.key.in_(missing[at : at + _CHUNK])
        for key, data in connection.execute(
            sa.select(sampling.c.key, sampling.c.data).where(named)
        ):
            params.add(key, data)
    return rows


# Numbers ---------------------------------------------------------------------------------------


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids for a database column: 4 bytes each, or 8 each if one does not fit into 4.

    Lists with larger ids, which stand for texts of a server without token ids, become JSON.
    """
    low, high = (min(ids), max(ids)) if ids else (0, 0)
    for n_bytes in (4, 8):
        if -(1 << (8 * n_bytes - 1)) <= low and high < 1 << (8 * n_bytes - 1):
            return np.asarray(ids, f"<i{n_bytes}").tobytes()
    data = json.dumps(list(ids)).encode()
    return data + b" " * (len(data) in (4 * len(ids), 8 * len(ids)))


def unpack_ids(data: bytes, n: int) -> list[int]:
    """Unpack `n` token ids. Raises: StoreError if there are not exactly `n`."""
    if not n:
        return []
    ids: list[int]
    if len(data) in (4 * n, 8 * n):
        ids = np.frombuffer(data, f"<i{len(data) // n}").tolist()
    else:
        ids = json.loads(data) if data.startswith(b"[") else []
    if len(ids) != n:
        raise StoreError(f"a node of {n} tokens has {len(ids)}: the database is broken")
    return ids


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack logprobs or entropies into 8 bytes each, without loss."""
    return np.asarray(values, "<f8").tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Unpack logprobs or entropies."""
    return cast("list[float]", np.frombuffer(data, "<f8").tolist())


# Texts -----------------------------------------------------------------------------------------


def is_db_text(text: str) -> bool:
    """Return True if every database can store this text unchanged."""
    return "\0" not in text and text.isprintable() or _is_encodable(text)


def _is_encodable(text: str) -> bool:
    """Return True if a text has no lone surrogates."""
    if "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def db_text(text: str) -> str:
    """Return a text that every database can store: invalid characters are replaced."""
    if is_db_text(text):
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def escape_like(text: str) -> str:
    """Return a text as part of a LIKE pattern that matches it literally; a backslash escapes."""
    return text.translate(_LIKE)


_LIKE = str.maketrans({each: f"\\{each}" for each in "\\%_"})


def raw_bytes(text: str) -> bytes | None:
    """Return a text as UTF-8 bytes if `db_text` would change it; None if it would not."""
    return None if is_db_text(text) else text.encode("utf-8", "surrogatepass")


@checks_columns
def text_of(row: Any) -> str:
    """Return the original text of a node, which `db_text` may have changed in its row."""
    text: str = row.text if row.exact is None else row.exact.decode("utf-8", "surrogatepass")
    return text


# Groups to columns and back --------------------------------------------------------------------


def content_values(content: Content, text: str, params: Params, prompt: str = "") -> Values:
    """Return the database columns for a node's content.

    prompt: the loom's prompt, for the text of its root; "" for other nodes.
    """
    return {
        "text": db_text(text),
        "exact": raw_bytes(text),
        "words": search_text(strip_template(text, prompt)),
        "n_tokens": len(content.tokens),
        "tokens": pack_ids(content.tokens),
        "logprobs": pack_floats(content.logprobs),
        "entropies": pack_floats(content.entropies),
        "params": None if content.params is None else params.key(content.params)[0],
        "lineage": json.dumps(content.lineage),
        "finish_reason": content.finish_reason,
        # As JSON, since it may contain characters that the database cannot store.
        "stop_string": None if content.stop_string is None else json.dumps(content.stop_string),
        "terminal": content.terminal,
        "legal_logmass": pack_floats(content.legal_logmass) or None,
    }


@checks_columns
def content_of_row(row: Any, params: Params) -> Content:
    """Parse the content of a node from its row. params: the loom's cache of sampling parameters."""
    return Content(
        unpack_ids(row.tokens, row.n_tokens),
        unpack_floats(row.logprobs),
        unpack_floats(row.entropies),
        params.get(row.params),
        () if row.lineage == "[]" else tuple(json.loads(row.lineage)),
        row.finish_reason,
        None if row.stop_string is None else json.loads(row.stop_string),
        row.terminal,
        [] if row.legal_logmass is None else unpack_floats(row.legal_logmass),
    )


def set_content(node: Heddle, content: Content, text: str) -> None:
    """Set the tokens of a node and the values that belong to them.

    text: the node's text, used only in a loom without a tokenizer, which cannot decode tokens.
    """
    set_tokens(node, content.tokens)
    if node.lm is None:
        set_text(node, text)
    node.logprobs, node.entropies = list(content.logprobs), list(content.entropies)
    node.params, node.lineage = content.params, content.lineage
    node.finish_reason, node.stop_string = content.finish_reason, content.stop_string
    node.terminal = content.terminal
    node.legal_logmass = list(content.legal_logmass)


def score_value(score: float | None) -> str | None:
    """Convert a score to the text for its database column; None stays None.

    A text is exact, and can be "inf" or "nan".
    """
    return None if score is None else repr(float(score))


@checks_columns
def score_of(value: str | None) -> float | None:
    """Convert the text of a database column to a score; None stays None."""
    return None if value is None else float(value)


def meta_json(node: Heddle) -> str:
    """Return a node's meta as JSON for its database column.

    Raises: ConfigError for values that would be different after reading the JSON.
    """
    meta = node.meta
    if not meta:
        return "{}"
    try:
        data = json.dumps(meta, allow_nan=False)
        if json.loads(data) != meta:
            raise TypeError("a tuple or a key that is not a text would change")
        return data
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the meta of node {node.id} cannot be saved as JSON: {error}. Allowed are dicts with "
            "text keys, lists, texts, finite numbers, True, False and None"
        ) from error


@checks_columns
def meta_of(value: str) -> dict[str, Any]:
    """Parse the JSON of the database column "meta" into a new dict."""
    meta: dict[str, Any] = {} if value == "{}" else json.loads(value)
    return meta
