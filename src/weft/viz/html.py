"""A loom tree as one HTML page, which loads nothing and works without its only script.

Folds are `<details>`, and radio buttons choose the token colors. A token's statistics appear under
the pointer; tables show them to keyboards, touch and screen readers. The script (page.js) adds
search, folding of all nodes, arrow keys and the tooltips of the overview.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from ..loom import Loom
from ..loom.node import preorder_by_call
from .color_scale import ENTROPY, PROBABILITY, ColorScale, Tint, check_tint
from .outline import (
    NOTHING,
    Chain,
    ChainEnd,
    best_path,
    breadth_first,
    children_by_number,
    counted,
    facts,
    geometric_mean_p,
    headline,
    outline,
)
from .terminal import as_html, cut, one_line
from .tokens import Label, NodeDetails, node_html, rank_tokens

if TYPE_CHECKING:
    from ..loom import Heddle

# The page may load nothing, and run only the script with this hash.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; "
    "base-uri 'none'; form-action 'none'"
)
# A page with more nodes is folded below the best path, and starts with an overview.
LARGE = 60
# With more tokens, only colored tokens have statistics, to limit the size of the page.
MAX_TABLED = 20_000
# In a large tree: siblings and consecutive nodes that are shown before the rest is folded.
_SIBLINGS, _RUN = 24, 24
_TITLE, _HEADING = 80, 240
# Deeper levels are indented less, and their siblings are not folded, because folds nest too.
_FAR = 12


@dataclass(frozen=True, slots=True)
class Page:
    """Content and options of one HTML page of a tree.

    chains: the tree in drawing order, as `outline` yields it.
    nodes: the options of each node's HTML.
    is_large: open only the folds on the highlighted path.
    path: the label of the button for the highlighted path of a large page; "" for other pages.
    """

    chains: Sequence[Chain | ChainEnd]
    nodes: NodeDetails
    is_large: bool
    path: str


def to_html(
    root: Heddle,
    *,
    tint: str = "probability",
    top: int = 0,
    limit: int | None = None,
    node: Label | None = None,
    mark: Heddle | None = None,
    numbers: Mapping[str, int] | None = None,
) -> str:
    """Return the tree from `root` down as one self-contained HTML page, to save or to send.

    Args:
        root: the node from which to draw.
        tint: "probability", "entropy" or "none": the token colors when the page opens.
        top: alternatives to show for each sampled token, 0 or more. From 1 on, the model runs one
            forward over each node's tokens.
        limit: maximum number of nodes, nearest to the root first; the page counts the omitted ones
            where they would be.
        node: returns the label of a node; None: its text.
        mark: the path to this node is highlighted.
        numbers: node numbers by id; None: those that `weft tree` gives.

    Raises:
        ConfigError: a wrong tint or limit, or `top` without a model.
    """
    chosen = check_tint(tint)
    if numbers is None:
        numbers = {
            each.id: next_index for next_index, each in enumerate(preorder_by_call(root.path[0]))
        }
    chains = list(outline(root, limit, lambda node: children_by_number(node, numbers)))
    shown = {node.id: node for item in chains if isinstance(item, Chain) for node in item.nodes}
    is_large = sum(not isinstance(each, Loom) for each in shown.values()) > LARGE
    path = [] if mark is None else [each for each in mark.path[1:] if each.id in shown]
    heading = f"Path to node {numbers.get(path[-1].id, path[-1].id)}" if path else "Best path"
    if is_large and not path:
        path = [each for each in best_path(root) if each.id in shown]
    ids = frozenset(each.id for each in path)
    n_tokens = sum(len(each.tokens) for each in shown.values() if each.logprobs)
    nodes = NodeDetails(
        numbers, node, rank_tokens(list(shown.values()), top), ids, n_tokens > MAX_TABLED
    )
    page = Page(chains, nodes, is_large, heading if is_large and path else "")
    overview_html = overview(chains, nodes, path, heading) if is_large else ""
    return "".join(_page(root, page, chosen, overview_html))


def _page(root: Heddle, page: Page, tint: Tint, overview_html: str) -> Iterator[str]:
    """Yield the parts of the HTML page, from the doctype to the end.

    overview_html: HTML of the drawing of the full tree; "" for none.
    """
    title = as_html(cut(one_line(headline(root), mark=" "), _TITLE)) or "Tree"
    css, script = _read_asset("page.css"), _read_asset("page.js")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(allowed)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
    )
    yield from _header(root)
    yield _toolbar(tint, page.path)
    widest = max(len(str(number)) for number in page.nodes.numbers.values())
    yield f'<main>\n{overview_html}<ul class="tree" style="--no:{widest / 2 + 0.2}rem">\n'
    yield from _tree_html(page)
    yield f"</ul>\n</main>\n{_footer(page)}<script>{script}</script>\n</body>\n</html>\n"


def _read_asset(name: str) -> str:
    """Return the text of a file of this package: the style sheet or the script."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# Around the tree


