"""Trees, texts and distributions as lines of text, for logs, notebooks and terminals."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TextIO, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from .color_scale import ColorScale
from .outline import NOTHING, children_by_number, facts, geometric_mean_p, headline
from .terminal import WIDTH, Part, TerminalWriter, can_write, one_line

if TYPE_CHECKING:
    from ..lm.results import Distribution
    from ..loom import Heddle

Label = Callable[["Heddle"], str]
T = TypeVar("T")

# Minimum width of a label, at any depth.
MIN_LABEL = 24


class Style(NamedTuple):
    """The characters of a drawing, Unicode or ASCII.

    The first four are four columns wide, one level of the tree.
    """

    tee: str  # before a node that has later siblings
    corner: str  # before the last child
    pipe: str  # a line that continues to a later sibling
    blank: str
    cut: str  # mark of a cut text
    dot: str  # between statistics
    deep: str  # replaces connecting lines that do not fit
    times: str  # before the number of equal leaves


UNICODE = Style("├── ", "└── ", "│   ", "    ", "…", "·", "⋯", "×")
ASCII = Style("|-- ", "`-- ", "|   ", "    ", "...", ",", "~", "x")


def lines(
    root: Heddle,
    *,
    node: Label | None = None,
    edge: Label | None = None,
    width: int = WIDTH,
    style: Style = UNICODE,
) -> Iterator[tuple[Text, int]]:
    """Yield the drawing of a tree, line by line: (line, number of nodes on it).

    Leaves of one parent with equal labels share a line.

    Args:
        root: the node from which to draw.
        node: returns the label of a node; None: its text and statistics.
        edge: returns the label of the line to a node, written before the node; None: no labels.
        width: maximum number of columns.
        style: the characters of the drawing.

    Cost: O(nodes), at any depth.
    """

    def children_of(group: list[Heddle]) -> list[list[Heddle]]:
        return group_equal_leaves(group[0].children, node, edge)

    for group, rails in tree_lines([root], children_of, width, style):
        yield _node_line(group, rails, node, edge, width, style), len(group)


def tree_lines(
    top: T, children_of: Callable[[T], Sequence[T]], width: int, style: Style
) -> Iterator[tuple[T, str]]:
    """Yield (item, connecting lines before it) for each line of a tree, from the top down.

    Args:
        top: the root of the tree.
        children_of: returns the children of an item.
        width: columns of the drawing. Connecting lines that do not fit are shortened.
        style: the characters of the drawing.

    Cost: O(lines), at any depth.
    """
    stack = [(top, "", "", 0)]
    inside = {"": "", style.tee: style.pipe, style.corner: style.blank}
    while stack:
        each, rails, joint, depth = stack.pop()
        yield each, _shorten_rails(rails, depth, width, style) + joint
        # Only the last columns are drawn; keeping more would take quadratic time in deep trees.
        rails = (rails + inside[joint])[-width:]
        joint = style.corner
        for under in reversed(children_of(each)):
            stack.append((under, rails, joint, depth + 1))
            joint = style.tee


def group_equal_leaves(
    children: Sequence[Heddle], node: Label | None, edge: Label | None
) -> list[list[Heddle]]:
    """Return children in groups that share a line: leaves with equal labels form one group.

    node, edge: return the labels, as for `lines`.
    """
    groups: dict[object, list[Heddle]] = {}
    for child in children:
        words = (child.text, node and node(child), edge and edge(child))
        groups.setdefault(child.id if child.children else words, []).append(child)
    return list(groups.values())


def draw(
    root: Heddle,
    *,
    node: Label | None = None,
    edge: Label | None = None,
    width: int = WIDTH,
    style: Style = UNICODE,
    limit: int | None = None,
) -> Iterator[str]:
    """Yield the drawing of a tree line by line, as plain text.

    limit: maximum number of lines; the rest is counted. None: no limit. The other arguments are
    those of `lines`.
    """
    drawing = lines(root, node=node, edge=edge, width=width, style=style)
    rest = root.count_children() if limit is not None else 0
    for line, n in itertools.islice(drawing, limit):
        rest -= n
        yield line.plain.rstrip()
    if rest > 0:
        yield _count_omitted(rest, style)


def _count_omitted(n_nodes: int, style: Style) -> str:
    """Return the last line of a cut drawing, such as "… 12 more nodes"."""
    return f"{style.cut} {n_nodes} more node{'s' if n_nodes != 1 else ''}"


def show(
    root: Heddle,
    *,
    node: Label | None = None,
    edge: Label | None = None,
    file: TextIO | None = None,
    limit: int | None = None,
) -> None:
    """Print the drawing of a tree, on a terminal with colors and in its width.

    file: the stream; None: standard output. The other arguments are those of `draw`.
    """
    file = sys.stdout if file is None else file
    out = TerminalWriter.for_stream(file)
    width, style = out.width, ASCII if out.is_ascii else UNICODE
    if not out.is_terminal:
        for line in draw(root, node=node, edge=edge, width=width, style=style, limit=limit):
            file.write(_escape_for(file, line) + "\n")
        return
    drawing = lines(root, node=node, edge=edge, width=width, style=style)
    rest = root.count_children() if limit is not None else 0
    for text, n in itertools.islice(drawing, limit):
        rest -= n
        out.console.print(text)
    if rest > 0:
        out.console.print(_count_omitted(rest, style), style="dim")


def _shorten_rails(rails: str, depth: int, width: int, style: Style) -> str:
    """Return the connecting lines before a node, shortened if they would fill the width.

    A shortened one has the depth as a number, then the last connecting line.
    """
    columns = 4 * max(depth - 1, 0)
    room = width // 2
    if columns <= room:
        return rails
    mark = f"{style.deep}{depth} "
    keep = (room - len(mark)) // 4 * 4
    return mark + (rails[-keep:] if keep > 0 else "")


def _node_line(
    group: Sequence[Heddle],
    rails: str,
    node: Label | None,
    edge: Label | None,
    width: int,
    style: Style,
) -> Text:
    """Return the line of a group of equal nodes: connecting lines, label and statistics."""
    at, n = group[0], len(group)
    before = (
        f"{_escaped_line(edge(at), style)} " if edge is not None and at.parent is not None else ""
    )
    parts = [*([f"{style.times}{n}"] if n > 1 else []), *(facts(at) if node is None else [])]
    statistics = "  " + f" {style.dot} ".join(parts) if parts else ""
    label = _escaped_line(headline(at) if node is None else node(at), style)
    room = max(width - len(rails + statistics) - _columns(before), MIN_LABEL)
    line = Text(no_wrap=True)
    line.append(rails, "dim").append(before, "cyan")
    colour = colour_of(geometric_mean_p(at)) if at.logprobs else "bold"
    line.append(_shorten(label, room, style), colour)
    return line.append(statistics, "dim")


def _escaped_line(text: str, style: Style) -> str:
    """Return the text on one line, with control characters escaped."""
    return one_line(text, mark="\\n" if style is ASCII else "⏎")


def _shorten(text: str, room: int, style: Style) -> str:
    """Return the text cut to `room` columns, with a mark if it was longer."""
    # Cut a long label before measuring it.
    text = text[: 2 * room]
    if _columns(text) <= room:
        return text
    return set_cell_size(text, room - len(style.cut)).rstrip() + style.cut


def _columns(text: str) -> int:
    """Return the number of terminal columns of a text."""
    return len(text) if text.isascii() else cell_len(text)


def colour_of(p: float) -> str:
    """Return the terminal color of a node with this mean probability."""
    return "green" if p >= 0.8 else "yellow" if p >= 0.5 else "red"


def _escape_for(file: TextIO, line: str) -> str:
    """Return the line with characters escaped that the file's encoding lacks."""
    if can_write(file.encoding, line):
        return line
    encoding = file.encoding or "utf-8"
    return line.encode(encoding, errors="backslashreplace").decode(encoding)


