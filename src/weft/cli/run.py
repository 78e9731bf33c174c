"""`weft run`: n branches from one prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .. import samples
from ..errors import ConfigError
from . import options
from .failures import guarded
from .growing import Wish, grow_and_report
from .kept import Kept, with_model
from .model import TINY, load_model
from .out import Out
from .turns import refuse_special, say

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Loom


@guarded
def run(
    context: typer.Context,
    prompt: options.Prompt = None,
    n: options.Branches = 4,
    max_tokens: options.MaxTokens = None,
    model: options.Model = TINY,
    engine: options.Engine = "auto",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask through the chat template, or continue the text as it is.",
            show_default="chat if the model has a template",
        ),
    ] = None,
    special: options.Special = False,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="A system message.", show_default=False)
    ] = None,
    go_on: Annotated[
        bool, typer.Option("-c", "--continue", help="Say it to the branch last read or grown.")
    ] = False,
    loom: options.Loom = None,
    interactive: Annotated[
        bool, typer.Option("-i", "--interactive", help="Stay, and grow on by keys.")
    ] = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    color: options.Color = None,
    text_or_tree: options.AsText = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep the loom, for grow, tree, read, export.")
    ] = True,
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Grow branches from a prompt and draw them as a tree."""
    sampling = options.sampling(max_tokens, temperature, top_p, top_k, min_p, seed, stop)
    sampling |= options.constraint(json_schema)
    as_text = options.is_text(text_or_tree, color=color, interactive=interactive, json=as_json)
    wish = Wish(n, sampling, color, keep=keep, as_json=as_json, as_text=as_text, stays=interactive)
    # Where one stays, what comes in are the keys.
    if interactive:
        text = options.joined(prompt, "run") or ""
    else:
        example = f'weft run "{samples.story}" -n 4'
        text = options.read_prompt(prompt, "run", example=example, is_optional=go_on)
    if loom is not None and not go_on:
        raise ConfigError("--loom says which loom -c continues; without -c a new one is made")
    if go_on:
        if system is not None:
            raise ConfigError("-s has no meaning with -c: the loom has its system message")
        own = model if options.was_typed(context, "model") else None
        with with_model(loom, own, engine, kv_budget) as (lm, kept):
            carry_on(lm, kept, text, chat, wish, special=special)
        return
    with load_model(model, engine, kv_budget) as lm:
        kept = Kept.new(make_loom(lm, text, chat, system, special=special), model, engine)
        grow_and_report(lm, kept, kept.loom, wish)


def carry_on(
    lm: LM, kept: Kept, text: str, chat: bool | None, wish: Wish, *, special: bool = False
) -> None:
    """Say a text to the node where the reader stands, and grow there; "" grows on as it is."""
    node = kept.at
    Out.of(sys.stderr).line((f"continuing node {kept.number(node)} of {kept.name}", "dim"))
    wish = wish.with_settings_of(node)
    if special and not text:
        raise ConfigError("--special is about the text that is said to the node; give one")
    if text:
        node = say(lm, node, text, chat=chat, special=special)
    grow_and_report(lm, kept, node, wish)


def make_loom(
    lm: LM, text: str, chat: bool | None, system: str | None, *, special: bool = False
) -> Loom:
    """Return the loom of a prompt; `chat` true insists on the chat template."""
    from ..loom import Loom

    is_chat = chat or (chat is None and lm.text.chat_template is not None)
    if is_chat:
        refuse_special(special)
    if chat and text:
        return Loom(lm, [{"role": "user", "content": text}], system=system)
    return Loom(lm, text, template=chat is None, special=special, system=system)