def _header(root: Heddle) -> Iterator[str]:
    """Yield the page's header: counts of nodes and tokens, the model, and the prompt."""
    nodes = breadth_first(root, None)
    n_tokens = sum(len(node.tokens) for node in nodes)
    leaves = sum(not node.children for node in nodes)
    # A prompt is not counted as a node, as in `weft tree`.
    n_nodes = len(nodes) - isinstance(root, Loom)
    about = [counted(n_nodes, "node"), counted(leaves, "leaf", "leaves")]
    about.append(counted(n_tokens, "token"))
    about += [_model_name(root)] if _model_name(root) else []
    prompt = headline(root).strip("\n")
    yield f'<header>\n<p class="soft">{as_html(" · ".join(about))}</p>\n'
    yield f'<h1 dir="auto">{as_html(cut(prompt, _HEADING))}</h1>\n'
    before = root.get_prefix_text()
    if before != prompt:
        n = len(root.get_prefix_tokens())
        summary = f"As the model reads it · {counted(n, 'token')}"
        yield f"<details><summary>{summary}</summary>"
        yield f'<pre tabindex="0">{as_html(before)}</pre></details>\n'
    yield "</header>\n"


def _model_name(root: Heddle) -> str:
    """Return the name of the model, also of a saved loom without one; "" if unknown."""
    if root.lm is not None:
        return root.lm.info.model
    mark = getattr(root.path[0], "saved_by", None)
    return "" if mark is None else str(mark.name)


def _toolbar(tint: Tint, path: str) -> str:
    """Return the HTML of the toolbar: search, folding, token colors and their legends.

    path: the label of the button for the highlighted path; "" for no button.
    """
    names = (("p", "probability"), ("h", "entropy"), ("n", "none"))
    choices = "".join(
        f'<label><input type="radio" name="tint" id="tint-{key}"'
        f"{' checked' if tint == name else ''}>{name}</label>"
        for key, name in names
    )
    path_button = f'<button type="button" id="path">{as_html(path)}</button>' if path else ""
    return (
        '<section class="bar" aria-label="View">\n<div class="tools" hidden>'
        '<input type="search" id="find" placeholder="Find a text or a number" '
        'aria-label="Find a text or a number">'
        '<span class="hits"><button type="button" id="back" aria-label="Previous" hidden>‹</button>'
        '<button type="button" id="next" aria-label="Next" hidden>›</button>'
        '<output for="find"></output></span>'
        '<button type="button" id="open">Unfold all</button>'
        f'<button type="button" id="fold">Fold all</button>{path_button}</div>\n'
        f'<div class="tints"><fieldset><legend>Tint</legend>{choices}</fieldset>\n'
        f"{_legend(PROBABILITY)}{_legend(ENTROPY)}</div></section>\n"
    )


def _legend(scale: ColorScale) -> str:
    """Return the HTML list that explains a color scale."""
    steps = "".join(
        f'<li class="{scale.key}{step}">{label}</li>' for step, label in enumerate(scale.labels)
    )
    return f'<ul class="legend-{scale.key}" aria-label="{scale.title}">{steps}</ul>\n'


