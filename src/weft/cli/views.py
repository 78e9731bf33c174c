"""`weft tree`, `weft read` and `weft next`: show a loom, a path, or the next tokens."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from .._core.validation import check_int
from ..errors import ConfigError
from ..service.interchange.user_text import joined_text, user_text_of
from ..viz.color_scale import ColorScale
from ..viz.outline import counted
from ..viz.terminal import TerminalWriter, write_object
from ..viz.text import Picture, color_tokens, legend, node_label, show_distribution
from . import hints, options
from .backend import open_session, open_with_model
from .failures import handle_errors
from .growth_display import below_root
from .options import Tint

if TYPE_CHECKING:
    from ..lm.results import Distribution
    from ..loom import Heddle
    from .session import LoomSession


_SORTS = ("probability", "entropy", "length", "score", "rating")
# The allowed values of --sort.
if TYPE_CHECKING:
    SortKey = str
else:
    SortKey = StrEnum("SortKey", {name: name for name in _SORTS})


@handle_errors
def tree(
    loom: options.OptionalLoom = None,
    named: options.Loom = None,
    top: Annotated[
        int,
        typer.Option(
            "--top",
            help="Draw at most this many children of a node, best scores first; 0 draws all.",
        ),
    ] = 0,
    sort: Annotated[
        SortKey | None,
        typer.Option(
            "--sort",
            help="Order of siblings. Entropy is lowest first, the others highest first.",
            show_default="as they were added",
        ),
    ] = None,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Draw a loom with the numbers of its nodes.

    The commands grow, read, next, rm and export take these numbers.
    """
    if loom is not None and named is not None and loom != named:
        raise ConfigError(f"two looms are given: {loom} and {named}; give one")
    with open_session(loom or named) as session:
        show_loom(session, top, sort=sort, as_json=as_json)


def show_loom(session: LoomSession, top: int, *, sort: str | None = None, as_json: bool) -> None:
    """Draw a loom, or write it as a JSON object; then store it as last used in this terminal.

    Args:
        top: maximum number of children of a node to draw; 0 draws all.
        sort: the order of siblings, as for `sort_siblings`; None: as they were added.

    Raises: ConfigError for a negative `top`.
    """
    top = check_int("--top", top, 0)
    if as_json:
        from ..service.store.json_output import tree_object

        write_object(
            tree_object(
                session.loom, session.name, session.model, session.at, session.numbers(), sort=sort
            )
        )
        session.try_remember()
        return
    out = TerminalWriter.for_stream(sys.stdout)
    path = frozenset(each.id for each in session.at.path[1:])
    out.lines(Picture(out, below_root(session), path=path, top=top, sort=sort).lines(session.loom))
    out.line()
    out.facts(summary_of(session))
    if (note := session.loom.note) is not None:
        out.line((f"author's note at depth {note.depth}: {note.text}", "dim"))
    session.try_remember()
    suggest_for_tree(session)


def summary_of(session: LoomSession) -> str:
    """Return one line: the loom's name, its numbers of nodes, paths and tokens, and its model.

    "unshared" counts the tokens that the paths would have without sharing prefixes.
    """
    nodes = list(session.loom.walk())
    n_tokens = sum(len(node.tokens) for node in nodes)
    depth: dict[str, int] = {}
    unshared = 0
    for node in nodes:
        above = depth[node.parent.id] if node.parent is not None else 0
        depth[node.id] = above + len(node.tokens)
        if not node.children:
            unshared += depth[node.id]
    n_leaves = session.loom.count_leaves()
    return (
        f"{session.name} · {counted(len(nodes) - 1, 'node')}, {counted(n_leaves, 'path')} · "
        f"{counted(n_tokens, 'token')} ({unshared} unshared) · {session.model}"
    )


def suggest_for_tree(session: LoomSession) -> None:
    """Suggest commands on stderr after a tree was drawn."""
    numbers = session.numbers()
    leaves = session.loom.leaves
    at = session.at if session.at is not session.loom else leaves[0]
    start = (at.parent or session.loom) if at.terminal else at
    commands = [["weft", "grow", str(numbers[start.id]), "-n", "4"]]
    if at is not session.loom:
        commands.append(["weft", "read", str(numbers[at.id])])
    hints.suggest(*commands, ["weft", "export", f"{session.name}.html"])


