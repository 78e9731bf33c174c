"""Full-text search over all looms, with the database's index of normalized words."""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..._core.validation import check_int
from ...errors import ConfigError
from .metadata import LoomMetadata
from .rows import text_of
from .tables import looms, nodes
from .text_normalization import Word, split_words, strip_template

_CONTEXT = 60  # characters of a snippet before and after the matches
_MAX_SNIPPET = 240  # characters of matches and the text between them
_MAX_WORDS = 64
_FTS = sa.table("nodes_fts", sa.column("rowid", sa.Integer), sa.column("rank", sa.Float))


class Hit(NamedTuple):
    """A node that contains all words of a search."""

    loom: str  # name
    loom_id: str
    number: int
    id: str
    snippet: str  # the node's text around the matches
    marks: list[tuple[int, int]]  # (start, end) of matches in the snippet
    rank: float  # higher is better, comparable within one search
    title: str = ""  # of the loom


class SearchTerm(NamedTuple):
    """A word or a phrase (consecutive words) of a search."""

    words: tuple[str, ...]  # consecutive words
    is_prefix: bool  # the last word need only start with its term


def parse_query(query: str) -> list[SearchTerm]:
    """Parse a search: words, "phrases" in quotes, and prefixes with a star.

    Other characters (brackets, unclosed quotes) are ignored, and AND is a word. Chinese and
    Japanese words become phrases of their characters.
    Raises: ConfigError if no word is left.
    """
    terms: list[SearchTerm] = []
    for place, part in enumerate(query.split('"')):
        is_phrase = place % 2 == 1
        for piece in [part] if is_phrase else part.split():
            words = tuple(word.text for word in split_words(piece))[:_MAX_WORDS]
            if words:
                terms.append(SearchTerm(words, piece.rstrip().endswith("*")))
    if not terms:
        raise ConfigError(
            f'there is no word to look for in {query!r:.80}; allowed are words, "phrases" in '
            "quotes, and the beginning of a word with a star: unicor*"
        )
    return terms[:_MAX_WORDS]


def search_nodes(
    connection: Connection, query_text: str, *, is_sqlite: bool, loom: int | None, limit: int
) -> list[Hit]:
    """Return the nodes that contain all words of a query, the best matches first.

    loom: key of the only loom to search; None means all looms. limit: maximum number of nodes.
    """
    check_int("limit", limit, 1, 1000)
    terms = parse_query(query_text)
    query = _sqlite(terms) if is_sqlite else _postgresql(terms)
    query = query.where(~nodes.c.removed, looms.c.removed.is_(None))
    if loom is not None:
        query = query.where(nodes.c.loom == loom)
    rows = connection.execute(query.order_by(sa.desc("found"), nodes.c.key).limit(limit)).all()
    return [_hit(row, terms) for row in rows]


_COLUMNS = (
    looms.c.name.label("loom_name"),
    looms.c.id.label("loom_id"),
    nodes.c.number,
    nodes.c.id,
    nodes.c.text,
    nodes.c.exact,
    looms.c.prompt,
    looms.c.head,
)


def _sqlite(terms: list[SearchTerm]) -> sa.Select[Any]:
    """Return the query for SQLite's FTS5 index."""
    # Normalized words contain no quotes, so any query becomes valid FTS5 syntax.
    match = " AND ".join(
        f'"{" ".join(term.words)}"{" *" if term.is_prefix else ""}' for term in terms
    )
    return (
        sa.select(*_COLUMNS, (-_FTS.c.rank).label("found"))
        .select_from(_FTS.join(nodes, nodes.c.key == _FTS.c.rowid))
        .join(looms, looms.c.key == nodes.c.loom)
        .where(sa.text("nodes_fts MATCH :match").bindparams(match=match))
    )


def _postgresql(terms: list[SearchTerm]) -> sa.Select[Any]:
    """Return the query for PostgreSQL's full-text index."""
    parts = []
    for term in terms:
        last = f"'{term.words[-1]}'{':*' if term.is_prefix else ''}"
        words = [*(f"'{word}'" for word in term.words[:-1]), last]
        parts.append("(" + " <-> ".join(words) + ")")
    vector: sa.ColumnElement[Any] = sa.literal_column("nodes.vector")
    wanted = sa.func.to_tsquery(sa.literal_column("'simple'::regconfig"), " & ".join(parts))
    return (
        sa.select(*_COLUMNS, sa.func.ts_rank(vector, wanted).label("found"))
        .select_from(nodes)
        .join(looms, looms.c.key == nodes.c.loom)
        .where(vector.op("@@", is_comparison=True)(wanted))
    )


def _hit(row: Any, terms: list[SearchTerm]) -> Hit:
    """Convert a row to a `Hit` with a snippet."""
    text = text_of(row)
    snippet, marks = snippet_of(text, terms)
    if row.number == 0 and (own := strip_template(text, row.prompt)) != text:
        own_snippet = snippet_of(own, terms)
        if own_snippet[1]:  # otherwise only the chat template contains the words
            snippet, marks = own_snippet
    title = LoomMetadata.from_json(row.head).title
    rank = float(row.found)
    return Hit(row.loom_name, row.loom_id, row.number, row.id, snippet, marks, rank, title)


def snippet_of(text: str, terms: list[SearchTerm]) -> tuple[str, list[tuple[int, int]]]:
    """Return the part of a text around its first match, and the matches in this part.

    Each match is (start, end) in characters of the returned text.
    """
    spans = _spans(split_words(text), terms)
    low = max(0, spans[0][0] - _CONTEXT) if spans else 0
    inside = [(start, end) for start, end in spans if end <= low + _MAX_SNIPPET]
    high = min(len(text), max([end for _, end in inside], default=low) + _CONTEXT)
    head, tail = "…" if low else "", "…" if high < len(text) else ""
    snippet = head + text[low:high] + tail
    shift = len(head) - low
    return snippet, [(start + shift, end + shift) for start, end in inside]


def _spans(words: list[Word], terms: list[SearchTerm]) -> list[tuple[int, int]]:
    """Return the (start, end) positions of all matches in a text."""
    spans: list[tuple[int, int]] = []
    for at, word in enumerate(words):
        for term in terms:
            if _matches_at(words, at, term):
                spans.append((word.start, words[at + len(term.words) - 1].end))
                break
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _matches_at(words: list[Word], at: int, term: SearchTerm) -> bool:
    """Return True if a term matches the words from index `at` on."""
    here = words[at : at + len(term.words)]
    if len(here) < len(term.words):
        return False
    if any(word.text != wanted for word, wanted in zip(here[:-1], term.words, strict=False)):
        return False
    last, wanted = here[-1].text, term.words[-1]
    return last.startswith(wanted) if term.is_prefix else last == wanted
