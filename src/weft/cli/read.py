"""`weft read`: the text from the prompt to a node."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import advice, objects, options
from .failures import guarded
from .heat import Tint, legend, tinted
from .kept import Kept, opened
from .out import Out, counted
from .turns import said_at, written

if TYPE_CHECKING:
    from ..loom import Heddle
    from ..tokens.tokenizer import Tokenizer


@guarded
def read(
    node: options.OptionalNode = None,
    loom: options.Loom = None,
    color: options.Color = None,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Read a path as one text.

    One then stands at its end: `weft run -c` and `weft chat -c` go on from there.
    """
    kept = opened(loom)
    at = kept.at = kept.node(node)
    if as_json:
        objects.write(as_object(kept, at))
    else:
        text = None if color is None else tokenizer_of(kept)
        show_path(Out.of(sys.stdout), kept, at, text, color)
    kept.try_note()
    if not as_json:
        number = str(kept.number(at))
        if at.terminal:
            advice.suggest(
                ["weft", "grow", number, "…"], ["weft", "next", number], ["weft", "tree"]
            )
        else:
            grow = ["weft", "grow", number, "-n", "4"]
            advice.suggest(grow, ["weft", "next", number], ["weft", "tree"])


def show_path(
    out: Out,
    kept: Kept,
    node: Heddle,
    text: Tokenizer | None = None,
    tint: Tint | None = None,
) -> None:
    """Write the prompt, what follows down to the node, and how it ended."""
    prompt = kept.loom.user_prompt or kept.loom.text
    if kept.loom.chat_template_used:
        if out.is_terminal:
            out.lines([out.text((row, "bold")) for row in prompt.split("\n")])
        else:
            out.write(f"{prompt}\n")
        out.line()
    if text is not None and tint is not None:
        out.lines([legend(out, tint)])
        out.line()
        _show_tinted(out, node, text, tint)
    elif kept.loom.chat_template_used:
        _write(out, written(node.path[1:]))
    else:
        _write(out, prompt + written(node.path[1:]))
    # Into a file or a pipe goes the text alone.
    about = out if out.is_terminal or tint is not None else Out.of(sys.stderr)
    if about is out:
        out.line()
    sampled = [each for each in node.path if each.logprobs]
    n_tokens = sum(len(each.tokens) for each in sampled)
    facts = [
        f"node {kept.number(node)} of {kept.name}" if kept.name else "",
        counted(n_tokens, "token"),
    ]
    facts.append(ending(node))
    about.facts(" · ".join(filter(None, facts)))


def ending(node: Heddle) -> str:
    """Return how a node ended, in words."""
    if node.terminal:
        return "ended"
    return {
        None: "",
        "stop": f"stopped at {node.stop_string!r}",
        "length": "cut at its length",
        "context": "the context is full",
    }.get(node.finish_reason, str(node.finish_reason))


def tokenizer_of(kept: Kept) -> Tokenizer:
    """Load the tokenizer alone: colours are a token's, and the text does not say where it ends."""
    from ..engines.source import resolve
    from ..tokens.tokenizer import Tokenizer

    return Tokenizer.from_folder(resolve(kept.shelf.summary(kept.name).model))


def as_object(kept: Kept, node: Heddle) -> dict[str, Any]:
    """Return the path for --json."""
    numbers = kept.numbers()
    return {
        "loom": kept.name,
        "node": numbers[node.id],
        "id": node.id,
        "prompt": kept.loom.user_prompt,
        "text": written(node.path[1:]),
        "ended": node.terminal,
        "path": [objects.node_object(each, numbers) for each in node.path],
    }


def _show_tinted(out: Out, node: Heddle, text: Tokenizer, tint: Tint) -> None:
    from rich.text import Text

    whole = Text()
    for each in node.path[1:]:
        said = said_at(each)
        whole.append_text(
            tinted(out, text, each, tint)
            if said is None
            else out.text((f"\n\n> {said}\n\n", "bold"))
        )
    out.block("", whole)


def _write(out: Out, text: str) -> None:
    if out.is_live:
        out.block("", text.strip("\n"))
    else:
        out.write(text if text.endswith("\n") else f"{text}\n")