@handle_errors
def read(
    node: options.OptionalNode = None,
    loom: options.Loom = None,
    color: options.Color = None,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Read a path as one text.

    Its end becomes the current node, from which weft run -c and weft chat -c continue.
    """
    with open_session(loom) as session:
        read_node(session, node, color, as_json=as_json)


def read_node(session: LoomSession, node: str | None, color: Tint | None, *, as_json: bool) -> None:
    """Write the path to a node as text or JSON; the node becomes the current node.

    Args:
        session: the loom.
        node: a node number or id; None means the current node.
        color: color tokens by this value; None for no colors.
        as_json: write one JSON object.
    """
    at = session.at = session.node(node)
    if as_json:
        from ..service.store.json_output import path_object

        write_object(path_object(at, session.name, joined_text(at.path[1:]), session.numbers()))
    else:
        show_path(TerminalWriter.for_stream(sys.stdout), session, at, color)
    session.try_remember()
    if not as_json:
        number = str(session.number(at))
        if at.terminal:
            hints.suggest(["weft", "grow", number, "…"], ["weft", "next", number], ["weft", "tree"])
        else:
            grow = ["weft", "grow", number, "-n", "4"]
            hints.suggest(grow, ["weft", "next", number], ["weft", "tree"])


def show_path(
    out: TerminalWriter,
    session: LoomSession,
    node: Heddle,
    tint: Tint | None = None,
) -> None:
    """Write the prompt, the texts down to the node, and one line of facts.

    The facts are the node's number, its number of tokens and why it ended. They go to stderr if
    `out` is piped.

    tint: color tokens by this value; None for no colors.
    """
    prompt = session.loom.user_prompt or session.loom.text
    if session.loom.chat_template_used:
        if out.is_terminal:
            out.lines([out.text((row, "bold")) for row in prompt.split("\n")])
        else:
            out.write(f"{prompt}\n")
        out.line()
    if tint is not None:
        out.lines([legend(out, tint.scale)])
        out.line()
        _show_tinted(out, session, node, tint.scale)
    elif session.loom.chat_template_used:
        _write(out, joined_text(node.path[1:]))
    else:
        _write(out, prompt + joined_text(node.path[1:]))
    # Piped output contains only the text.
    summary = out if out.is_terminal or tint is not None else TerminalWriter.for_stream(sys.stderr)
    if summary is out:
        out.line()
    facts = [
        f"node {session.number(node)} of {session.name}" if session.name else "",
        counted(len(node.tokens), "token"),
    ]
    facts.append(ending(node))
    summary.facts(" · ".join(filter(None, facts)))


def ending(node: Heddle) -> str:
    """Return the reason why a node ended, in words; "" for a node that was not generated."""
    if node.terminal:
        return "ended"
    return {
        None: "",
        "stop": f"stopped at {node.stop_string!r}",
        "length": "cut at its length",
        "context": "the context is full",
    }.get(node.finish_reason, str(node.finish_reason))


def _show_tinted(
    out: TerminalWriter, session: LoomSession, node: Heddle, scale: ColorScale
) -> None:
    """Write the path to a node, each token in the colour of its statistic."""
    from rich.text import Text

    text = Text()
    for part in node.path[1:]:
        message = user_text_of(part)
        text.append_text(
            color_tokens(out, session.pieces(part), part, scale)
            if message is None
            else out.text((f"\n\n> {message}\n\n", "bold"))
        )
    out.block("", text)


def _write(out: TerminalWriter, text: str) -> None:
    """Write a text without markup."""
    if out.is_live:
        out.block("", text.strip("\n"))
    else:
        out.write(text if text.endswith("\n") else f"{text}\n")


@handle_errors
def next_(
    node: options.OptionalNode = None,
    top: Annotated[int, typer.Option("--top", help="Number of tokens.")] = 10,
    loom: options.Loom = None,
    model: options.OwnModel = None,
    engine: options.Engine = "auto",
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Show the likeliest next tokens at a node."""
    with open_with_model(loom, model, engine, kv_budget) as session:
        at = session.at = session.node(node)
        distribution = session.next(at, top)
        if as_json:
            from ..service.store.json_output import next_object

            write_object(
                next_object(
                    at, session.name, distribution, session.numbers(), session.model_handle.stats()
                )
            )
            session.try_remember()
            return
        out = TerminalWriter.for_stream(sys.stdout)
        show_next(out, session, at, distribution)
        out.line()
        out.facts(str(session.model_handle.stats()))
        session.try_remember()
        number = str(session.number(at))
        token_text = second_token(session, distribution)
        grow = [["weft", "grow", number, *token_text, "-n", "4"]] if token_text else []
        hints.suggest(*grow, ["weft", "read", number], ["weft", "tree"])


def second_token(session: LoomSession, distribution: Distribution) -> list[str]:
    """Return arguments of `weft grow` that add the second likeliest token before growing.

    Returns [] if the token is unlikely, ends the text, or cannot be typed.
    """
    if len(distribution) < 2 or distribution[1].p < 0.01:
        return []
    second = distribution[1]
    if session.model_handle.is_stop_token(second.id):
        return []
    text = second.text
    if not TerminalWriter.for_stream(sys.stderr).is_as_typed(text) or "\ufffd" in text:
        return []
    return ["--raw", text] if session.loom.chat_template_used else [text]


def show_next(
    out: TerminalWriter, session: LoomSession, node: Heddle, distribution: Distribution
) -> None:
    """Write the likeliest next tokens at a node as a table with bars.

    distribution: the tokens, as `LoomSession.next` returns them.
    """
    number = session.number(node)
    head = f"after node {number}: " if number else "after the prompt: "
    out.line((head, "bold"), out.fit(_end_of(node), out.width - len(head) - 1))
    out.line()
    show_distribution(out, distribution)


def _end_of(node: Heddle) -> str:
    """Return the last 60 characters of a node's text, on one line."""
    text = " ".join(node_label(node).split())
    return text if len(text) <= 60 else f"…{text[-59:]}"
