"""`weft grow`: more branches from a node of the last tree drawn."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import ConfigError
from . import options
from .failures import guarded
from .growing import Wish, grow_and_report
from .kept import with_model
from .turns import say


@guarded
def grow(
    node: options.Node,
    text: Annotated[
        list[str] | None,
        typer.Argument(
            help="Say this to the node first: an answer, or how it goes on.",
        ),
    ] = None,
    n: options.Branches = 4,
    max_tokens: options.MaxTokens = None,
    loom: options.Loom = None,
    model: options.OwnModel = None,
    engine: options.Engine = "auto",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Say TEXT as the next turn of a chat, or add it as it is.",
            show_default="as the prompt was",
        ),
    ] = None,
    special: options.Special = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    force: Annotated[
        bool, typer.Option("--force", help="Grow a node that has ended, too.")
    ] = False,
    interactive: Annotated[
        bool, typer.Option("-i", "--interactive", help="Stay, and grow on by keys.")
    ] = False,
    color: options.Color = None,
    text_or_tree: options.AsText = None,
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Grow more branches from a node.

    What is not given is as the node itself was grown; the seed is a new one.
    """
    sampling = options.sampling(max_tokens, temperature, top_p, top_k, min_p, seed, stop)
    as_text = options.is_text(text_or_tree, color=color, interactive=interactive, json=as_json)
    wish = Wish(
        n, sampling, color, as_json=as_json, as_text=as_text, stays=interactive, force=force
    )
    said = options.joined(text, "grow", node)
    if said is not None:
        options.check_text(said, "the text")
    elif special:
        raise ConfigError("--special is about the TEXT that is said to the node; give one")
    with with_model(loom, model, engine, kv_budget) as (lm, kept):
        at = kept.node(node)
        wish = wish.with_settings_of(at)
        if said is not None:
            at = say(lm, at, said, chat=chat, special=special)
        grow_and_report(lm, kept, at, wish)