def _footer(page: Page) -> str:
    """Return the HTML of the page's footer, which explains the statistics."""
    terse = ""
    if page.nodes.is_terse:
        terse = " There are too many tokens for tables, and for statistics of uncolored ones."
    return (
        "<footer>p and entropy (in nats) are the model’s own, before any filter, over its full "
        "vocabulary; a node’s p is the mean of its tokens’. Text without color was given, not "
        f"sampled, or was nearly certain.{terse} A node’s number is that of weft tree. "
        '<span class="keys" hidden>In the tree, the arrow keys go from fold to fold, open and '
        "close. </span>Created with Weft.</footer>\n"
    )


# The tree


@dataclass(slots=True)
class _Level:
    """The siblings below one chain, while `_tree_html` writes them one by one.

    n: number of siblings.
    marked_index: index of the sibling on the highlighted path; -1 for none.
    is_folded: only the first siblings are visible, the others are in a fold.
    ends: HTML that follows the last sibling.
    """

    n: int  # number of branches
    marked_index: int  # index of the branch on the highlighted path; -1: none
    is_folded: bool  # fold the branches after the first ones
    ends: str  # markup that closes the chain
    next_index: int = 0  # index of the next branch
    is_in_rest: bool = False  # a fold of siblings is open

    def before_next(self) -> str:
        """Return the HTML before the next sibling, and advance to it.

        In a long row of siblings it opens a fold, or closes one before the highlighted sibling.
        """
        next_index, marked_index = self.next_index, self.marked_index
        self.next_index += 1
        if not self.is_folded or next_index < _SIBLINGS:
            return ""
        if next_index == marked_index:
            return self.end_of_rest()
        if self.is_in_rest:
            return ""
        self.is_in_rest = True
        n = (marked_index if marked_index > next_index else self.n) - next_index
        summary = counted(n, "more branch", "more branches")
        return f'<li class="rest"><details class="fold"><summary>{summary}</summary>\n<ul>\n'

    def end_of_rest(self) -> str:
        """Return the HTML that closes the fold of siblings; "" if none is open."""
        is_open, self.is_in_rest = self.is_in_rest, False
        return "</ul></details></li>\n" if is_open else ""


def _tree_html(page: Page) -> Iterator[str]:
    """Yield the nested lists of the full tree."""
    levels: list[_Level] = []
    for entry in page.chains:
        if isinstance(entry, Chain):
            yield levels[-1].before_next() if levels else ""
            has_fold = yield from _chain_html(entry, page)
            levels.append(_open_level(entry, page, "</details></li>\n" if has_fold else "</li>\n"))
            continue
        level = levels.pop()
        yield level.end_of_rest() + ("</ul>" if level.n else "") + level.ends


def _open_level(each: Chain, page: Page, ends: str) -> _Level:
    """Return the state for writing the branches below a chain.

    ends: HTML that follows the last branch.
    """
    is_folded = page.is_large and each.n_branches > _SIBLINGS + 1 and each.forks < _FAR
    marked_index = -1
    if is_folded:
        children = children_by_number(each.nodes[-1], page.nodes.numbers)
        marked = page.nodes.marked
        marked_index = next(
            (next_index for next_index, child in enumerate(children) if child.id in marked), -1
        )
    return _Level(each.n_branches, marked_index, is_folded, ends)


def _chain_html(each: Chain, page: Page) -> Generator[str, None, bool]:
    """Yield the HTML of one chain's nodes; return True if the caller must close a fold.

    The fold contains the branches below the chain, which follow later.
    """
    # The heading shows the prompt.
    nodes = [node for node in each.nodes if not isinstance(node, Loom)]
    is_open = not page.is_large or not each.forks or nodes[0].id in page.nodes.marked
    shown, rest = (nodes, []) if is_open else (nodes[:1], nodes[1:])
    yield "<li>"
    yield from _nodes_html(shown, page)
    hidden = f"… {counted(each.n_hidden, 'more node')} below, not shown"
    hidden = f'<p class="soft">{hidden}</p>' if each.n_hidden else ""
    if not rest and not each.n_branches:
        yield hidden
        return False
    more = each.n_below - each.n_branches
    parts = [f"{counted(len(rest), 'node')} further"] if rest else []
    parts += [counted(each.n_branches, "branch", "branches")] if each.n_branches else []
    parts += [f"{counted(more, 'node')} deeper"] if more else []
    state = " open" if is_open else ""
    yield f'<details class="fold"{state}><summary>{" · ".join(parts)}</summary>\n'
    yield from (node_html(node, page.nodes) for node in rest)
    yield hidden
    if each.n_branches:
        yield '<ul class="far">\n' if each.forks >= _FAR else "<ul>\n"
    return True