# Scores from _GOOD on are green; those below _BAD are dim.
_GOOD, _BAD = 0.5, 0.05


class PictureLine(NamedTuple):
    """One line of a `Picture`.

    nodes: the node of this line, or several siblings with equal texts. Empty: the line counts
        siblings that are not drawn.
    n_left_out: number of siblings that are not drawn.
    """

    nodes: tuple[Heddle, ...]
    n_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing of a tree for a terminal, with node numbers, which can leave out nodes.

    out: the terminal.
    numbers: node id → number, written before the nodes.
    path: ids of nodes that are drawn in bold, and that `top` does not leave out.
    top: maximum number of children of a node; 0: all. Without `sort`, best scores come first.
    sort: the order of siblings, as for `sort_siblings`; None: as they were added.
    focus: ids of all nodes of a path, without the root. Other branches along this path are
        omitted; its end is drawn with all nodes below it. Empty: draw all.
    """

    out: TerminalWriter
    numbers: Mapping[str, int] = field(default_factory=dict)
    path: frozenset[str] = frozenset()
    top: int = 0
    focus: frozenset[str] = frozenset()
    sort: str | None = None

    def lines(self, root: Heddle) -> Iterator[Text]:
        """Yield the lines of the drawing from `root` down. Cost: O(nodes), at any depth."""
        style = ASCII if self.out.is_ascii else UNICODE
        top = PictureLine((root,))
        for shown, rails in tree_lines(top, self._children, self.out.width, style):
            yield self._node_line(shown, rails)

    def _children(self, shown: PictureLine) -> list[PictureLine]:
        """Return the lines below a line; leaves with equal texts share one line.

        If `top` or `focus` leaves out children, the last line counts them.
        """
        if not shown.nodes:
            return []
        children = children_by_number(shown.nodes[0], self.numbers)
        if self.sort is not None:
            from ..loom.sibling_order import sort_siblings

            children = sort_siblings(children, self.sort)
        children_of = [
            PictureLine(tuple(group)) for group in group_equal_leaves(children, None, None)
        ]
        chosen = [each for each in children_of if any(n.id in self.focus for n in each.nodes)]
        if not chosen and self.top:
            if self.sort is None:
                children_of.sort(key=lambda each: _by_score(each.nodes[0].score))
            chosen = [
                each
                for at, each in enumerate(children_of)
                if at < self.top or self._is_on_path(each)
            ]
        if not chosen:
            return children_of
        left_out = len(children) - sum(len(each.nodes) for each in chosen)
        return [*chosen, PictureLine((), left_out)] if left_out else chosen

    def _is_on_path(self, shown: PictureLine) -> bool:
        """Return True if a node of this line is in `path`."""
        return any(node.id in self.path for node in shown.nodes)

    def _node_line(self, shown: PictureLine, rails: str) -> Text:
        """Return the text of a line.

        rails: the connecting lines before it.
        """
        if not shown.nodes:
            return self.out.text((rails, "dim"), (f"… {shown.n_left_out} more", "dim"))
        node = shown.nodes[0]
        number = " ".join(str(self.numbers[n.id]) for n in shown.nodes if n.id in self.numbers)
        parts = "" if node.parent is None else " · ".join(_group_facts(shown.nodes))
        number, parts = number and f"{number}  ", parts and f"  {parts}"
        room = self.out.width - cell_len(rails) - len(number) - cell_len(parts)
        label = self.out.fit(node_label(node).strip(), max(room, MIN_LABEL))
        style = "bold" if node.parent is None or self._is_on_path(shown) else _node_style(node)
        return self.out.text((rails, "dim"), (number, "cyan"), (label, style), (parts, "dim"))


def _by_score(score: float | None) -> float:
    """Return a sort key: highest scores first, then nodes without a score."""
    return math.inf if score is None else -score


def node_label(node: Heddle) -> str:
    """Return the text to draw for a node; a placeholder if it is empty."""
    return headline(node) or NOTHING


def _group_facts(nodes: Sequence[Heddle]) -> list[str]:
    """Return the statistics of nodes with equal texts: their number, and score or facts."""
    node = nodes[0]
    group = [f"×{len(nodes)}"] if len(nodes) > 1 else []
    # A score replaces the other statistics.
    return [*group, *(facts(node) if node.score is None else [f"{node.score:z.2f}"])]


def _node_style(node: Heddle) -> str:
    """Return Rich's style for a node: by its score, else by its mean probability."""
    if node.score is not None:
        # A negative score is a mean logprob.
        good = node.score if node.score >= 0 else math.exp(node.score)
        return "green" if good >= _GOOD else "dim" if good < _BAD else "yellow"
    return colour_of(geometric_mean_p(node)) if node.logprobs else ""


