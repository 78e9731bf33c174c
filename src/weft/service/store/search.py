"""Full text over all looms: the database's own index, asked for folded words (see `words`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..._core.validation import check_int
from ...errors import ConfigError
from .rows import text_of
from .tables import looms, nodes
from .text_normalization import Word, split_words, strip_template

_AROUND = 60  # characters shown before and after what was found
_SHOWN = 240  # and of all of it
_MAX_WORDS = 64
_FTS = sa.table("nodes_fts", sa.column("rowid", sa.Integer), sa.column("rank", sa.Float))


class Hit(NamedTuple):
    """A node in which all words were found.

    snippet: its text around them; marks: where they stand in that, from and to. rank: larger is
    better, within one answer.
    """

    loom: str
    loom_id: str
    number: int
    id: str
    snippet: str
    marks: list[tuple[int, int]]
    rank: float


class SearchTerm(NamedTuple):
    """Words that stand side by side; of the last one the beginning is enough if it is a prefix."""

    words: tuple[str, ...]
    is_prefix: bool


def parse_query(asked: str) -> list[SearchTerm]:
    """Return what is looked for: words, "phrases" in quotes, and beginnings of words with a star.

    Whatever else is in the text (brackets, AND, a quote that is not closed) is no fault and no
    operator. Words that are written without spaces are phrases of their characters. Raises:
    ConfigError where no word is left.
    """
    found: list[SearchTerm] = []
    for place, part in enumerate(asked.split('"')):
        is_phrase = place % 2 == 1
        for piece in [part] if is_phrase else part.split():
            words = tuple(word.text for word in split_words(piece))[:_MAX_WORDS]
            if words:
                found.append(SearchTerm(words, piece.rstrip().endswith("*")))
    if not found:
        raise ConfigError(
            f'there is no word to look for in {asked!r:.80}; allowed are words, "phrases" in '
            "quotes, and the beginning of a word with a star: unicor*"
        )
    return found[:_MAX_WORDS]


def search_nodes(
    connection: Connection, asked: str, *, is_sqlite: bool, loom: int | None, limit: int
) -> list[Hit]:
    """Return the nodes with all words, the best first; see `Library.find`."""
    check_int("limit", limit, 1, 1000)
    terms = parse_query(asked)
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
)


def _sqlite(terms: list[SearchTerm]) -> sa.Select[Any]:
    # Folded words have no quotes in them: what FTS5 is given is its grammar, whatever was asked.
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
    text = text_of(row)
    snippet, marks = snippet_of(text, terms)
    if row.number == 0 and (own := strip_template(text, row.prompt)) != text:
        without = snippet_of(own, terms)
        if without[1]:  # else it was kept with the words of its template
            snippet, marks = without
    return Hit(row.loom_name, row.loom_id, row.number, row.id, snippet, marks, float(row.found))


def snippet_of(text: str, terms: list[SearchTerm]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text around what was found, and where in it that stands."""
    found = _spans(split_words(text), terms)
    low = max(0, found[0][0] - _AROUND) if found else 0
    inside = [(start, end) for start, end in found if end <= low + _SHOWN]
    high = min(len(text), max([end for _, end in inside], default=low) + _AROUND)
    head, tail = "…" if low else "", "…" if high < len(text) else ""
    shown = head + text[low:high] + tail
    shift = len(head) - low
    return shown, [(start + shift, end + shift) for start, end in inside]


def _spans(words: list[Word], terms: list[SearchTerm]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for at, word in enumerate(words):
        for term in terms:
            if _begins(words, at, term):
                found.append((word.start, words[at + len(term.words) - 1].end))
                break
    merged: list[tuple[int, int]] = []
    for start, end in found:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _begins(words: list[Word], at: int, term: SearchTerm) -> bool:
    here = words[at : at + len(term.words)]
    if len(here) < len(term.words):
        return False
    if any(word.text != wanted for word, wanted in zip(here[:-1], term.words, strict=False)):
        return False
    last, wanted = here[-1].text, term.words[-1]
    return last.startswith(wanted) if term.is_prefix else last == wanted