def _nodes_html(nodes: Sequence[Heddle], page: Page) -> Iterator[str]:
    """Yield the HTML of a chain's nodes; in a long chain, all but the first and last are folded."""
    half = _RUN // 2 if page.is_large and len(nodes) > _RUN + 1 else len(nodes)
    chains = [node_html(node, page.nodes) for node in nodes]
    yield from chains[:half]
    if len(nodes) > half:
        summary = counted(len(nodes) - 2 * half, "more node")
        yield f'<details class="fold"><summary>{summary}</summary>\n'
        yield from chains[half:-half]
        yield "</details>\n"
        yield from chains[-half:]


# Width of the overview in units; bars that start closer together than the minimum are left out.
_WIDE, _MIN_BAR = 1000, 0.5
_TALLEST, _ROW = 220, 22
_STEPS = 5
# Number of first and of last nodes of a path in its list.
_FIRST, _LAST = 4, 8
_LINE = 90


class BranchBar(NamedTuple):
    """The rectangle of a chain in the overview drawing.

    item: the chain.
    row: its row, counted from the top.
    x, width: its left edge and its width, in SVG units.
    """

    item: Chain
    row: int
    x: float
    width: float


def overview(
    chains: Sequence[Chain | ChainEnd], page: NodeDetails, path: Sequence[Heddle], heading: str
) -> str:
    """Return HTML with a small drawing of the full tree, and links to the nodes of a path.

    Args:
        chains: the tree in drawing order, as `outline` yields it.
        page: the options of each node's HTML.
        path: the nodes to link.
        heading: the heading above the links.
    """
    return f'<section class="over" aria-label="Overview">\n{_overview_svg(chains, page)}' + (
        f"<h2>{as_html(heading)}</h2>\n<ol>\n{''.join(_path_items(path, page))}</ol>\n</section>\n"
        if path
        else "</section>\n"
    )


def _overview_svg(chains: Sequence[Chain | ChainEnd], page: NodeDetails) -> str:
    """Return a figure with the SVG drawing of the tree and its caption."""
    bars = list(_bars([item for item in chains if isinstance(item, Chain)]))
    n_rows = 1 + max((bar.row for bar in bars), default=0)
    height = min(_ROW, _TALLEST / n_rows)
    tints = _score_classes(bars) or _probability_classes(bars)
    rects = "".join(_svg_rects(bars, tints, page, height))
    by = "the better its score" if _has_scores(bars) else "the less likely its tokens"
    label = f"{counted(len(bars), 'branch', 'branches')} in {counted(n_rows, 'level')}"
    return (
        f'<figure><svg role="img" aria-label="{label}" viewBox="0 0 {_WIDE} {n_rows * height:.1f}" '
        f'preserveAspectRatio="none" style="height:{n_rows * height:.0f}px">{rects}</svg>\n'
        '<figcaption class="soft">A bar is a branch: the wider, the more leaves below it; the '
        f"darker, {by}. Green is the path.</figcaption></figure>\n"
    )


def _bars(items: Sequence[Chain]) -> Iterator[BranchBar]:
    """Yield a rectangle for each chain below the prompt; its width is its share of the leaves."""
    above = _parent_indices(items)
    leaves = [0 if item.n_branches else 1 for item in items]
    for next_index in range(len(items) - 1, 0, -1):
        leaves[above[next_index]] += leaves[next_index]
    unit = _WIDE / leaves[0]
    begins = [0.0] * len(items)
    # The position of the next chain below each one.
    free = [0.0] * len(items)
    has_root = not all(isinstance(node, Loom) for node in items[0].nodes)
    for next_index, item in enumerate(items):
        if next_index:
            begins[next_index] = free[above[next_index]]
            free[above[next_index]] += leaves[next_index] * unit
        free[next_index] = begins[next_index]
        if next_index or has_root:
            yield BranchBar(
                item, item.forks - (not has_root), begins[next_index], leaves[next_index] * unit
            )