def color_tokens(
    out: TerminalWriter, pieces: Sequence[str], node: Heddle, scale: ColorScale
) -> Text:
    """Return a node's text with each token colored by a statistic.

    If `out` has no colors, surprising tokens are followed by their values in braces.

    Args:
        out: the terminal.
        pieces: the text of each token. A character of several tokens belongs to the last of them.
        node: the node, with the statistics of its tokens.
        scale: the statistic to show, and its colors.
    """
    text = Text()
    colours = out.has_colours
    logprobs, entropies = node.logprobs, node.entropies
    for at, piece in enumerate(pieces):
        if not (logprobs if scale.key == "p" else entropies):
            text.append(out.escape(piece))
            continue
        value = math.exp(logprobs[at]) if scale.key == "p" else entropies[at]
        text.append(out.escape(piece), scale.styles[scale.level(value)] if colours else "")
        if not colours and piece:
            text.append(scale.braced(value))
    return text


def legend(out: TerminalWriter, scale: ColorScale) -> Text:
    """Return a line that explains the colors of a scale, or its values in braces."""
    if not out.has_colours:
        return out.text((f"in braces: {scale.in_braces}", "dim"))
    parts: list[Part] = [(f"{scale.name}  ", "dim")]
    for label, style in zip(scale.labels, scale.styles, strict=True):
        parts += [(f" {label} ", style), " "]
    return out.text(*parts)


