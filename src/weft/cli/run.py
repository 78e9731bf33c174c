"""`weft run`: n branches from one prompt."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .failures import INTERRUPTED, guarded
from .lanes import Lanes, Printer, Silent, Watcher, watch
from .model import TINY, load_model
from .out import Out
from .picture import Picture

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Heddle, Loom

LONG = 60  # a prompt above this is not repeated in `next:`


@guarded
def run(
    prompt: options.Prompt = None,
    n: Annotated[int, typer.Option("-n", help="How many branches.")] = 4,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="New tokens a branch, at most.", show_default="256"),
    ] = None,
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
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="A system message.", show_default=False)
    ] = None,
    temperature: options.Temperature = None,
    top_p: Annotated[float | None, typer.Option(help="Keep this much probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest; 0: all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop what is this much less likely than the best.")
    ] = None,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="Text that ends a branch; may be given again."),
    ] = None,
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
) -> None:
    """Grow branches from a prompt, show them as they come, and draw the tree."""
    sampling = options.given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
    )
    text = options.read_prompt(prompt)
    with load_model(model, engine, kv_budget) as lm:
        loom = make_loom(lm, text, chat, system)
        out = Out.of(sys.stdout)
        stream = loom.stream(n=n, **sampling)
        done = watch(_watcher(out, n, len(loom.tokens), as_json), stream)
        if as_json:
            print(json.dumps(as_object(lm, model, loom), ensure_ascii=False, allow_nan=False))
        else:
            _report(out, lm, loom)
            if done:
                _advise(model, loom.children)
                _suggest(loom, model, chat)
    if not done:
        Out.of(sys.stderr).line("interrupted: the branches are as far as they came")
        raise typer.Exit(INTERRUPTED)


def make_loom(lm: LM, text: str, chat: bool | None, system: str | None) -> Loom:
    """Return the loom of a prompt; `chat` true insists on the chat template."""
    from ..loom import Loom

    if chat and text:
        return Loom(lm, [{"role": "user", "content": text}], system=system)
    return Loom(lm, text, template=chat is None, system=system)


def as_object(lm: LM, model: str, loom: Loom) -> dict[str, Any]:
    """Return the result for --json."""
    params = loom.children[0].params if loom.children else None
    return {
        "model": model,
        "engine": lm.info.name,
        "prompt": loom.user_prompt,
        "chat_template_used": loom.chat_template_used,
        "prompt_tokens": len(loom.tokens),
        "params": params.to_dict() if params is not None else None,
        "branches": [branch_object(number, node) for number, node in branches_of(loom)],
        "stats": stats_object(lm),
    }


def branches_of(loom: Loom) -> list[tuple[int, Heddle]]:
    """Return the branches with their numbers, 1 first: the order in which they were asked for."""
    numbers = {node.lineage[0] + 1: node for node in loom.children}
    return sorted(numbers.items())


def branch_object(number: int, node: Heddle) -> dict[str, Any]:
    """Return one branch for --json; a branch without tokens has no mean."""
    return {
        "branch": number,
        "text": node.text,
        "token_ids": node.tokens,
        "logprobs": node.logprobs,
        "mean_logprob": node.mean_logprob if node.logprobs else None,
        "finish_reason": node.finish_reason,
        "stop_string": node.stop_string,
    }


def stats_object(lm: LM) -> dict[str, Any]:
    """Return the LM's figures for --json."""
    from dataclasses import asdict

    return asdict(lm.stats())


def next_line(out: Out, *commands: Sequence[str]) -> None:
    """Write commands to try next; each is one that exists."""
    for number, command in enumerate(commands):
        typed = " ".join(map(quoted, command))
        out.line(("      " if number else "next: ", "bold"), (typed, "cyan"))


def quoted(argument: str) -> str:
    """Return an argument as one types it: in double quotes where every shell takes them."""
    safe = shlex.quote(argument)
    return safe if safe == argument or set(argument) & set('"$`\\!%') else f'"{argument}"'


def _watcher(out: Out, n: int, n_prompt: int, as_json: bool) -> Watcher:
    if as_json:
        return Silent()
    if out.is_live:
        return Lanes(out, n, f"reading the prompt of {n_prompt} tokens …")
    return Printer(out, n)


def _report(out: Out, lm: LM, loom: Loom) -> None:
    branches = branches_of(loom)
    if out.is_live:
        _show_texts(out, branches)
    else:
        out.line()
    out.lines(Picture(out, {node.id: number for number, node in branches}).lines(loom))
    out.line()
    out.facts(str(lm.stats()))


def _show_texts(out: Out, branches: Sequence[tuple[int, Heddle]]) -> None:
    """Write out what does not fit into the tree's lines; equal texts once."""
    numbers: dict[str, list[str]] = {}
    for number, node in branches:
        numbers.setdefault(node.text.strip("\n"), []).append(str(number))
    if all("\n" not in text and len(text) < out.width - 40 for text in numbers):
        return
    for text, same in numbers.items():
        out.block(" ".join(same), text)
        out.line()


def _advise(model: str, branches: Sequence[Heddle]) -> None:
    """Say what to try when the branches are all empty or all equal."""
    if len({node.text for node in branches}) > 1 or (len(branches) < 2 and branches[0].text):
        return
    small = "; tiny is a small demo model" if model == TINY else ""
    what = "all branches are equal" if branches and branches[0].text else "nothing came"
    Out.of(sys.stderr).line((f"{what}{small}: try --temperature 1.5, or another prompt", "yellow"))


def of_model(model: str) -> list[str]:
    """Return what makes a command ask this model again."""
    return [] if model == TINY else ["-m", model]


def _suggest(loom: Loom, model: str, chat: bool | None) -> None:
    from .. import samples
    from ..search import Game24

    out, asked = Out.of(sys.stderr), loom.user_prompt
    if len(asked) > LONG or not out.is_as_typed(asked):
        asked = samples.story
    same = [*of_model(model), *([] if chat is None else ["--chat" if chat else "--raw"])]
    puzzle = asked if Game24.read(asked) is not None else samples.game24
    next_line(
        out,
        ["weft", "run", asked, "-n", "8", "--temperature", "1.2", *same],
        ["weft", "solve", puzzle],
    )