def _parent_indices(items: Sequence[Chain]) -> list[int]:
    """Return for each chain the index of its parent chain in `items`; 0 for the first chain."""
    above, at_fork = [], {-1: 0}
    for next_index, item in enumerate(items):
        above.append(at_fork[item.forks - 1])
        at_fork[item.forks] = next_index
    return above


def _svg_rects(
    bars: Sequence[BranchBar], tints: Mapping[int, str], page: NodeDetails, height: float
) -> Iterator[str]:
    """Yield the SVG rectangles of the bars; those too close to their neighbor are omitted.

    tints: CSS class by index of the bar.
    """
    ends: dict[int, float] = {}
    for next_index, (item, row, x, width) in enumerate(bars):
        first = next(node for node in item.nodes if not isinstance(node, Loom))
        is_on = first.id in page.marked
        if not is_on and x - ends.get(row, -_MIN_BAR) < _MIN_BAR:
            continue
        ends[row] = x
        tint = "on" if is_on else tints[next_index]
        shown = max(width - min(1.0, width / 8), _MIN_BAR)
        yield (
            f'<rect class="{tint}" x="{x:.1f}" y="{row * height:.1f}" width="{shown:.1f}" '
            f'height="{height - min(1.0, height / 8):.1f}" data-n="n-{as_html(first.id)}"/>'
        )


def _has_scores(bars: Sequence[BranchBar]) -> bool:
    """Return True if any node has a score."""
    return any(node.score is not None for bar in bars for node in bar.item.nodes)


def _score_classes(bars: Sequence[BranchBar]) -> dict[int, str]:
    """Return the CSS color class of each bar by its score: bar index → s0 (worst) to s5 (best).

    Bars without a score have s0. Returns {} if no node has a score.
    """
    if not _has_scores(bars):
        return {}
    score_of = {next_index: _last_score(bar.item.nodes) for next_index, bar in enumerate(bars)}
    scores = [s for s in score_of.values() if s is not None and math.isfinite(s)] or [0.0]
    low, high = min(scores), max(scores)
    # Halves: the difference of two large scores may be infinite.
    span = high / 2 - low / 2

    def step(score: float | None) -> int:
        """Return the color step of a score, 0 to 5, relative to the lowest and highest one."""
        if score is None or math.isnan(score):
            return 0
        share = (score / 2 - low / 2) / span if span else float(score >= high)
        return round(_STEPS * min(max(share, 0.0), 1.0))

    return {next_index: f"s{step(score)}" for next_index, score in score_of.items()}


def _last_score(nodes: Sequence[Heddle]) -> float | None:
    """Return the score of the last node that has one, or None."""
    return next((node.score for node in reversed(nodes) if node.score is not None), None)


def _probability_classes(bars: Sequence[BranchBar]) -> dict[int, str]:
    """Return the CSS color class of each bar by probability: bar index → p0 (likely) to p5.

    It is the step of the mean probability of the bar's first sampled node; p0 without one.
    """
    classes = {}
    for next_index, bar in enumerate(bars):
        sampled = [node for node in bar.item.nodes if node.logprobs]
        level = PROBABILITY.level(geometric_mean_p(sampled[0])) if sampled else 0
        classes[next_index] = f"p{level}"
    return classes


def _path_items(path: Sequence[Heddle], page: NodeDetails) -> Iterator[str]:
    """Yield a list item with a link for each node of the path; a long path is shortened."""
    nodes = [node for node in path if not isinstance(node, Loom) and node.id in page.numbers]
    left_out = len(nodes) - _FIRST - _LAST
    for next_index, node in enumerate(nodes):
        if left_out > 1 and _FIRST <= next_index < _FIRST + left_out:
            if next_index == _FIRST:
                yield f'<li class="soft">… {counted(left_out, "more node")}</li>\n'
            continue
        text = one_line(headline(node) if page.node is None else page.node(node), mark=" ")
        statistics = "" if page.node is not None else as_html(" · ".join(facts(node)[1:]))
        number = page.numbers[node.id]
        yield (
            f'<li><a class="no" href="#{number}">{number}</a> '
            f'<span dir="auto">{as_html(cut(text, _LINE)) or NOTHING}</span> '
            f'<span class="soft">{statistics}</span></li>\n'
        )
