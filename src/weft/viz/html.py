"""A reasoning tree as one HTML page: no script, no request, light and dark.

Folding is `<details>`, the choice of tint is radio buttons, and what is known of a token shows
where the pointer is; tables say the same to keyboards, fingers and screen readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING

from ..loom import Loom
from . import tips
from .escape import as_html, cut, one_line
from .facts import NOTHING, counted, facts, headline
from .outline import Item, nearest, outline
from .pieces import Piece, Seen, look, pieces
from .tints import ENTROPY, PROBABILITY, Ramp, Tint, check

if TYPE_CHECKING:
    from ..loom import Heddle

Label = Callable[["Heddle"], str]

# What the page may load: nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
# More tokens than these have their figures under the pointer only, or the page gets too large.
MAX_TABLED = 20_000
_TITLE, _HEADING = 80, 240
# Less likely alternatives are under the pointer only.
_LISTED = 0.001
# From here on levels are set closer.
_FAR = 12


@dataclass(frozen=True, slots=True)
class Page:
    """What goes into a page besides the tree.

    seen: by node id, what the model says of each token. marked: ids of nodes on a path to show.
    """

    tint: Tint = "probability"
    node: Label | None = None
    seen: Mapping[str, Sequence[Seen]] = field(default_factory=dict)
    marked: frozenset[str] = frozenset()
    has_tables: bool = True


def to_html(
    root: Heddle,
    *,
    tint: str = "probability",
    top: int = 0,
    limit: int | None = None,
    node: Label | None = None,
    mark: Heddle | None = None,
) -> str:
    """Return the tree from `root` down as a whole page.

    Args:
        tint: "probability", "entropy" or "none": how tokens are tinted when the page is opened.
        top: how many alternatives to show for each sampled token. From 1 on the model is asked,
            one forward over each node's tokens; 0 asks nothing.
        limit: nodes at most, those nearest to the root; the rest is counted where it is left out.
        node: what to write for a node instead of its text.
        mark: the path to this node is marked.

    Raises:
        ConfigError: a wrong tint or limit, or `top` without a model.
    """
    shown = nearest(root, limit)
    page = Page(
        check(tint),
        node,
        look(shown, top),
        frozenset() if mark is None else frozenset(each.id for each in mark.path),
        sum(len(each.tokens) for each in shown if each.logprobs) <= MAX_TABLED,
    )
    return "".join(_page(root, page, limit))


def _page(root: Heddle, page: Page, limit: int | None) -> Iterator[str]:
    title = as_html(cut(one_line(headline(root), mark=" "), _TITLE)) or "Tree"
    css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
    )
    yield from _header(root)
    yield _bar(page.tint)
    yield '<main>\n<ul class="tree">\n'
    yield from _tree(root, page, limit)
    yield f"</ul>\n</main>\n{_footer(page)}</body>\n</html>\n"


# Around the tree


def _header(root: Heddle) -> Iterator[str]:
    nodes = nearest(root, None)
    n_tokens = sum(len(node.tokens) for node in nodes)
    leaves = sum(not node.children for node in nodes)
    about = [counted(len(nodes), "node"), counted(leaves, "leaf", "leaves")]
    about.append(counted(n_tokens, "token"))
    about += [_model(root)] if _model(root) else []
    asked = headline(root).strip("\n")
    yield f'<header>\n<p class="soft">{as_html(" · ".join(about))}</p>\n'
    yield f'<h1 dir="auto">{as_html(cut(asked, _HEADING))}</h1>\n'
    before = root.get_prefix_text()
    if before != asked:
        n = len(root.get_prefix_tokens())
        said = f"As the model reads it · {counted(n, 'token')}"
        yield f"<details><summary>{said}</summary>"
        yield f'<pre tabindex="0">{as_html(before)}</pre></details>\n'
    yield "</header>\n"


def _model(root: Heddle) -> str:
    if root.lm is not None:
        return root.lm.info.model
    mark = getattr(root.path[0], "saved_by", None)
    return "" if mark is None else str(mark.name)


def _bar(tint: Tint) -> str:
    names = (("p", "probability"), ("h", "entropy"), ("n", "none"))
    choices = "".join(
        f'<label><input type="radio" name="tint" id="tint-{key}"'
        f"{' checked' if tint == name else ''}>{name}</label>"
        for key, name in names
    )
    return (
        f'<div class="bar">\n<fieldset><legend>Tint</legend>{choices}</fieldset>\n'
        f"{_legend(PROBABILITY)}{_legend(ENTROPY)}</div>\n"
    )


def _legend(ramp: Ramp) -> str:
    steps = "".join(
        f'<li class="{ramp.key}{step}">{label}</li>' for step, label in enumerate(ramp.labels)
    )
    return f'<ul class="legend-{ramp.key}" aria-label="{ramp.title}">{steps}</ul>\n'


def _footer(page: Page) -> str:
    tables = "" if page.has_tables else " Tables of tokens are left out: there are too many."
    return (
        "<footer>p and entropy (in nats) are the model’s own, before any filter, over its whole "
        "vocabulary; a node’s p is the mean of its tokens’. Text without tint was given, not "
        f"sampled, or was as good as certain.{tables} Made with Weft.</footer>\n"
    )


# The tree


def _tree(root: Heddle, page: Page, limit: int | None) -> Iterator[str]:
    for each in outline(root, limit):
        if not isinstance(each, Item):
            yield "</ul></details></li>\n" if each.has_branches else "</li>\n"
            continue
        # A prompt is the heading already.
        nodes = [node for node in each.nodes if not isinstance(node, Loom)]
        yield "<li>"
        for node in nodes:
            yield from _node(node, page)
        if each.n_hidden:
            yield f'<p class="soft">… {counted(each.n_hidden, "more node")} below, not shown</p>'
        if each.n_branches:
            far = ' class="far"' if each.forks >= _FAR else ""
            more = each.n_below - each.n_branches
            said = counted(each.n_branches, "branch", "branches")
            said += f" · {counted(more, 'node')} deeper" if more else ""
            yield f'<details class="fold" open><summary>{said}</summary>\n<ul{far}>\n'


def _node(node: Heddle, page: Page) -> Iterator[str]:
    on = " on" if node.id in page.marked else ""
    yield f'<div class="node{on}" id="n-{as_html(node.id)}">'
    yield from _text(node, page) if page.node is None else _told(page.node(node))
    yield "</div>\n"


def _told(text: str) -> Iterator[str]:
    yield f'<div class="text" dir="auto">{as_html(text)}</div>'


def _text(node: Heddle, page: Page) -> Iterator[str]:
    found = pieces(node, page.seen.get(node.id, ()))
    text = "".join(map(_token, found)) or f'<span class="nothing">{NOTHING}</span>'
    yield f'<div class="text" dir="auto">{text}</div>'
    figures = as_html(" · ".join(facts(node)))
    known = page.has_tables and any(piece.logprob is not None for piece in found)
    if not known or found[0].is_mean:
        yield f'<p class="soft">{figures}</p>'
        return
    yield f"<details><summary>{figures}</summary>"
    yield f'<div class="scroll" tabindex="0">{_table(found)}</div></details>'


def _token(piece: Piece) -> str:
    text = as_html(piece.text)
    if piece.logprob is None:
        return text
    levels = [f"p{PROBABILITY.level(piece.p or 0.0)}"]
    if piece.entropy is not None:
        levels.append(f"h{ENTROPY.level(piece.entropy)}")
    line_end = " nl" if piece.text.startswith("\n") else ""
    tip = as_html(tips.tip(piece)).replace("\n", "&#10;")
    return f'<span class="t {" ".join(levels)}{line_end}" data-tip="{tip}">{text}</span>'


def _table(found: Sequence[Piece]) -> str:
    has_seen = any(piece.seen is not None for piece in found)
    heads = ["token", "p", "logprob", "entropy", *(["rank"] if has_seen else [])]
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    wide = '<th scope="col" class="wide">likeliest</th>' if has_seen else ""
    rows = "".join(f"<tr>{_row(piece, has_seen)}</tr>" for piece in found)
    return f"<table><thead><tr>{head}{wide}</tr></thead><tbody>{rows}</tbody></table>"


def _row(piece: Piece, has_seen: bool) -> str:
    cells = [tips.quoted(piece.text), *tips.figures(piece)]
    wide = ""
    if has_seen:
        seen = piece.seen
        cells.append("" if seen is None else str(seen.rank + 1))
        likely = [] if seen is None else [e for e in seen.top if e.p >= _LISTED]
        said = "  ".join(map(tips.alternative, likely))
        wide = f'<td class="wide">{as_html(said)}</td>'
    return "".join(f"<td>{as_html(cell)}</td>" for cell in cells) + wide