_BAR, _VOTES_BAR = 30, 24


def show_distribution(out: TerminalWriter, entries: Distribution) -> None:
    """Print a next-token distribution: likeliest tokens with bars, then the sum of all others."""
    texts = [quoted_token(out, each.text) for each in entries]
    width = min(max((cell_len(text) for text in texts), default=0), out.width - _BAR - 14)
    for entry, text in zip(entries, texts, strict=True):
        text = text if cell_len(text) <= width else out.fit(text, width)
        style = "green" if entry.p >= 0.5 else "yellow" if entry.p >= 0.1 else "dim"
        out.line(
            (f"{entry.rank + 1:>3}  ", "dim"),
            text + " " * (width - cell_len(text)),
            f"  {_format_percent(entry.p):>7}  ",
            ("█" * round(_BAR * entry.p), style),
        )
    out.line()
    rest = max(1.0 - sum(entry.p for entry in entries), 0.0)
    out.line((f"raw probabilities, before any filter; all others together {rest:.2%}", "dim"))


def quoted_token(out: TerminalWriter, text: str) -> str:
    """Return a token's text in quotes, so that spaces are visible."""
    return out.escape(repr(text) if text.isprintable() or "\ufffd" not in text else ascii(text))


def _format_percent(p: float) -> str:
    """Return a probability as a percentage; very small ones in scientific notation."""
    return f"{p:.2%}" if p >= 0.00005 else f"{p:.0e}"


def show_votes(
    out: TerminalWriter,
    votes: Sequence[tuple[object, int]],
    total: int,
    *,
    width: int = 0,
    of: str = "",
) -> None:
    """Print a bar chart of votes, one line per answer.

    Args:
        out: the output.
        votes: (answer, count), most votes first.
        total: the count of a full bar.
        width: minimum columns of the answers.
        of: text after each count, such as " of 8".
    """
    width = max([width, *(len(str(answer)) for answer, _ in votes)])
    for place, (answer, count) in enumerate(votes):
        bar = "█" * max(1, round(_VOTES_BAR * count / total))
        style = "green" if place == 0 else "dim"
        out.line(f"  {answer!s:>{width}}  ", (bar, style), f" {count}{of}")
